"""Seating: who has a seat in which pass of a running block, if every row grows as long as it may; and so what each batch does
in each pass. The queues are those of the engine."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy

from h2o_flexgen.core.seats import Need
from h2o_flexgen.planning.batch_pass import Prompts
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.planning.queues import Queues, read_together
from h2o_flexgen.policies.occupancy import Occupancy


class Stay:
    """The rows of one batch, in the order in which they come."""

    def __init__(self, journal: int) -> None:
        self.journal = journal  # entries that fill it
        self.rows: list[tuple[Need, Occupancy]] = []
        self.first: list[int] = []  # the pass in which each row's prompt is read
        self.last: list[int] = []  # the pass in which its last token is picked

    def add(self, need: Need, alone: Occupancy, number: int) -> int:
        """Adds a row whose prompt is read in this pass, and returns its last pass."""
        self.rows.append((need, alone))
        self.first.append(number)
        self.last.append(number + need.work - 1)
        return self.last[-1]

    @cached_property
    def _spans(self) -> tuple[numpy.ndarray, numpy.ndarray]:
        return numpy.array(self.first), numpy.array(self.last)

    @cached_property
    def _changes(self) -> Sequence[int]:
        """The passes in which rows come, or in which others have gone since the one before."""
        return sorted({*self.first, *(last + 1 for last in self.last)})

    def present(self, number: int) -> Sequence[int]:
        """The rows of a pass, newcomers included."""
        first, last = self._spans
        found: list[int] = numpy.flatnonzero((first <= number) & (number <= last)).tolist()
        return found

    def held(self, row: int, number: int) -> int:
        """Slots of a row before a pass in which it is no newcomer."""
        return self.rows[row][1].held(number - self.first[row])

    def changed_at(self, number: int) -> int:
        """The last pass up to this one in which rows came or had gone: since then all slots lie on disk as they are."""
        return self._changes[bisect_right(self._changes, number) - 1]

    def journal_entries(self, number: int) -> int:
        """Slots of each row in the journal on disk before a pass."""
        changed = self.changed_at(number - 1)
        since = number - self._first_scattered(changed)
        return since % (self.journal + 1) if since > 0 else 0

    def is_scattered(self, number: int) -> bool:
        return number >= self._first_scattered(self.changed_at(number))

    def _first_scattered(self, changed: int) -> int:
        """The first pass behind a change in which the slots that rows write do not lie side by side."""
        if changed not in self._scattered:
            rows = self.present(changed)
            counts = {self.held(row, changed + 1) for row in rows}
            full = (self.first[row] + self.rows[row][1].first_evicting_step for row in rows)
            self._scattered[changed] = changed + 1 if len(counts) > 1 else max(changed + 1, min(full, default=0))
        return self._scattered[changed]

    @cached_property
    def _scattered(self) -> dict[int, int]:
        return {}


@dataclass(frozen=True)
class PassOfSeats:
    """What a batch of a running block does in one pass. Rows are computed with their own slots."""

    rows: int = 0
    slots: int = 0
    prompts: Mapping[Prompts, int] = field(default_factory=dict)
    kept: int = 0
    evicts: bool = False
    loaded: int = 0
    read: int = 0
    stored: int = 0
    written: int = 0

    @property
    def mean_read(self) -> float:
        return self.read

    @property
    def mean_written(self) -> float:
        return self.written

    @classmethod
    def of(cls, stay: Stay, number: int, prefill_tokens: int) -> PassOfSeats:
        present = stay.present(number)
        if not present:
            return cls()
        loaded, entries = _before(stay, number)
        staying = [row for row in present if stay.first[row] < number]
        coming = [row for row in present if stay.first[row] == number]
        before = [stay.held(row, number) for row in staying]
        after = [stay.held(row, number + 1) for row in present]
        most = len(present) * max(after)
        changes = stay.changed_at(number) == number
        full = not changes and stay.is_scattered(number) and entries == stay.journal
        stored = most if changes else len(present)
        return cls(
            rows=len(staying),
            slots=sum(before),
            prompts=_prompts([stay.rows[row][0].prompt_len for row in coming], prefill_tokens),
            kept=sum(stay.held(row, number + 1) for row in coming),
            evicts=any(stay.rows[row][1].evicts_at(number - stay.first[row]) for row in present),
            loaded=loaded[0] * loaded[1],
            read=loaded[0] * (loaded[1] + entries),
            stored=stored,
            written=most if full else stored,
        )


def _before(stay: Stay, number: int) -> tuple[tuple[int, int], int]:
    """The rows that the pass before had, with the slots of the one that holds most, and the slots of each in the journal."""
    rows = stay.present(number - 1)
    if not rows:
        return (0, 0), 0
    return (len(rows), max(stay.held(row, number) for row in rows)), stay.journal_entries(number)


def _prompts(lengths: Sequence[int], tokens: int) -> Mapping[Prompts, int]:
    parts = (lengths[part] for part in read_together(lengths, tokens))
    return Counter(Prompts(len(part), part[0]) for part in parts)


@dataclass(frozen=True)
class Seating:
    stays: tuple[Stay, ...]
    passes: int
    prefill_tokens: int

    @classmethod
    def of(cls, planned: BlockPlan) -> Seating:
        """Lets rows come and go as in a run, pass by pass."""
        queues, policy = Queues(planned), planned.plan.policy
        stays = tuple(Stay(occupancy.journal_capacity) for occupancy in planned.occupancy)
        leaving, taken = [Counter[int]() for _ in stays], [0] * len(stays)  # by their last pass
        known: dict[Need, Occupancy] = {}
        number = 0
        while True:
            for batch, stay in enumerate(stays):
                taken[batch] -= leaving[batch].pop(number - 1, 0)
                for place in queues.take(batch, taken[batch]):
                    need = queues.needs[place]
                    last = stay.add(need, known.get(need) or known.setdefault(need, policy.alone(need)), number)
                    leaving[batch][last] += 1
                    taken[batch] += 1
            if not any(taken):
                return cls(stays, number, planned.plan.prefill_tokens)
            number += 1

    def at(self, number: int, batch: int) -> PassOfSeats:
        return PassOfSeats.of(self.stays[batch], number, self.prefill_tokens)

    @property
    def tokens(self) -> int:
        """Tokens that rows may grow."""
        return sum(need.gen_len for stay in self.stays for need, _ in stay.rows)

    @cached_property
    def reading(self) -> frozenset[int]:
        """The passes in which prompts are read."""
        return frozenset(number for stay in self.stays for number in stay.first)
