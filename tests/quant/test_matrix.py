"""A packed matrix multiplies as its values do, and is decoded no more than once for all that ask."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from h2o_flexgen.kernels.group_product import FEW_ROWS
from h2o_flexgen.quant.grouped import Grouped
from h2o_flexgen.quant.matrix import DecodeBuffer, PackedMatrix
from tests.kernels.variants import VARIANTS, used

INPUTS = 128


@dataclass(frozen=True)
class Counted(Grouped):
    decoded: list[int] = field(default_factory=list)  # rows, call by call

    def decode(self, data: Tensor, out: Tensor) -> None:
        super().decode(data, out)
        self.decoded.append(len(out))


def matrix(outputs: int, codec: Counted, room: DecodeBuffer) -> PackedMatrix:
    data = torch.empty(outputs, codec.nbytes((1, INPUTS), 4), dtype=torch.uint8)
    codec.encode(torch.randn(outputs, INPUTS), data.view(-1))
    return PackedMatrix(data, codec, room)


def test_it_is_decoded_once_until_its_room_is_taken_or_its_bytes_are_others() -> None:
    codec, room = Counted(4), DecodeBuffer(torch.empty(9, INPUTS))
    first, second = matrix(9, codec, room), matrix(5, codec, room)
    x = torch.randn(FEW_ROWS + 1, INPUTS)
    expected = [functional.linear(x, one.values().clone()) for one in (first, second)]
    assert codec.decoded == [9, 5]
    for one, wanted in ((second, 1), (second, 1), (first, 0), (first, 0), (second, 1)):
        assert torch.equal(one.linear(x, None), expected[wanted])
    assert codec.decoded == [9, 5, 9, 5]
    second.renew()
    second.values()
    assert codec.decoded == [9, 5, 9, 5, 5]


@pytest.mark.parametrize("variant", VARIANTS)
def test_few_rows_are_multiplied_without_decoding(variant: str) -> None:
    codec = Counted(4)
    one = matrix(9, codec, DecodeBuffer(torch.empty(9, INPUTS)))
    x, bias = torch.randn(2, 1, INPUTS), torch.randn(9)
    with used(variant):
        out = one.linear(x, bias)
    assert codec.decoded == [] and out.shape == (2, 1, 9)
    with used("torch"):
        assert torch.allclose(out, one.linear(x, bias), atol=1e-4)
    assert codec.decoded == [9]
