"""Waiting: the rows that have no seat yet in a running block. The rows of a job are made when their turn comes, and forgotten
when they have ended, so that a job may be larger than memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import ClassVar, NamedTuple

from h2o_flexgen.core.prefix_groups import TOKEN, Beginnings, SharedPrefix, bytes_of, common_tokens
from h2o_flexgen.core.seats import SeatNeed
from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.engine.stores.prefix_store import PrefixStore
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.queues import Queues

MakeRow = Callable[[int], RowState]  # from its place in the workload


class Waiting(ABC):
    """The rows that have not ended of a block in which rows come and go."""

    keeps_prefixes: ClassVar[bool] = False  # the prefixes that they shared may serve rows of the next block
    asks_of_prompts: bool = True  # a row may ask for log-probabilities of its prompt, or for its states

    @abstractmethod
    def seat_in(self, planned: BlockPlan) -> None:
        """Puts all rows that have not ended into the queues of this block."""

    @abstractmethod
    def left(self, blocks: Iterable[BlockPlan]) -> Sequence[int]:
        """The places of all rows that have not ended, in order; no row has a seat any more."""

    @abstractmethod
    def end(self, row: RowState) -> None:
        """Frees the seat of a row that has ended."""

    def choose(self, row: RowState, kept: PrefixStore, room: int) -> SharedPrefix | None:
        """Decides which prefix a row shares that takes a seat now, where this is not known before. Returns the prefix from
        which a new one is copied first. `room`: the tokens of prefixes that may still be computed in the next pass."""
        return None

    @abstractmethod
    def need(self, row: RowState) -> SeatNeed:
        """The most that a seated row may need."""

    @abstractmethod
    def take(self, batch: int, seated: Sequence[SharedPrefix | None]) -> list[RowState]:
        """The rows that join a batch now; `seated`: what each seated row shares with others."""


class WaitingJob(Waiting):
    def __init__(self, make: MakeRow, asks_of_prompts: bool = True) -> None:
        self._make = make
        self.asks_of_prompts = asks_of_prompts
        self._begun: dict[int, RowState] = {}  # rows that were seated and have not ended

    def seat_in(self, planned: BlockPlan) -> None:
        self._queues = Queues(planned)

    def left(self, blocks: Iterable[BlockPlan]) -> Sequence[int]:
        finished = {place for place, row in self._begun.items() if row.finished}
        self._begun = {place: row for place, row in self._begun.items() if place not in finished}
        for row in self._begun.values():
            row.start_anew()
        return sorted(self._queues.needs.keys() - finished)

    def end(self, row: RowState) -> None:
        del self._begun[row.row]
        del self._queues.needs[row.row]

    def __len__(self) -> int:
        return len(self._queues)

    def need(self, row: RowState) -> SeatNeed:
        return self._queues.needs[row.row]

    def take(self, batch: int, seated: Sequence[SharedPrefix | None]) -> list[RowState]:
        return [self._row(place) for place in self._queues.take(batch, len(seated), seated)]

    def _row(self, place: int) -> RowState:
        if place not in self._begun:
            self._begun[place] = self._make(place)
        return self._begun[place]


class SharedBeginning(NamedTuple):
    """The prefix that a row begins with, and the source from which a new prefix is copied first."""

    prefix: SharedPrefix | None = None
    source: SharedPrefix | None = None
    spared: int = 0  # tokens that need not be computed for it


NOTHING = SharedBeginning()


class Sharing:
    """What requests that arrive share, decided when they take their seats.

    A row begins with the kept prefix that agrees with its prompt. If the prompts of other rows, waiting or earlier ones, agree
    with it further, the longer beginning is computed as a prefix for them all, after a copy of what is kept of it. Later rows
    find it. Where prompts differ, beginnings are cut to multiples of the least length that is worth sharing, so that chance
    does not make many different prefixes of one."""

    def __init__(self, plan: Plan) -> None:
        self._least = plan.least_prefix
        self._own = plan.least_own
        self._seen = Beginnings()
        self._looking = Lock()  # requests come in any thread

    def take_note(self, come: Iterable[tuple[Sequence[int], int]]) -> None:
        """Records requests that have come: their tokens, and how many rows each has."""
        with self._looking:
            for ids, rows in come:
                self._seen.add(ids, rows)

    def choice(self, ids: Sequence[int], kept: PrefixStore, room: int) -> SharedBeginning:
        """What a row with this prompt shares. `room`: the tokens of prefixes that may be computed now."""
        most = len(ids) - self._own
        known = self._known_or_stored(bytes_of(ids[: max(0, most)]), kept)
        spared = 0 if known is None else known.tokens
        with self._looking:
            common = self._seen.common(ids)
        wanted = min(common, most, kept.room_beside(known), spared + room)
        if wanted < most:
            wanted = self._whole_pieces(wanted)
        if wanted - spared >= self._least:
            return SharedBeginning(kept.new(wanted), known, spared)
        return SharedBeginning(known, None, spared)

    def _known_or_stored(self, text: bytes, kept: PrefixStore) -> SharedPrefix | None:
        """The longest prefix that a text begins with. One that lies in the folder of prefixes is kept from now on, if it spares
        enough."""
        known = self._known(text, kept)
        stored = ((self._agreeing(one.text, text, kept.may_cut), one) for one in kept.stored_like(text, self._least))
        best = max(stored, key=lambda each: each[0], default=None)
        if best is None or best[0] - (0 if known is None else known.tokens) < self._least:
            return known
        kept.take_in(best[1])
        return self._known(text, kept)  # what was known may have made room

    def _known(self, text: bytes, kept: PrefixStore) -> SharedPrefix | None:
        """The longest kept prefix that a text begins with; of equals the one with most users, which attend to it together."""
        found = ((self._agreeing(prefix.text, text, kept.may_cut), prefix) for prefix in kept)
        tokens, _, group = max(((tokens, one.users, one.shared.group) for tokens, one in found), default=(0, 0, 0))
        return kept[group].shared._replace(tokens=tokens) if tokens >= self._least else None

    def _agreeing(self, prefix: bytes, text: bytes, may_cut: bool) -> int:
        """The first tokens of a prefix that a row with this text may share."""
        tokens = common_tokens(prefix, text)
        if tokens * TOKEN == len(prefix):
            return tokens
        return self._whole_pieces(tokens) if may_cut else 0

    def _whole_pieces(self, tokens: int) -> int:
        return tokens // self._least * self._least
