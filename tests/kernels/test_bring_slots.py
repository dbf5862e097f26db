"""Slots that go from one image to the same slots of another: those that are missing, each to its row, and nothing else."""

from __future__ import annotations

from random import Random

import pytest
import torch

from h2o_flexgen.kernels.evict import Missing, RowsOfBoth
from h2o_flexgen.kernels.operations import bring_slots


@pytest.mark.parametrize("moved_up", [None, [2, 0, 1]])
@pytest.mark.parametrize("rows", [1, 3])
def test_what_is_missing_comes_from_a_rows_own_place(rows: int, moved_up: list[int] | None) -> None:
    random, (sets, heads, slots, width, most) = Random(rows), (2, 2, 9, 4, 6)
    home, image = (torch.randn(sets, 3, heads, slots, width) for _ in range(2))
    newest, counts = [random.randrange(5, slots) for _ in range(rows)], [random.randrange(2, most) for _ in range(rows)]
    chosen = [
        [[*sorted({*random.sample(range(own), count - 1), own}), *[0] * (most - count)] for _ in range(heads)]
        for own, count in zip(newest, counts)
    ]
    wanted, places = image.clone(), range(rows) if moved_up is None else moved_up
    for row, head in ((row, head) for row in range(rows) for head in range(heads)):
        for slot in chosen[row][head][: counts[row] - 1]:  # the newest is the last of them
            wanted[:, row, head, slot] = home[:, places[row], head, slot]
    numbers = RowsOfBoth(source=None if moved_up is None else torch.tensor(moved_up))
    bring_slots(home, image, torch.tensor(chosen), numbers, Missing(torch.tensor(counts), torch.tensor(newest)))
    assert torch.equal(image, wanted)


def test_what_has_changed_goes_to_a_rows_own_place() -> None:
    home, image, changed = torch.zeros(1, 4, 2, 7, 3), torch.randn(1, 3, 2, 7, 3), torch.tensor([[1, 6], [0, 2], [3, 3]])
    bring_slots(image, home, changed[..., None], RowsOfBoth(target=torch.tensor([3, 0, 2, 1])))
    wanted = torch.zeros_like(home)
    for row, place in enumerate((3, 0, 2)):
        for head in range(2):
            wanted[:, place, head, changed[row, head]] = image[:, row, head, changed[row, head]]
    assert torch.equal(home, wanted)
