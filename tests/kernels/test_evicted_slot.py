"""The slot that goes is the same in C as in torch, also where ranks are equal, and of a plain loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from h2o_flexgen.kernels.evict import Leaving, Newest, Notes, evict_twin
from h2o_flexgen.kernels.operations import evict
from tests.helpers.all_of import all_of
from tests.kernels.variants import VARIANTS, used


def goes(
    evict: Callable[..., Tensor], positions: Tensor, ranks: Tensor | None, held: Tensor, start: Tensor, end: Tensor
) -> Tensor:
    """The slots that go of rows which are full."""
    newest = Newest(torch.arange(len(held)), held - 1, held, held[:, None])
    notes = Notes(positions.clone(), None if ranks is None else ranks.clone())
    return evict(torch.zeros(2, *positions.shape, 4), notes, newest, Leaving(start, end, held[:, None, None] - 1), None, 1.0)


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"shape": [(1, 1, 1), (3, 4, 50), (5, 2, 205), (64, 8, 17)], "kinds": [1, 3, 1000, None]})
def test_c_and_torch_let_the_oldest_of_the_lowest_go(variant: str, shape: tuple[int, int, int], kinds: int | None) -> None:
    rows, heads, slots = shape
    draw = torch.Generator().manual_seed(sum(shape))
    positions = torch.rand(shape, generator=draw).argsort(-1).int() * 2 + 5  # unique, in any order
    ranks = None if kinds is None else torch.randint(0, kinds, shape, generator=draw) / 7
    held = torch.randint(1, slots + 1, (rows,), generator=draw)
    for row, count in enumerate(held.tolist()):
        positions[row, :, count:] = -1
    # the oldest quarter and the newest are protected, as sinks and window are; where a head has no others, none is
    free = (positions >= 5 + slots // 2) & (positions < 5 + 2 * slots - slots // 2)
    some = free.any(-1).all(-1)[:, None, None]
    start, end = torch.where(some, 5 + slots // 2, -3), torch.where(some, 5 + 2 * slots - slots // 2, 2 * slots + 5)
    with used(variant):
        found = goes(evict, positions, ranks, held, start, end)
    assert torch.equal(found, goes(evict_twin, positions, ranks, held, start, end))
    is_held = torch.arange(slots) < held[:, None, None]
    assert slots < 17 or (((positions < start) & is_held).any() and ((positions >= end) & is_held).any())
    for row in range(rows):
        for head in range(heads):
            token = positions[row, head].tolist()
            free = [slot for slot in range(int(held[row])) if int(start[row]) <= token[slot] < int(end[row])]
            rank = token if ranks is None else ranks[row, head].tolist()
            assert int(found[row, head]) == min(free, key=lambda slot: (rank[slot], token[slot]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_where_no_token_may_go_both_say_the_last(variant: str) -> None:
    """Of a row below its budget nothing looks at the outcome, but both are to be the same."""
    positions, held = torch.tensor([[[3, 1, 2]]], dtype=torch.int32), torch.tensor([2])
    given = (positions, None, held, torch.tensor([[[7]]]), torch.tensor([[[9]]]))
    with used(variant):
        assert goes(evict, *given).tolist() == goes(evict_twin, *given).tolist() == [[1]]


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_protected_stays_however_low(variant: str) -> None:
    positions = torch.tensor([[[4, 0, 9, 2, 7, 1]]], dtype=torch.int32)
    ranks = torch.tensor([[[5.0, 0.0, 0.0, 3.0, 3.0, 0.0]]])
    given = (positions, ranks, torch.tensor([5]), torch.tensor([[[2]]]), torch.tensor([[[9]]]))
    with used(variant):
        assert goes(evict, *given).tolist() == [[3]] and goes(evict_twin, *given).tolist() == [[3]]
        assert goes(evict, positions, None, *given[2:]).tolist() == [[3]]
