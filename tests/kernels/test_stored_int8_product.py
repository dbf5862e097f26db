"""Products of rows of int8 with matrices in forms of checkpoints: the same bits in every library as in torch, for any number of
rows and threads, and near those of the values."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from h2o_flexgen.formats.blocked import Blocked
from h2o_flexgen.formats.int4 import INT4, Int4
from h2o_flexgen.formats.mxfp4 import MXFP4_SECTIONS, Fp4
from h2o_flexgen.formats.table import BLOCKED
from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.stored_product import part_of, stored_int8_product, stored_int8_product_twin
from h2o_flexgen.kernels.stored_values import blocked_parts, sectioned_parts
from tests.helpers.all_of import all_of
from tests.kernels.stored import random_matrix
from tests.kernels.variants import VARIANTS, used

Whole = Blocked | Fp4 | Int4
FORMS: tuple[Whole, ...] = (*BLOCKED, MXFP4_SECTIONS, *INT4)
# one of each kind of loop, with every number of rows; the others are held to the twin with some
KINDS = [Int4(64, "float16", False, False), Int4(128, "bfloat16", True, True), *BLOCKED]
ROWS = (*range(1, 8), *range(17, 33), 64, 258)


def values_of(format: Whole, data: Tensor, outputs: int, inputs: int) -> Tensor:
    if isinstance(format, Blocked):
        return blocked_parts(format, data).values
    return sectioned_parts(format, data, outputs, inputs).values


def x_of(rows: int, inputs: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows + inputs)).to(dtype)


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.nan_to_num(nan=-1e30), other.nan_to_num(nan=-1e30))


def least_inputs(format: Whole) -> int:
    """Inputs that are no whole number of groups of x, if there can be such."""
    return format.values * 3 if isinstance(format, Blocked) else format.group * 3


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"format": KINDS})
def test_c_and_torch_agree_for_any_number_of_rows(variant: str, format: Whole) -> None:
    least = least_inputs(format)
    for outputs, inputs in ((1, least // 3), (1, least), (35, 512), (66, 768 + least % 256)):
        data, x = random_matrix(format, outputs, inputs), x_of(max(ROWS), inputs)
        expected = stored_int8_product_twin(format, Factor(x), data, outputs, None)
        with used(variant):
            for rows in ROWS:
                assert same(stored_int8_product(format, Factor(x[:rows]), data, outputs, None), expected[:rows])


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_form_is_multiplied_as_torch_does(variant: str) -> None:
    for format in FORMS:
        inputs = least_inputs(format)
        data, x, bias = random_matrix(format, 20, inputs), x_of(3, inputs, torch.bfloat16).view(3, 1, -1), x_of(1, 20)[0]
        expected = stored_int8_product_twin(format, Factor(x), data, 20, bias)
        with used(variant):
            found = stored_int8_product(format, Factor(x), data, 20, bias)
        assert found.shape == (3, 1, 20) and found.dtype == torch.bfloat16 and same(found, expected), format


@all_of({"format": FORMS})
def test_the_product_is_near_that_of_the_values(format: Whole) -> None:
    inputs = least_inputs(format)
    data, x = random_matrix(format, 40, inputs), x_of(20, inputs)
    exact = x @ values_of(format, data, 40, inputs).T
    found = stored_int8_product_twin(format, Factor(x), data, 40, None)
    assert (found - exact).norm() < 0.01 * exact.norm() and part_of(format) in (16, 32, 64)


@pytest.mark.parametrize("variant", VARIANTS)
def test_extreme_codes_do_not_saturate(variant: str) -> None:
    """All codes are the largest or the least and x has the largest magnitude: sums reach their limits."""
    for format in KINDS:
        for byte, sign in itertools.product((0, 255), (1.0, -1.0)):
            data, x = random_matrix(format, 17, 256), torch.full((17, 256), sign)
            codes = data.view(17, -1, format.block_bytes)[..., -16:] if isinstance(format, Blocked) else data[:, : 17 * 128]
            codes.fill_(byte)
            if format.name == "q6_K":
                data[:, :192], data[:, 208:] = byte, random_matrix(format, 17, 256)[:, 208:]
            with used(variant):
                found = stored_int8_product(format, Factor(x), data, 17, None)
            assert same(found, stored_int8_product_twin(format, Factor(x), data, 17, None)), format


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"wrong": [float("nan"), float("inf")]})
def test_what_is_not_finite_stays_so(variant: str, wrong: float) -> None:
    format = KINDS[2]
    data, x = random_matrix(format, 20, 160), x_of(3, 160)
    x[1, 159] = wrong
    data[5, :2] = torch.tensor([wrong], dtype=torch.float16).view(torch.uint8)
    with used(variant):
        found = stored_int8_product(format, Factor(x), data, 20, None)
    assert same(found, stored_int8_product_twin(format, Factor(x), data, 20, None))
    assert not found[1].isfinite().any() and not found[:, 5].isfinite().any()
    assert found[0, :5].isfinite().all() and found[2, 6:].isfinite().all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_threads_change_nothing(variant: str) -> None:
    data, x, before = random_matrix(KINDS[2], 130, 320), x_of(9, 320), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            with used(variant):
                found.append(stored_int8_product(KINDS[2], Factor(x), data, 130, None))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_rows_are_no_rows(variant: str) -> None:
    with used(variant):
        assert stored_int8_product(KINDS[2], Factor(torch.empty(0, 64)), random_matrix(KINDS[2], 8, 64), 8, None).shape == (
            0,
            8,
        )
