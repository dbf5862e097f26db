"""A packed matrix multiplies as its values do, and is decoded no more than once for all that ask."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from torch.nn import functional

from h2o_flexgen.formats.grouped import TILE
from h2o_flexgen.formats.kernel_table import INT8_PRODUCT
from h2o_flexgen.formats.table import FORMATS, PLAIN, STORED, TILED
from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.matrix import DecodeBuffer, PackedMatrix, SteadyMatrix, linear_of_each, linear_of_parts
from h2o_flexgen.kernels.operations import decode, encode, plain_product
from tests.helpers.inverted import Inverted, registered
from tests.helpers.refusals import one_line
from tests.kernels.stored import random_matrix
from tests.kernels.variants import VARIANTS, used

INPUTS, FEW = 128, 2


@pytest.fixture
def inverted() -> Iterator[Inverted]:
    """A codec whose few rows are multiplied with its bytes."""
    with registered(Inverted(few_rows=FEW)) as format:
        yield format


def room(outputs: int) -> DecodeBuffer:
    return DecodeBuffer(torch.empty(outputs, INPUTS))


def matrix(format: str, outputs: int, room: DecodeBuffer | None) -> PackedMatrix:
    units = -(-outputs // FORMATS[format].rows_together)
    data = torch.empty(FORMATS[format].nbytes((outputs, INPUTS), 4), dtype=torch.uint8).view(units, -1)
    encode(format, torch.randn(outputs, INPUTS), data)
    return PackedMatrix(data, format, outputs, room)


def test_it_is_decoded_once_until_its_room_is_taken_or_its_bytes_are_others(inverted: Inverted) -> None:
    shared = room(9)
    first, second = (matrix(inverted.name, outputs, shared) for outputs in (9, 5))
    x = Factor(torch.randn(FEW + 1, INPUTS))
    expected = [plain_product(x, one.values().clone(), None) for one in (first, second)]
    assert inverted.decoded == 14 * INPUTS
    for one, wanted in ((second, 1), (second, 1), (first, 0), (first, 0), (second, 1)):
        assert torch.equal(one.linear(x, None), expected[wanted])
    assert inverted.decoded == 28 * INPUTS
    second.renew()
    second.values()
    assert inverted.decoded == 33 * INPUTS and inverted.multiplied == 0


def test_what_a_kernel_multiplies_is_not_decoded_and_needs_no_room(inverted: Inverted) -> None:
    one, x, bias = matrix(inverted.name, 9, None), torch.randn(FEW, 1, INPUTS), torch.randn(9)
    out = one.linear(Factor(x), bias)
    assert (inverted.decoded, inverted.multiplied) == (0, 1)
    decode(inverted.name, one.data, values := torch.empty(9, INPUTS))
    assert torch.equal(out, functional.linear(x, values, bias))


@pytest.mark.parametrize("rows", [0, 1])
def test_no_rows_are_multiplied_as_one_is(inverted: Inverted, rows: int) -> None:
    assert matrix(inverted.name, 9, None).linear(Factor(torch.empty(rows, INPUTS)), None).shape == (rows, 9)


@pytest.mark.parametrize("format", [format.name for format in TILED])
@pytest.mark.parametrize(("start", "stop"), [(0, TILE), (TILE, 2 * TILE), (2 * TILE, 39), (0, 39)])
def test_a_part_of_whole_units_has_its_rows(format: str, start: int, stop: int) -> None:
    whole = matrix(format, 39, room(39))
    part = whole.part(slice(start, stop), room(stop - start))
    assert part.outputs == stop - start and torch.equal(part.values(), whole.values()[start:stop])
    with pytest.raises(AssertionError):
        whole.part(slice(start + 1, stop), room(stop))


@pytest.mark.parametrize("format", [format.name for format in TILED])
def test_heads_that_do_not_begin_where_units_do_are_refused(format: str) -> None:
    x, (heads, rows) = torch.randn(2, 3, INPUTS), (2, TILE + 4)
    said = one_line(lambda: linear_of_parts(x, matrix(format, heads * rows, room(heads * rows))))
    assert f"2 heads with {rows} rows each is packed as {format}, in units of {TILE} rows" in said
    assert linear_of_parts(x, matrix(format, 2 * TILE, room(2 * TILE))).shape == (2, 3, TILE)


@pytest.mark.parametrize("has_room", [False, True])
def test_rounded_products_of_heads_are_never_made_of_values(has_room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a GPU values are decoded for all heads at once, where there is room; that must not change what is computed."""
    here = matrix("tiles8", 2 * TILE, None)
    there = replace(here, data=here.data.to("meta"), room=DecodeBuffer(torch.empty(2 * TILE, INPUTS, device="meta")))
    x, room = torch.empty(2, 3, INPUTS, device="meta"), there.room if has_room else None
    decode = Mock(return_value=there.values())
    monkeypatch.setattr(PackedMatrix, "values", decode)
    if has_room:
        assert linear_of_parts(x, there).shape == (2, 3, TILE) and decode.called
    decode.reset_mock()
    assert linear_of_parts(x, replace(there, product=INT8_PRODUCT, room=room)).shape == (2, 3, TILE) and not decode.called


def test_rows_that_matrices_share_are_made_ready_once() -> None:
    made, x = list[torch.Tensor](), Factor(torch.randn(3, 2, INPUTS))

    def ready(values: torch.Tensor) -> torch.Tensor:
        made.append(values)
        return values * 2

    first, second = (x.made(ready) for _ in range(2))
    assert first is second and made == [x.values] and x.rows == 6
    assert x.made(torch.neg) is not first


BESIDE_ROUNDED = PLAIN, "tiles4", "tiles8", "q4_0", "q6_K", "fp8-128x128-float32"


def beside_rounded(form: str, outputs: int, inputs: int, dtype: torch.dtype) -> PackedMatrix | SteadyMatrix:
    """A matrix of a model whose products are rounded where they can be."""
    format, values = FORMATS[form], torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(1))
    if form == PLAIN:
        return SteadyMatrix(values.to(dtype))
    if format in STORED:
        data = random_matrix(format, outputs, inputs)
    else:
        units = -(-outputs // format.rows_together)
        data = torch.empty(format.nbytes((outputs, inputs), 4), dtype=torch.uint8).view(units, -1)
        encode(form, values, data)
    return PackedMatrix(data, form, outputs, None, INT8_PRODUCT)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("form", BESIDE_ROUNDED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_beside_rounded_products_a_row_has_the_same_bits_in_any_company(variant: str, form: str, dtype: torch.dtype) -> None:
    one = beside_rounded(form, 40, 256, dtype)
    x = torch.randn(70, 256, generator=torch.Generator().manual_seed(2)).to(dtype)
    with used(variant):
        together = one.linear(Factor(x), None)
        for rows in (1, 2, 9, 17, 33):
            assert torch.equal(one.linear(Factor(x[-rows:]), None), together[-rows:]), rows
        assert torch.equal(linear_of_each(Factor(x), [(0, 1, one, None), (1, 69, one, None)]), together)
