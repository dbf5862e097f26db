"""Rows times matrices in the forms of checkpoints: in C as decoded in torch, for all numbers of rows, whatever lies beside."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from h2o_flexgen.formats.blocked import Blocked
from h2o_flexgen.formats.kernel_table import FUSED
from h2o_flexgen.formats.table import Stored
from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.stored_product import stored_dots, stored_pairs, stored_pairs_twin, stored_product, stored_product_twin
from h2o_flexgen.kernels.stored_values import stored_decode_twin
from tests.helpers.all_of import all_of
from tests.kernels.stored import SOME, inputs_of, random_matrix
from tests.kernels.variants import VARIANTS, WITH_PAIRS, used

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}  # of the sum of what is added up: one rounding
SHAPES = [(1, 32), (3, 100), (97, 300), (33, 1024)]  # outputs, and inputs that are filled up to those of a form
ROWS = (*range(1, 9), 13, 40)
PRODUCTS = [stored_dots, stored_product]
Product = Callable[[Stored, Factor, Tensor, int, Tensor | None], Tensor]
forms = all_of({"format": SOME})
products = pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: product.__name__)


def x_of(rows: int, inputs: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows + inputs)).to(dtype)


def near(found: Tensor, expected: Tensor, format: Stored, x: Tensor, data: Tensor, outputs: int) -> bool:
    eye = torch.eye(x.shape[-1])
    values = stored_product_twin(format, Factor(eye), data, outputs, None).T
    summed = functional.linear(x.double().abs(), values.double().abs()) + 4
    close = (found.double() - expected.double()).abs() <= TOLERANCES[x.dtype] * summed
    return found.shape == expected.shape and found.dtype == expected.dtype == x.dtype and bool(close.all())


@pytest.mark.parametrize("variant", VARIANTS)
@products
@forms
def test_c_and_torch_agree(variant: str, product: Product, format: Stored) -> None:
    for (outputs, least), dtype, rows in zip(SHAPES, (*TOLERANCES, torch.float32), (1, 7, 30, 5)):
        inputs = inputs_of(format, least)
        data, x = random_matrix(format, outputs, inputs), x_of(rows, inputs, dtype).view(rows, 1, inputs)
        bias = x_of(1, outputs, dtype)[0] if rows % 2 else None
        with used(variant):
            found = product(format, Factor(x), data, outputs, bias)
        expected = stored_product_twin(format, Factor(x), data, outputs, bias)
        assert near(found, expected, format, x, data, outputs), (outputs, inputs)


@pytest.mark.parametrize("variant", WITH_PAIRS)
@forms
def test_pairs_and_torch_agree(variant: str, format: Stored) -> None:
    for (outputs, least), rows in zip(SHAPES, (1, 7, 30, 5)):
        inputs = inputs_of(format, least)
        x, bias = x_of(rows, inputs, torch.bfloat16), x_of(1, outputs, torch.bfloat16)[0]
        data = random_matrix(format, outputs, inputs)
        with used(variant):
            found = stored_pairs(format, Factor(x), data, outputs, bias)
            in_company = [stored_pairs(format, Factor(x[-some:]), data, outputs, bias) for some in range(1, rows)]
        expected = stored_pairs_twin(format, Factor(x), data, outputs, bias)
        assert near(found, expected, format, x, data, outputs), (outputs, inputs)
        assert all(torch.equal(part, found[-len(part) :]) for part in in_company)


@pytest.mark.parametrize("variant", WITH_PAIRS)
@forms
def test_pairs_of_many_rows_meet_the_values_that_decoding_gives(variant: str, format: Stored) -> None:
    outputs, inputs = 300, inputs_of(format, 400)  # more than panels and blocks of rows that are multiplied together
    data, ones = random_matrix(format, outputs, inputs), torch.eye(inputs, dtype=torch.bfloat16)
    decoded = torch.empty(outputs, inputs, dtype=torch.bfloat16)
    stored_decode_twin(format, data, decoded)
    with used(variant):
        found = stored_pairs(format, Factor(ones), data, outputs, None)
        in_company = [stored_pairs(format, Factor(ones[-some:]), data, outputs, None) for some in (9, 33, 64, 385)]
    assert torch.equal(found, decoded.T)
    assert all(torch.equal(part, found[-len(part) :]) for part in in_company)


@pytest.mark.parametrize("variant", WITH_PAIRS)
@forms
def test_one_block_or_two_meet_the_values_of_every_stretch(variant: str, format: Stored) -> None:
    """More stretches of inputs than are held at once, and more outputs than a panel has. Only with 35 rows, of these, are the
    halves of the second block as long as each other and those of the first are not."""
    outputs, inputs = 40, inputs_of(format, 600)
    data, ones = random_matrix(format, outputs, inputs), torch.eye(inputs, dtype=torch.bfloat16)
    decoded = torch.empty(outputs, inputs, dtype=torch.bfloat16)
    stored_decode_twin(format, data, decoded)
    for rows in (20, 32, 35, 48):
        whole = ones[: inputs // rows * rows]
        with used(variant):
            found = [stored_pairs(format, Factor(some), data, outputs, None) for some in whole.split(rows)]
        assert torch.equal(torch.cat(found), decoded.T[: len(whole)]), rows


@products
@forms
def test_a_row_comes_out_the_same_in_any_company_and_library(product: Product, format: Stored) -> None:
    outputs, inputs = 37, inputs_of(format, 300)
    data, x = random_matrix(format, outputs, inputs), x_of(max(ROWS), inputs)
    found = {}
    for variant in VARIANTS:
        with used(variant):
            found[variant] = product(format, Factor(x), data, outputs, None)
            for rows in ROWS:
                part = product(format, Factor(x[-rows:]), data, outputs, None)
                assert torch.equal(part, found[variant][-rows:]), (variant, rows)
    fused = [found[variant] for variant in VARIANTS if variant in FUSED]
    assert all(torch.equal(one, fused[0]) for one in fused)


@pytest.mark.parametrize("variant", VARIANTS)
@products
def test_threads_change_nothing(variant: str, product: Product) -> None:
    data, before = random_matrix(SOME[0], 130, 320), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            with used(variant):
                found.append(product(SOME[0], Factor(x_of(5, 320)), data, 130, None))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("variant", VARIANTS)
@products
@forms
def test_what_is_no_number_stays_none(variant: str, product: Product, format: Stored) -> None:
    """In rows, and in the scale of an output."""
    inputs = inputs_of(format, 130)
    data = random_matrix(format, 20, inputs)
    for value in (nan, inf, -inf):
        x = x_of(9, inputs)
        x[1, inputs - 1] = value
        with used(variant):
            found = product(format, Factor(x), data, 20, None)
        assert not found[1].isfinite().any() and found[0].isfinite().all() and found[2:].isfinite().all()
    if isinstance(format, Blocked) and format.name != "mxfp4":
        scale = data[3, 208:210] if format.name == "q6_K" else data[3, :2]
        for broken in (nan, inf):
            scale.copy_(torch.tensor([broken], dtype=torch.float16).view(torch.uint8))
            with used(variant):
                found = product(format, Factor(x_of(9, inputs)), data, 20, None)
            assert not found[:, 3].isfinite().any() and found[:, :3].isfinite().all() and found[:, 4:].isfinite().all()


@pytest.mark.parametrize("variant", VARIANTS)
@products
def test_no_rows_come_to_nothing(variant: str, product: Product) -> None:
    with used(variant):
        assert product(SOME[0], Factor(torch.empty(0, 64)), random_matrix(SOME[0], 20, 64), 20, None).shape == (0, 20)
