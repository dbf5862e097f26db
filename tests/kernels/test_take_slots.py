"""Slots that are taken in C are those that torch takes, bit for bit."""

from __future__ import annotations

import pytest
import torch

from h2o_flexgen.kernels.evict import take_slots_twin
from h2o_flexgen.kernels.functions import FUNCTIONS
from h2o_flexgen.kernels.operations import take_slots
from tests.helpers.all_of import all_of
from tests.kernels.variants import VARIANTS, never, used


@pytest.mark.parametrize("variant", VARIANTS)
@all_of(
    {
        "dtype": [torch.bfloat16, torch.float32, torch.uint8],
        "shape": [(3, 4, 50, 64, 9), (1, 1, 1, 5, 1), (2, 3, 17, 36, 40), (2, 2, 6, 8, 0)],
        "index_heads": ["each", "all"],
    }
)
def test_c_takes_what_torch_takes_and_nothing_else(
    variant: str, dtype: torch.dtype, shape: tuple[int, ...], index_heads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, heads, slots, width, count = shape
    draw = torch.Generator().manual_seed(sum(shape))
    source = torch.randint(0, 200, (rows, slots, heads, width), generator=draw).to(dtype).transpose(1, 2)
    index = torch.randint(0, slots, (rows, heads if index_heads == "each" else 1, count + 2), generator=draw)[..., 2:]
    room, expected = (torch.full((rows, heads, count + 3, width), 7).to(dtype) for _ in range(2))
    monkeypatch.setitem(FUNCTIONS, "take_slots_twin", never)
    with used(variant):
        take_slots(source, index, room[:, :, 1 : count + 1])
    take_slots_twin(source, index, expected[:, :, 1 : count + 1])
    assert torch.equal(room, expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_values_that_lie_apart_are_taken_as_well(variant: str) -> None:
    """C reads those of a slot side by side."""
    apart, out = torch.randn(1, 1, 8, 4).transpose(2, 3), torch.empty(1, 1, 2, 8)
    with used(variant):
        take_slots(apart, torch.tensor([[[3, 0]]]), out)
    assert torch.equal(out, apart[:, :, [3, 0]])
