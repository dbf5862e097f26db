"""What a site computes with packed bytes as they lie, and the room that it needs where it does not."""

from __future__ import annotations

from math import inf

import pytest

from h2o_flexgen.core.site import Site
from h2o_flexgen.formats.kernel_sizes import twin_values
from h2o_flexgen.formats.kernel_table import (
    CPU,
    CUDA,
    INT8_PRODUCT,
    PRODUCT,
    PROMPT_ATTENTION,
    ROWS_OF_TILES,
    TORCH,
    TRITON,
    Processor,
)
from h2o_flexgen.formats.table import MATRIX_FORMATS
from h2o_flexgen.planning.working_space import _values_at_once

KERNELS, TWINS = (Site(accelerator=True, processor=Processor(CUDA, build), threads=3) for build in (TRITON, TORCH))


@pytest.mark.parametrize("form", MATRIX_FORMATS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_on_a_gpu_few_rows_meet_packed_bytes_and_many_meet_decoded_values(form: str, dtype: str) -> None:
    assert KERNELS.reads(PRODUCT, form, dtype, ROWS_OF_TILES) and not TWINS.reads(PRODUCT, form, dtype)
    assert not KERNELS.reads(PRODUCT, form, dtype, inf), "so there is room for what is decoded"
    assert all(site.reads(INT8_PRODUCT, form, dtype, inf) for site in (KERNELS, TWINS))
    assert KERNELS.has_kernel(INT8_PRODUCT, dtype, form) and not TWINS.has_kernel(INT8_PRODUCT, dtype, form)


def test_a_gpu_needs_no_room_of_the_kernels_in_c() -> None:
    assert KERNELS.threads_of(PROMPT_ATTENTION, "float16") == TWINS.threads_of(PROMPT_ATTENTION, "float16") == 0


def test_twins_work_on_more_at_once_where_each_part_is_a_dozen_launches_and_that_is_counted() -> None:
    assert _values_at_once(TWINS) == twin_values(CUDA) > twin_values(CPU) == _values_at_once(KERNELS) == _values_at_once(Site())
