"""Encoding in C gives the bytes that torch gives."""

from __future__ import annotations

import pytest
import torch

from h2o_flexgen.formats.grouped import Grouped
from h2o_flexgen.kernels import group_codes as module
from h2o_flexgen.kernels.group_codes import group_encode_twin
from h2o_flexgen.kernels.operations import encode
from tests.helpers.all_of import all_of
from tests.kernels.variants import VARIANTS, used, without

SHAPES = [(1, 64), (37, 640), (5, 130), (3, 1), (64, 63), (200, 1024)]
SPREADS = {
    "of all sizes": lambda shape: torch.randn(shape) * torch.logspace(-30, 30, shape[0])[:, None],
    "far from zero": lambda shape: torch.randn(shape) * 0.01 - 300,
    "constant": lambda shape: torch.linspace(-3, 3, shape[0])[:, None].expand(shape).contiguous(),
    "nothing but zeros": lambda shape: torch.zeros(shape),
    "zeros of both signs": lambda shape: torch.zeros(shape).mul_(torch.randn(shape).sign()),
    "halves between codes": lambda shape: torch.randint(-30, 31, shape) / 2,
    "no numbers": lambda shape: torch.randn(shape) / torch.randint(0, 12, shape),
    "subnormal": lambda shape: torch.randn(shape) * 1e-39,
}


def room(values: torch.Tensor, bits: int) -> torch.Tensor:
    return torch.full((len(values), Grouped(bits).nbytes((1, values.shape[1]), 4)), 77, dtype=torch.uint8)


def encoded(values: torch.Tensor, bits: int) -> torch.Tensor:
    encode(Grouped(bits).name, values, out := room(values, bits))
    return out


def by_the_twin(values: torch.Tensor, bits: int) -> torch.Tensor:
    group_encode_twin(Grouped(bits), values, out := room(values, bits))
    return out


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"bits": [4, 8], "dtype": [torch.float32, torch.bfloat16, torch.float16], "spread": list(SPREADS)})
def test_c_gives_the_bytes_of_torch(variant: str, bits: int, dtype: torch.dtype, spread: str) -> None:
    torch.manual_seed(len(spread))
    for shape in SHAPES:
        values = SPREADS[spread](shape).to(dtype)
        with used(variant), without("group_encode_twin"):
            ours = encoded(values, bits)
        assert torch.equal(ours, by_the_twin(values, bits)), shape


@pytest.mark.parametrize("bits", [4, 8])
def test_parts_of_large_tensors_meet(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(50, 200)
    at_once = by_the_twin(values, bits)
    monkeypatch.setattr(module, "twin_values", lambda device: 700)
    assert torch.equal(by_the_twin(values, bits), at_once)


@pytest.mark.parametrize("variant", VARIANTS)
def test_strided_values_are_encoded_as_they_are_seen(variant: str) -> None:
    values = torch.randn(64, 30).T
    with used(variant), without("group_encode_twin"):
        assert torch.equal(encoded(values, 4), by_the_twin(values.contiguous(), 4))
