"""What a site computes with packed bytes as they lie, and the room that it needs where it does not."""

from __future__ import annotations

from math import inf

import pytest

from h2o_flexgen.core.site import Site
from h2o_flexgen.formats.kernel_sizes import twin_values
from h2o_flexgen.formats.kernel_table import (
    AMPERE,
    CPU,
    CUDA,
    HALVES,
    INT8_PRODUCT,
    PRODUCT,
    PRODUCTS_OF_SAME,
    PROMPT_ATTENTION,
    ROWS_BEFORE_DOTS,
    ROWS_OF_TILE_DOTS,
    ROWS_OF_TILES,
    TILE_DOTS,
    TORCH,
    TRITON,
    Processor,
    choose,
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


@pytest.mark.parametrize("form", ["tiles4", "tiles8"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("instructions", [HALVES, ()])
def test_some_rows_in_4_bits_meet_tensor_cores_where_a_gpu_has_them(
    form: str, dtype: str, instructions: tuple[str, ...]
) -> None:
    there = Processor(CUDA, TRITON, instructions)
    has_dots = form == "tiles4" and dtype in HALVES and AMPERE in instructions
    by_rows = (1, ROWS_BEFORE_DOTS), (ROWS_BEFORE_DOTS + 1, ROWS_OF_TILES), (ROWS_OF_TILES + 1, ROWS_OF_TILE_DOTS)
    few, some, many = ({function_of(there, form, dtype, rows) for rows in ends} for ends in by_rows)
    assert few == {"tile_product"} and some == {TILE_DOTS if has_dots else "tile_product"}
    assert many == {TILE_DOTS if has_dots else None} and function_of(there, form, dtype, ROWS_OF_TILE_DOTS + 1) is None
    of_same = choose(PRODUCTS_OF_SAME, form, dtype, there.runs, ROWS_OF_TILES)
    assert (of_same is None) == (form == "tiles4" and dtype in HALVES), "three matrices of some rows are three products then"


def function_of(there: Processor, form: str, dtype: str, rows: int) -> str | None:
    kernel = choose(PRODUCT, form, dtype, there.runs, rows)
    return None if kernel is None else kernel.function


def test_a_gpu_needs_no_room_of_the_kernels_in_c() -> None:
    assert KERNELS.threads_of(PROMPT_ATTENTION, "float16") == TWINS.threads_of(PROMPT_ATTENTION, "float16") == 0


def test_twins_work_on_more_at_once_where_each_part_is_a_dozen_launches_and_that_is_counted() -> None:
    assert _values_at_once(TWINS) == twin_values(CUDA) > twin_values(CPU) == _values_at_once(KERNELS) == _values_at_once(Site())
