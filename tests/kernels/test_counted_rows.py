"""Products of rows that memory counts are, bit by bit, those of rows that are known, however many each matrix gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from h2o_flexgen.formats.kernel_table import INT8_PRODUCT, PRODUCT
from h2o_flexgen.kernels.factor import CountedRows, Factor
from h2o_flexgen.kernels.matrix import Matrix, SteadyMatrix, counted_linear_of_each, linear_of_each
from h2o_flexgen.kernels.operations import add_weighted, clamped_silu_of_each, gated_relu_squared_of_each, gated_silu_of_each
from h2o_flexgen.kernels.recording import CallRecording, CannotBeRecorded, WorkingRoom
from tests.kernels.test_several_products import INPUTS, OUTPUTS, matrix_of
from tests.kernels.variants import VARIANTS, used

MATRICES, MOST, ROOM = 6, 40, 90
COUNTS = ((1, 0, 17, 3, 40, 9), (0, 0, 0, 0, 0, 0), (0, 2, 0, 0, 1, 0), (40, 8, 9, 16, 17, 0), (33, 0, 32, 0, 6, 7))
FORMS = ("plain", "tiles4", "tiles8", "q4_0", "q8_0", "q5_1", "fp4-32", "fp8-128x128-float32")


def begins_of(counts: Sequence[int]) -> Tensor:
    return torch.tensor([*accumulate(counts, initial=0), 0])


def recorded(counts: CountedRows, work: Callable[[], object]) -> Callable[[Sequence[int]], None]:
    """A program that is told how many rows there are."""
    program = CallRecording.of(work, WorkingRoom())

    def replay(own: Sequence[int]) -> None:
        counts.begins.copy_(begins_of(own))
        program()

    return replay


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_rows_that_are_known(variant: str, form: str, dtype: torch.dtype) -> None:
    x = torch.randn(sum(COUNTS[3]) + 20, INPUTS, generator=torch.Generator().manual_seed(1)).to(dtype)
    biases = [None if form == "plain" else torch.full((OUTPUTS,), 0.5 * at).to(dtype) for at in range(MATRICES)]
    counted = CountedRows(begins_of([0] * MATRICES), MATRICES, MOST)
    for product in (PRODUCT, INT8_PRODUCT):
        own = [matrix_of(form, number, product, dtype) for number in range(MATRICES)]
        check(x, counted, list(zip(own, biases)), variant)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_so_are_those_of_plain_matrices_beside_rounded_ones(dtype: torch.dtype) -> None:
    x = torch.randn(sum(COUNTS[3]) + 20, INPUTS, generator=torch.Generator().manual_seed(1)).to(dtype)
    own = [SteadyMatrix(torch.randn(OUTPUTS, INPUTS).to(dtype)) for number in range(MATRICES)]
    check(x, CountedRows(begins_of([0] * MATRICES), MATRICES, MOST), [(each, None) for each in own], VARIANTS[0])


def check(x: Tensor, counted: CountedRows, matrices: list[tuple[Matrix, Tensor | None]], variant: str) -> None:
    out = x.new_empty(len(x), OUTPUTS)
    with used(variant):
        replay = recorded(counted, lambda: out.copy_(counted_linear_of_each(Factor(x, counted), matrices)))
        for counts in COUNTS:
            replay(counts)
            firsts, there = accumulate(counts, initial=0), sum(counts)
            meetings = [(first, rows, *own) for first, rows, own in zip(firsts, counts, matrices) if rows]
            assert not there or torch.equal(out[:there], linear_of_each(Factor(x[:there]), meetings)), counts


def test_what_no_kernel_multiplies_is_not_recorded() -> None:
    x, counted = torch.randn(8, INPUTS), CountedRows(begins_of([0, 0]), 2, MOST)
    for forms in (("group4", "group4"), ("tiles4", "q8_0"), ("int4-32-float16-zeros-ordered",) * 2):
        own = [(matrix_of(form, 1, PRODUCT, x.dtype), None) for form in forms]
        with used(VARIANTS[0]), pytest.raises(CannotBeRecorded):
            CallRecording.of(lambda own=own: counted_linear_of_each(Factor(x, counted), own), WorkingRoom())  # type: ignore[misc]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_and_sums_are_those_of_rows_that_are_known(variant: str, dtype: torch.dtype) -> None:
    made, counted = torch.Generator().manual_seed(4), CountedRows(begins_of([0] * MATRICES), MATRICES, MOST)
    gate, up, other = (torch.randn(ROOM, INPUTS, generator=made).mul(4).to(dtype) for _ in range(3))
    weights, to, sums = (
        torch.rand(ROOM, generator=made),
        torch.randint(MOST, (ROOM,), generator=made),
        torch.zeros(MOST, INPUTS),
    )

    def computed(counts: Sequence[int] | CountedRows, there: int) -> None:
        silu = gated_silu_of_each(gate[:there].clone(), up[:there], counts)
        clamped = clamped_silu_of_each(other[:there].clone(), up[:there].clone(), counts, 7.0, 1.702)
        squared = gated_relu_squared_of_each(other[:there].clone(), counts)
        for rows in (silu, clamped, squared):
            add_weighted(sums, rows, weights[:there], to[:there], counts)

    with used(variant):
        replay = recorded(counted, lambda: computed(counted, ROOM))
        for counts in COUNTS[:3]:
            sums.zero_()
            replay(counts)
            found = sums.clone()
            sums.zero_()
            computed(counts, sum(counts))
            assert torch.equal(found, sums), counts
