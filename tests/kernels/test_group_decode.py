"""Decoding in C gives the bits that torch gives."""

from __future__ import annotations

import pytest
import torch

from h2o_flexgen.formats.grouped import Grouped
from h2o_flexgen.kernels.group_codes import group_decode_twin
from h2o_flexgen.kernels.operations import decode, encode
from tests.helpers.all_of import all_of
from tests.kernels.variants import VARIANTS, used, without


@pytest.mark.parametrize("variant", VARIANTS)
@all_of(
    {
        "bits": [4, 8],
        "dtype": [torch.float32, torch.bfloat16, torch.float16],
        "shape": [(1, 64), (37, 640), (5, 130), (3, 1), (64, 63), (200, 4096)],
    }
)
def test_c_gives_the_bits_of_torch(variant: str, bits: int, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    data = packed(torch.randn(shape) * torch.logspace(-8, 8, shape[0])[:, None], bits)
    ours, twin = (torch.full(shape, 7.0, dtype=dtype) for _ in range(2))
    with used(variant), without("group_decode_twin"):
        decode(Grouped(bits).name, data, ours)
    group_decode_twin(Grouped(bits), data, twin)
    assert torch.equal(ours.view(torch.uint8), twin.view(torch.uint8))


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_is_written_behind_the_last_value(variant: str) -> None:
    room = torch.full((3 * 70 + 64,), 7.0)
    with used(variant):
        decode("group4", packed(torch.randn(3, 70), 4), room[: 3 * 70].view(3, 70))
    assert (room[3 * 70 :] == 7.0).all() and (room[: 3 * 70] != 7.0).all()


def packed(values: torch.Tensor, bits: int) -> torch.Tensor:
    """(rows, bytes of a row)"""
    data = torch.empty(Grouped(bits).nbytes(tuple(values.shape), 4), dtype=torch.uint8)
    encode(Grouped(bits).name, values, data)
    return data.view(len(values), -1)
