"""Slots that are chosen by kernels for GPUs: those that float64 would choose, where it tells them apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_flexgen.kernels.chosen_slots import choose_slots_twin
from h2o_flexgen.kernels.decode_attention import KVSlots
from h2o_flexgen.kernels.gpu import choose_slots as module
from h2o_flexgen.kernels.gpu import decode_attention
from h2o_flexgen.kernels.more_keys import More
from tests.helpers.pairwise import most_of
from tests.kernels.test_chosen_slots import ALWAYS, assert_best, drawn, index_of

SHAPES = [(2, 2, 1, 70, 64), (3, 1, 4, 60, 128), (1, 2, 3, 45, 80), (1, 1, 7, 40, 200)]  # rows, kv_heads, group, slots, dim
NEAR = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2.5e-3}  # keys are rounded to these before they are compared


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Chunks that are so short that few slots are several of them."""
    monkeypatch.setattr(decode_attention, "CHUNK", 32)
    decode_attention.launches_of.cache_clear()  # launches are kept by shape
    yield
    decode_attention.launches_of.cache_clear()


def chosen(
    gpu: torch.device, q: Tensor, index: KVSlots, held: Tensor, counts: Tensor, more: More | None = None, *rest: Any
) -> Tensor:
    there = [one.to(gpu) for one in (q, held, counts)]
    codes, most = KVSlots(index.data.to(gpu), index.format), int(counts.max()) + 1
    elsewhere = None if more is None else more.each(lambda one: one.to(gpu))
    return module.choose_slots(there[0], codes, *there[1:], most, ALWAYS, elsewhere, *rest).cpu()


CHOICES = {"dtype": list(NEAR), "shape": SHAPES, "form": ["plain", "more", "cap"], "together": (False, True)}


@pytest.mark.parametrize("values", most_of(CHOICES))
def test_the_best_are_chosen(gpu: torch.device, values: dict[str, Any]) -> None:
    dtype, shape, form, together = (values[name] for name in CHOICES)
    q, keys, held, counts = drawn(shape, dtype)
    index, cap, heads = index_of(keys), 2.0 if form == "cap" else None, shape[0] * shape[1] * shape[2]
    scores = torch.linspace(-2, 3, heads).view(shape[0], 1, -1)
    more = More(scores, torch.randn(*scores.shape, shape[4])) if form == "more" else None  # what these have counts nothing
    found = chosen(gpu, q, index, held, counts, more, cap, together)
    assert found.dtype == torch.int64 and found.shape == (*shape[:2], int(counts.max()) + 1)
    assert_best(found, q, index, held, counts, NEAR[dtype], more, cap, together)


@pytest.mark.parametrize("group", [1, 4])
def test_of_equals_the_older_are_chosen(gpu: torch.device, group: int) -> None:
    q, keys, _, _ = drawn((2, 1, group, 150, 64), torch.float32)
    keys[:, :, 30:] = keys[:, :, 30:31]  # equal ones in several chunks
    held, counts, index = torch.tensor([150, 140]), torch.tensor([70, 30]), index_of(keys)
    found = chosen(gpu, q, index, held, counts)
    assert torch.equal(found, choose_slots_twin(q, index, held, counts, 71, ALWAYS))


def test_neither_neighbours_nor_what_lies_behind_change_the_choice(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor how many rows are ranked at once."""
    q, keys, held, counts = drawn((3, 2, 2, 90, 64), torch.float32)
    index = index_of(keys)
    expected = chosen(gpu, q, index, held, counts)
    for row, count in enumerate(held.tolist()):
        index.data[row, :, count:] = 255  # NaN
    for at_once in (1, 2):
        monkeypatch.setattr(module, "ranked_rows", lambda *_, at_once=at_once: at_once)
        assert torch.equal(chosen(gpu, q, index, held, counts), expected)
    for row in range(3):
        one = slice(row, row + 1)
        alone = chosen(gpu, q[one], KVSlots(index.data[one], index.format), held[one], counts[one])
        assert torch.equal(alone[0, :, : counts[row]], expected[row, :, : counts[row]])


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
def test_what_is_nan_is_worth_nothing(gpu: torch.device) -> None:
    q, keys, held, _ = drawn((2, 2, 2, 90, 64), torch.float32)
    q[:, :, :1], counts = torch.nan, torch.tensor([30, 25])
    found = chosen(gpu, q, index_of(keys), held, counts)
    for row, (holds, count) in enumerate(zip(held.tolist(), counts.tolist())):
        wanted = [*range(count - ALWAYS.recent), *range(holds - ALWAYS.recent, holds)]
        assert all(head[:count] == wanted for head in found[row].tolist())
