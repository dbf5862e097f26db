"""Seating: which rows have a seat in which pass of a running block, if every row grows as long as it may; and so what each
batch does in each pass. The queues are those of the engine."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING

from h2o_flexgen.core.prefix_groups import SharedPrefix
from h2o_flexgen.core.seats import SeatNeed
from h2o_flexgen.planning.batch_pass import NOTHING_SHARED, Prompts, SharedTokens, tokens_of
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.planning.queues import Queues, read_together
from h2o_flexgen.policies.occupancy import Occupancy
from h2o_flexgen.policies.policy import KVPolicy

if TYPE_CHECKING:
    import numpy


class Stay:
    """The rows of one batch, in the order in which they come, and what they hold at each level."""

    def __init__(self, seats: int, journals: Iterable[int], echoes: bool) -> None:
        self.seats = seats
        self.echoes = echoes  # prompts are read twice, one copy after the other
        self.needs: list[SeatNeed] = []
        self.prefixes: dict[int, list[int]] = {}  # by pass, the tokens of shared prefixes that are computed for new rows
        self.first: list[int] = []  # the pass in which each row's prompt is read
        self.last: list[int] = []  # the pass in which its last token is picked
        self.levels = [StayAtLevel(self, journal) for journal in journals]

    def add(self, need: SeatNeed, alone: Sequence[Occupancy], number: int) -> int:
        """Adds a row, the prompt of which is read in this pass, and returns its last pass. `alone`: its slots at each level."""
        self.needs.append(need)
        for level, slots in zip(self.levels, alone, strict=True):
            level.alone.append(slots)
        self.first.append(number)
        self.last.append(number + need.work - 1)
        return self.last[-1]

    @cached_property
    def _spans(self) -> tuple[numpy.ndarray, numpy.ndarray]:
        import numpy  # only searches need it, and not flags

        return numpy.array(self.first), numpy.array(self.last)

    @cached_property
    def _changes(self) -> Sequence[int]:
        """The passes in which rows come, or in which others have gone since the one before."""
        return sorted({*self.first, *(last + 1 for last in self.last)})

    def present(self, number: int) -> Sequence[int]:
        """The rows of a pass, with those that are new."""
        first, last = self._spans
        found: list[int] = ((first <= number) & (number <= last)).nonzero()[0].tolist()
        return found

    def changed_at(self, number: int) -> int:
        """The last pass up to this one in which rows came or had gone: since then all slots lie on disk as they are."""
        return self._changes[bisect_right(self._changes, number) - 1]


class StayAtLevel:
    """What the rows of a stay hold at one level."""

    def __init__(self, stay: Stay, journal: int) -> None:
        self._stay = stay
        self.journal = journal  # entries that fill it
        self.alone: list[Occupancy] = []  # the slots of each row
        self._scattered: dict[int, int] = {}

    def held(self, row: int, number: int) -> int:
        """Slots of a row before a pass in which it is not new."""
        return self.alone[row].held(number - self._stay.first[row])

    def evicts(self, row: int, number: int) -> bool:
        return self.alone[row].evicts_at(number - self._stay.first[row])

    def journal_entries(self, number: int) -> int:
        """Slots of each row in the journal on disk before a pass."""
        since = number - self._first_scattered(self._stay.changed_at(number - 1))
        return since % (self.journal + 1) if since > 0 else 0

    def is_scattered(self, number: int) -> bool:
        return number >= self._first_scattered(self._stay.changed_at(number))

    def _first_scattered(self, changed: int) -> int:
        """The first pass after a change in which the slots that rows write do not lie side by side."""
        if changed not in self._scattered:
            rows = self._stay.present(changed)
            counts = {self.held(row, changed + 1) for row in rows}
            full = (self._stay.first[row] + self.alone[row].first_evicting_step for row in rows)
            self._scattered[changed] = changed + 1 if len(counts) > 1 else max(changed + 1, min(full, default=0))
        return self._scattered[changed]

    def before(self, number: int) -> tuple[tuple[int, int], int]:
        """The rows of the pass before, with the slots of the one that holds most; and the slots of each in the journal."""
        rows = self._stay.present(number - 1)
        if not rows:
            return (0, 0), 0
        return (len(rows), max(self.held(row, number) for row in rows)), self.journal_entries(number)


@dataclass(frozen=True)
class PassOfSeats:
    """What a batch of a running block does in one pass. Rows are computed with their own slots."""

    rows: int = 0
    slots: int = 0
    shared: SharedTokens = NOTHING_SHARED
    prompts: Mapping[Prompts, int] = field(default_factory=dict)
    joining: int = 0
    evicts: bool = False
    loaded: int = 0
    read: int = 0
    stored: int = 0
    written: int = 0
    changed: int = 0
    counts: Sequence[int] = ()

    @property
    def mean_read(self) -> float:
        return self.read

    @property
    def mean_written(self) -> float:
        return self.written

    @classmethod
    def of(cls, stay: Stay, level: StayAtLevel, number: int, prefill_tokens: int) -> PassOfSeats:
        present = stay.present(number)
        if not present:
            return cls()
        loaded, entries = level.before(number)
        staying = [row for row in present if stay.first[row] < number]
        coming = [stay.needs[row] for row in present if stay.first[row] == number]
        after = [level.held(row, number + 1) for row in present]
        is_new = stay.changed_at(number) == number  # then all slots are stored anew
        changed, is_scattered = max(after) if is_new else 1, not is_new and level.is_scattered(number)
        written = max(after) if is_scattered and entries == level.journal else changed
        before = [level.held(row, number) for row in staying]
        return cls(
            rows=len(staying),
            slots=sum(before),
            shared=_shared([stay.needs[row] for row in staying]),
            prompts=_prompts(coming, stay.prefixes.get(number, ()), prefill_tokens, stay.echoes),
            joining=len(coming),
            evicts=any(level.evicts(row, number) for row in present),
            loaded=stay.seats * loaded[1],  # ranges of slots cross the link with all seats
            read=loaded[0] * (loaded[1] + entries),
            stored=len(present) if is_scattered else stay.seats * changed,
            written=len(present) * written,
            changed=len(staying) + sum(level.held(row, number + 1) for row in present if stay.first[row] == number),
            counts=before,
        )


def _shared(needs: Sequence[SeatNeed]) -> SharedTokens:
    own = [need.prefix for need in needs if need.prefix is not None and not need.copies]
    return SharedTokens(sum(prefix.tokens for prefix in set(own)), sum(prefix.tokens for prefix in own))


def _prompts(needs: Sequence[SeatNeed], prefixes: Sequence[int], tokens: int, echoes: bool) -> Mapping[Prompts, int]:
    parts = [needs[part] for part in read_together([need.read for need in needs], tokens, echoes)]
    found = Counter(Prompts(len(part), part[0].read, _mean_prefix(part), echoes, tokens) for part in parts)
    return found + Counter(Prompts(1, length, at_once=tokens) for length in prefixes)


def _mean_prefix(needs: Sequence[SeatNeed]) -> int:
    return round(fmean(0 if need.prefix is None else need.prefix.tokens for need in needs))


class _Prefixes:
    """The prefixes that are kept, as the engine keeps them: while a row uses them, and longer where there is room."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._users: dict[SharedPrefix, int] = {}  # in the order of their last use

    def use(self, prefix: SharedPrefix) -> bool:
        """Whether it has to be computed for one more row."""
        users = self._users.pop(prefix, None)
        if users is None:
            while self._users and sum(kept.room for kept in self._users) + prefix.room > self._room:
                del self._users[next(kept for kept, count in self._users.items() if not count)]
        self._users[prefix] = 1 + (users or 0)
        return users is None

    def leave(self, prefix: SharedPrefix) -> None:
        self._users[prefix] -= 1


