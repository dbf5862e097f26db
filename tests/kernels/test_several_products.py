"""Products of rows that have matrices of their own are those of one matrix after the other, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from h2o_flexgen.formats.kernel_table import CPU, INT8_PRODUCT, PRODUCT, PRODUCT_OPS, TORCH, kernels
from h2o_flexgen.formats.table import FORMATS, STORED
from h2o_flexgen.kernels import matrix as matrices
from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.functions import SEVERAL
from h2o_flexgen.kernels.matrix import DecodeBuffer, PackedMatrix, linear_of_each
from h2o_flexgen.kernels.operations import encode
from tests.kernels.stored import random_matrix
from tests.kernels.variants import VARIANTS, used

OUTPUTS, INPUTS = 40, 192
COUNTS = (1, 17, 3, 40, 9, 1)  # rows that are few for some kernels and many for others
FORMS = ("plain", "group4", "tiles4", "tiles8", "q8_0", "fp4-32", "int4-32-float16-zeros-ordered")


def matrix_of(form: str, number: int, product: str, dtype: torch.dtype) -> PackedMatrix | Tensor:
    made = torch.Generator().manual_seed(number)
    values = torch.randn(OUTPUTS, INPUTS, generator=made).to(dtype)
    if form == "plain":
        return values
    format = FORMATS[form]
    if format in STORED:
        data = random_matrix(format, OUTPUTS, INPUTS, seed=number)
    else:
        data = torch.empty(format.nbytes((OUTPUTS, INPUTS), 0), dtype=torch.uint8).view(-(-OUTPUTS // format.rows_together), -1)
        encode(form, values, data)
    return PackedMatrix(data, form, OUTPUTS, DecodeBuffer(torch.empty(OUTPUTS, INPUTS, dtype=dtype)), product)


def alone(x: Tensor, matrix: PackedMatrix | Tensor, bias: Tensor | None) -> Tensor:
    if isinstance(matrix, Tensor):
        return matrices.plain_product(Factor(x), matrix, bias)
    return matrix.linear(Factor(x), bias)


def each(counts: Sequence[int], x: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    for first, rows in zip(accumulate(counts, initial=0), counts):
        yield first, rows, x[first : first + rows]


@pytest.mark.parametrize("variant", [*VARIANTS, TORCH])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_those_of_one_after_the_other(variant: str, form: str, dtype: torch.dtype) -> None:
    x = torch.randn(sum(COUNTS), INPUTS, generator=torch.Generator().manual_seed(1)).to(dtype)
    biases = [None if number % 2 else torch.full((OUTPUTS,), 0.5 * number).to(dtype) for number in range(len(COUNTS))]
    with used(variant):
        for product in (PRODUCT, INT8_PRODUCT):
            own = [matrix_of(form, number, product, dtype) for number in range(len(COUNTS))]
            meetings = [
                (first, rows, matrix, bias) for (first, rows, _), matrix, bias in zip(each(COUNTS, x), own, biases, strict=True)
            ]
            found = linear_of_each(Factor(x), meetings)
            expected = [alone(part, matrix, bias) for (_, _, part), matrix, bias in zip(each(COUNTS, x), own, biases)]
            assert found.dtype == dtype and torch.equal(found, torch.cat(expected)), product


def test_a_kernel_that_does_several_is_asked_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def counted(function: object) -> object:
        several = SEVERAL[function]  # type: ignore[index]
        return lambda format, x, meetings, out: (asked.append(len(meetings)), several(format, x, meetings, out))

    for function in list(SEVERAL):
        monkeypatch.setitem(SEVERAL, function, counted(function))
    x = torch.randn(sum(COUNTS), INPUTS)
    meetings = [(first, rows, matrix_of("tiles4", first, PRODUCT, x.dtype), None) for first, rows, _ in each(COUNTS, x)]
    with used(VARIANTS[0]):
        linear_of_each(Factor(x), meetings)
    assert asked == [len(COUNTS)]


def test_all_kernels_in_c_that_multiply_matrices_do_several_at_once() -> None:
    in_c = {kernel.function for kernel in kernels() if kernel.op in PRODUCT_OPS and kernel.device == CPU and kernel.libraries}
    assert in_c == {function.__name__ for function in SEVERAL}
