"""Scores, which slot goes, and what moves with the newest token: C and torch have them as a plain loop does, whatever ranks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from h2o_flexgen.formats.kernel_table import MAX, SUM, TORCH
from h2o_flexgen.kernels.evict import LEAST_SCORE, Leaving, Newest, Notes, chances, evict_twin, note_twin
from h2o_flexgen.kernels.operations import append, evict, note
from tests.helpers.all_of import all_of
from tests.kernels.variants import VARIANTS, used

RANKS = {  # what is noted beside positions
    "score": ("scores",),
    "score and worth": ("scores", "worth"),
    "worth": ("worth",),
    "age": (),
    "chance": ("chance",),
}


class Given(NamedTuple):
    image: Tensor
    notes: Notes
    newest: Newest
    leaving: Leaving
    got: Tensor | None

    @classmethod
    def drawn(cls, shape: tuple[int, int, int], ranks: str) -> Given:
        """Few kinds of scores and of worths, so that many tokens rank alike; some rows still have room."""
        rows, _, slots = shape
        draw, noted = torch.Generator().manual_seed(sum(shape)), RANKS[ranks]
        positions = torch.rand(shape, generator=draw).argsort(-1).int() * 2
        held = torch.randint(1, slots + 1, (rows,), generator=draw)
        scores, got = (torch.randint(0, kinds, shape, generator=draw) / 7 for kinds in (4, 6))
        worth = torch.randint(1 if "scores" in noted else -2, 5, shape, generator=draw) / 3
        scores[..., ::2], got[..., ::2] = 0.0, 0.0  # nothing attends to these
        start, end = (torch.full((rows, 1, 1), bound) for bound in (2, 2 * slots - 2))
        return cls(
            torch.randn(2, *shape, 3, generator=draw),
            Notes(positions, scores if "scores" in noted else None, "chance" in noted, worth if "worth" in noted else None),
            Newest(torch.arange(rows), held - 1, held, held[:, None]),
            Leaving(start, end, (held - torch.randint(0, 2, (rows,), generator=draw))[:, None, None]),
            got if "scores" in noted else None,
        )

    def copied(self) -> Given:
        notes = (each.clone() if isinstance(each, Tensor) else each for each in self.notes)
        return self._replace(image=self.image.clone(), notes=Notes(*notes))

    def tensors(self) -> list[Tensor]:
        return [self.image, *(each for each in self.notes if isinstance(each, Tensor))]


def evicted_one_by_one(given: Given, decay: float, gathers: str) -> Tensor:
    """In place, in float32 wherever a number is rounded."""
    (positions, scores, by_chance, worth), slots = given.notes, given.newest.slots.tolist()
    target = torch.empty(positions.shape[:2], dtype=torch.int64)
    for row, last in enumerate(slots):
        for head in range(positions.shape[1]):
            own = positions[row, head].tolist()
            if scores is not None and given.got is not None:
                for slot, new in enumerate(given.got[row, head].numpy()):
                    faded = scores[row, head, slot].numpy() * np.float32(decay)
                    seen = np.float32(0) if slot == last else new
                    scores[row, head, slot] = float(max(faded, seen) if gathers == MAX else faded + new)
            by = positions if not by_chance else chances(positions)
            by = scores if scores is not None else worth if worth is not None else by
            rank = by[row, head].float().numpy()
            if scores is not None and worth is not None:
                rank = (rank + np.float32(LEAST_SCORE)) * worth[row, head].numpy()
            start, end, after = (int(bound[row]) for bound in given.leaving)
            free = [slot for slot in range(last + 1) if start <= own[slot] < end]
            goes = last if after > last or not free else min(free, key=lambda slot: (rank[slot], own[slot]))
            for noted in (positions, scores, worth, *given.image):
                if noted is not None:
                    noted[row, head, goes] = noted[row, head, last]
            target[row, head] = goes
    return target


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"shape": [(1, 1, 1), (3, 4, 50), (2, 3, 17)], "ranks": list(RANKS), "gathers": [SUM, MAX], "decay": [1.0, 0.9]})
def test_scores_and_slots_are_those_of_a_plain_loop(
    variant: str, shape: tuple[int, int, int], ranks: str, gathers: str, decay: float
) -> None:
    given = Given.drawn(shape, ranks)
    in_c, in_torch, expected = given.copied(), given.copied(), given.copied()
    target = evicted_one_by_one(expected, decay, gathers)
    with used(variant):
        assert torch.equal(evict(*in_c, decay, gathers), target)
    assert torch.equal(evict_twin(*in_torch, decay, gathers), target)
    for ours, theirs, wanted in zip(in_c.tensors(), in_torch.tensors(), expected.tensors()):
        assert torch.equal(ours, wanted) and torch.equal(theirs, wanted)


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"gathers": [SUM, MAX], "decay": [1.0, 0.9], "ranks": ["score", "score and worth", "age"]})
def test_scores_are_noted_where_nothing_goes(variant: str, gathers: str, decay: float, ranks: str) -> None:
    given = Given.drawn((3, 4, 37), ranks)
    in_c, in_torch = given.copied(), given.copied()
    with used(variant):
        note(in_c.notes, given.newest, given.got, decay, gathers)
    note_twin(in_torch.notes, given.newest, given.got, decay, gathers)
    for ours, theirs, before in zip(in_c.tensors(), in_torch.tensors(), given.tensors()):
        assert torch.equal(ours, theirs) and (torch.equal(ours, before) or ours is in_c.notes.scores)


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_of_a_larger_cache_are_noted_as_well(variant: str) -> None:
    """The notes and the image of some rows lie in those of all."""
    whole = Given.drawn((5, 4, 20), "score and worth")
    some = slice(1, 4)
    notes = Notes(*(each[some] if isinstance(each, Tensor) else each for each in whole.notes))
    newest = Newest(torch.arange(3), *(each[some] for each in whole.newest[1:]))
    leaving, got = Leaving(*(each[some] for each in whole.leaving)), torch.rand(3, 4, 20)
    alone = Given(whole.image[:, some], notes, newest, leaving, got)
    copied, rest = alone.copied(), whole.image[:, 4].clone()
    with used(variant):
        assert torch.equal(evict(*alone, 0.9), evict_twin(*copied, 0.9))
    assert all(torch.equal(*pair) for pair in zip(alone.tensors(), copied.tensors())) and torch.equal(rest, whole.image[:, 4])


@pytest.mark.parametrize("variant", [TORCH, *VARIANTS])
@pytest.mark.parametrize("is_one_for_all", [False, True])
def test_what_the_newest_token_is_worth_is_noted_in_its_slot(variant: str, is_one_for_all: bool) -> None:
    """Nothing else that is noted of worths changes."""
    image, notes, newest, *_ = Given.drawn((3, 4, 20), "score and worth")
    assert notes.worth is not None and notes.scores is not None
    worth = torch.tensor(0.5).expand(3, 4) if is_one_for_all else torch.randn(3, 4)
    expected = notes.worth.clone()
    for row, slot in enumerate(newest.slots.tolist()):
        expected[row, :, slot] = worth[row]
    new = torch.randn(3, 1, 4, 3)
    with used(variant):
        append(image, newest, new, new, new, None, notes, worth)
    assert torch.equal(notes.worth, expected)
    assert torch.equal(notes.scores[newest.rows, :, newest.slots], torch.zeros(3, 4))
