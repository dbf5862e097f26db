"""A packed matrix multiplies as its values do, and is decoded no more than once for all that ask."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from h2o_flexgen.kernels.functions import FUNCTIONS, Function
from h2o_flexgen.kernels.matrix import DecodeBuffer, PackedMatrix
from h2o_flexgen.kernels.operations import encode
from h2o_flexgen.kernels.table import FEW_ROWS
from h2o_flexgen.quant.grouped import Grouped
from tests.kernels.variants import VARIANTS, used

INPUTS = 128


Rows = list[int]


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Rows:
    """Rows that were decoded, call by call."""
    found: Rows = []
    for name in ("group_decode", "group_decode_twin"):

        def counted(codec: Grouped, data: Tensor, out: Tensor, function: Function = FUNCTIONS[name]) -> None:
            function(codec, data, out)
            found.append(len(out))

        monkeypatch.setitem(FUNCTIONS, name, counted)
    return found


def matrix(outputs: int, room: DecodeBuffer) -> PackedMatrix:
    data = torch.empty(outputs, Grouped(4).nbytes((INPUTS,), 4), dtype=torch.uint8)
    encode("group4", torch.randn(outputs, INPUTS), data)
    return PackedMatrix(data, "group4", room)


def test_it_is_decoded_once_until_its_room_is_taken_or_its_bytes_are_others(decoded: Rows) -> None:
    room = DecodeBuffer(torch.empty(9, INPUTS))
    first, second = matrix(9, room), matrix(5, room)
    x = torch.randn(FEW_ROWS + 1, INPUTS)
    expected = [functional.linear(x, one.values().clone()) for one in (first, second)]
    assert decoded == [9, 5]
    for one, wanted in ((second, 1), (second, 1), (first, 0), (first, 0), (second, 1)):
        assert torch.equal(one.linear(x, None), expected[wanted])
    assert decoded == [9, 5, 9, 5]
    second.renew()
    second.values()
    assert decoded == [9, 5, 9, 5, 5]


@pytest.mark.parametrize("variant", VARIANTS)
def test_few_rows_are_multiplied_without_decoding(variant: str, decoded: Rows) -> None:
    one = matrix(9, DecodeBuffer(torch.empty(9, INPUTS)))
    x, bias = torch.randn(2, 1, INPUTS), torch.randn(9)
    with used(variant):
        out = one.linear(x, bias)
    assert decoded == [] and out.shape == (2, 1, 9)
    with used("torch"):
        assert torch.allclose(out, one.linear(x, bias), atol=1e-4)
    assert decoded == [9]