@dataclass(frozen=True)
class Seating:
    stays: tuple[Stay, ...]
    passes: int
    prefill_tokens: int

    @classmethod
    def of(cls, planned: BlockPlan) -> Seating:
        """Lets rows come and go as in a run, pass by pass."""
        by_batch = zip(planned.block.batches, zip(*planned.kv.occupancies))
        stays = tuple(Stay(batch.size, [one.journal_capacity for one in levels], batch.echoes) for batch, levels in by_batch)
        prefixes, queues = _Prefixes(planned.block.prefix_room), Queues(planned)
        policies = [level.policy for level in planned.levels]
        arrivals = [_Arrivals(batch, stay, queues, prefixes, policies) for batch, stay in enumerate(stays)]
        number = 0
        while [one.pass_begins(number) for one in arrivals].count(0) < len(arrivals):
            number += 1
        return cls(stays, number, planned.plan.prefill_tokens)

    def at(self, number: int, batch: int, level: int = 0) -> PassOfSeats:
        if (number, batch, level) not in self._known:
            stay = self.stays[batch]
            self._known[number, batch, level] = PassOfSeats.of(stay, stay.levels[level], number, self.prefill_tokens)
        return self._known[number, batch, level]

    @cached_property
    def _known(self) -> dict[tuple[int, int, int], PassOfSeats]:
        return {}

    def tokens_at(self, number: int) -> int:
        """Tokens that are computed in a pass."""
        return sum(tokens_of(self.at(number, batch)) for batch in range(len(self.stays)))

    @property
    def rows(self) -> int:
        return sum(len(stay.needs) for stay in self.stays)

    @property
    def grown(self) -> int:
        """Tokens that rows may grow."""
        return sum(need.gen_len for stay in self.stays for need in stay.needs)

    @cached_property
    def reading(self) -> frozenset[int]:
        """The passes in which prompts are read."""
        return frozenset(number for stay in self.stays for number in stay.first)


class _Arrivals:
    """Rows that leave a batch, and others that come."""

    def __init__(self, batch: int, stay: Stay, queues: Queues, prefixes: _Prefixes, policies: Sequence[KVPolicy]) -> None:
        self._batch, self._stay, self._queues, self._prefixes, self._policies = batch, stay, queues, prefixes, policies
        self._alone: dict[SeatNeed, tuple[Occupancy, ...]] = {}
        self._leaving: dict[int, list[SeatNeed]] = {}  # by the pass before which they go
        self._seated = 0
        self._shared: Counter[SharedPrefix] = Counter()

    def pass_begins(self, number: int) -> int:
        """Lets rows go and others come, and returns how many are there now."""
        for need in self._leaving.pop(number, ()):
            self._seated -= 1
            if need.prefix is not None:
                self._shared[need.prefix] -= 1
                self._prefixes.leave(need.prefix)
        for place in self._queues.take(self._batch, self._seated, +self._shared):
            self._seat(self._queues.needs[place], number)
        return self._seated

    def _seat(self, need: SeatNeed, number: int) -> None:
        if need not in self._alone:
            self._alone[need] = tuple(policy.alone(need) for policy in self._policies)
        last = self._stay.add(need, self._alone[need], number)
        self._leaving.setdefault(last + 1, []).append(need)
        self._seated += 1
        if need.prefix is not None:
            self._shared[need.prefix] += 1
            if self._prefixes.use(need.prefix):
                self._stay.prefixes.setdefault(number, []).append(need.prefix.tokens)
