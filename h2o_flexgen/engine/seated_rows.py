"""The rows of a running block. Waiting: those that have no seat yet. The rows of a job are made when their turn comes, and
forgotten when they have ended, so that a job may be larger than memory. SeatedRows: those of one batch. A row that ends leaves
a seat, and rows that wait take the free seats.

New rows have their prompts read in the next pass over the weights, beside the decode step of the others. A visit is then
computed in parts: the first has the newest tokens of the earlier rows, and each other part the prompts of a few new rows. From
the pass after that they are rows like the others. What a row may hold depends on the row alone. A prefix that new rows share,
and that is not kept yet, is a part of its own before theirs; it may begin with a copy of another prefix.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import Lock
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.core.prefix_groups import TOKEN, Beginnings, SharedPrefix, bytes_of, common_tokens
from h2o_flexgen.core.seats import SeatNeed
from h2o_flexgen.core.workload import Batch
from h2o_flexgen.engine.drafts import Drafts
from h2o_flexgen.engine.masks import MaskMaker
from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.engine.rows import BatchRows, RowsPart, SharedOf, adapters_of, padded
from h2o_flexgen.engine.stores.prefix_store import PrefixStore
from h2o_flexgen.kernels.pick_tokens import Upload
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.planning.placement import HeldKV
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.queues import Queues, read_together
from h2o_flexgen.policies.occupancy import Occupancy, StepSlots
from h2o_flexgen.policies.policy import KVPolicy

# -- rows that wait --------------------------------------------------------------------------------------------------------

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


# -- rows that have a seat -------------------------------------------------------------------------------------------------


class HeldBytes(NamedTuple):
    held: int
    of_seats: int  # that can be held at most


def held_bytes(planned: BlockPlan, rows: Sequence[tuple[RowState, SeatNeed | None]]) -> HeldBytes:
    """`rows`: each with its need for slots of its own, once that is known. Shared prefixes are not counted."""
    kv = HeldKV(planned.spec, planned.levels, planned.block)
    places = [(layer, batch) for layer in planned.spec.kv_layers for batch in range(len(planned.block.batches))]
    levels = zip(kv.specs, planned.levels)
    of_level = [spec.kv_bytes_per_head * sum(map(len, level.heads)) for spec, level in levels]  # of a slot in all its heads
    needed = ((row, need or SeatNeed(row.prompt_len, row.max_tokens)) for row, need in rows)
    held = sum(own * _slots(planned, level, *each) for each in needed for level, own in enumerate(of_level))
    return HeldBytes(held, sum(kv.image_bytes(*place) for place in places))


def _slots(planned: BlockPlan, level: int, row: RowState, need: SeatNeed) -> int:
    """Slots that a row holds in each head of a level, between two passes."""
    return planned.levels[level].policy.alone(need).counts(row.num_generated - row.ahead)[0]


class SeatedRows(BatchRows):
    def __init__(
        self,
        place: int,
        batch: Batch,
        waiting: Waiting,
        prefixes: PrefixStore,
        plan: Plan,
        policies: Sequence[KVPolicy],
        gen_len: int,
        device: torch.device,
        upload: Upload,
        read_back: Callable[[Tensor], Tensor],
        masks: MaskMaker | None = None,
        drafts: Drafts | None = None,
        runs_ahead: bool = False,
        most_at_once: int | None = None,
    ) -> None:
        """`runs_ahead`: rows take tokens that must come without asking the model. `most_at_once`: tokens of a row in a pass, if
        there may not be as many as there is room for."""
        self._place = place
        self._prefixes = prefixes
        self._copies = plan.copies_prefixes
        self._waiting = waiting
        self._prefill_tokens = plan.prefill_tokens
        self._shared: dict[int, SharedPrefix | None] = {}  # what each row shares
        self._copied: list[int] = []  # groups from which a prefix is copied that the next pass computes
        super().__init__(batch, [], plan, policies, gen_len, device, upload, read_back, masks, drafts, 0, runs_ahead)
        room = self._room_ahead() if runs_ahead or drafts is not None else 0
        self._most_ahead = room if most_at_once is None else min(room, most_at_once - 1)
        if not self._rows:
            self.last_step = 0  # no row came

    def _room_ahead(self) -> int:
        """The tokens of each row for which there is room in a pass beside the newest: where all have their prompts read, there
        is room for those."""
        longest = 0 if self._batch.seats is None else self._batch.seats.longest_prompt
        return max(0, min(longest, self._prefill_tokens // self._batch.size) - 1)

    def _prompts(self, tokens: int) -> tuple[RowsPart, ...]:
        return self._next_parts(0)

    def _next_parts(self, step: int) -> tuple[RowsPart, ...]:
        """The decode step of the rows that stay, and the prompts of the new rows."""
        staying = slice(len(self._rows))
        parts = (self._decoding(staying),) if self._rows else ()
        return (*parts, *self._join(), *(self._reading(rows) for rows in self._together(staying.stop)))

    def _join(self) -> list[RowsPart]:
        """Gives new rows their seats, and returns the prefixes that have to be computed for them."""
        seated, seats = [self._shared[row.row] for row in self._rows], self._batch.seats
        newcomers, parts = self._waiting.take(self._place, seated), list[RowsPart]()
        room = 0 if seats is None else seats.prefixes.computed
        for row in newcomers:
            source = self._waiting.choose(row, self._prefixes, room - sum(part.tokens.numel() for part in parts))
            need = self._waiting.need(row)
            self._slots[row.row], self._shared[row.row] = [policy.alone(need) for policy in self._policies], need.prefix
            if need.prefix is not None and self._prefixes.use(need.prefix, row.compared_ids[: need.prefix.tokens], source):
                parts.append(self._computing(need.prefix, source, row))
        self._rows += sorted(newcomers, key=lambda row: -self._waiting.need(row).read)  # neighbours have few pads
        return parts

    def _computing(self, prefix: SharedPrefix, source: SharedPrefix | None, row: RowState) -> RowsPart:
        """The part that computes a prefix, or the tokens of it that follow its source."""
        length, slots = prefix.tokens, [policy.whole(prefix.tokens) for policy in self._policies]
        tokens = row.prompt_ids[:length]
        if source is not None:
            slots, tokens = [whole.behind(source.tokens) for whole in slots], tokens[source.tokens :]
            self._copied.append(source.group)
        levels = self._steps_of(slots, () if source is None else (source,), capacity=length)
        uploaded, own = self._uploaded(torch.tensor([tokens])), adapters_of([row])
        return RowsPart(slice(0), levels, uploaded, prefix.group, self._prefill_tokens, adapters=own)

    def _shared_by(self, rows: Sequence[tuple[RowState, int]]) -> Sequence[SharedPrefix | None]:
        return () if self._copies else [self._shared[row.row] for row, _ in rows]

    def _together(self, first: int) -> Iterator[slice]:
        """Ranges of new rows that have their prompts read at once."""
        lengths = [self._waiting.need(row).read for row in self._rows[first:]]
        for part in read_together(lengths, self._prefill_tokens, self._batch.echoes):
            yield slice(first + part.start, first + part.stop)

    def _reading(self, rows: slice) -> RowsPart:
        newcomers = self._rows[rows]
        needs = [self._waiting.need(row) for row in newcomers]
        steps = [[_first(slots, need) for slots in self._slots[row.row]] for row, need in zip(newcomers, needs)]
        slots, prefixes = map(StepSlots.of_rows, zip(*steps)), [need.prefix for need in needs]
        levels = self._steps_of(slots, prefixes, echoes_within=self._batch.echoes_within)
        tokens = padded(newcomers, [need.read for need in needs], self._batch.readings)
        own = adapters_of(newcomers)
        return RowsPart(rows, levels, self._uploaded(tokens), at_once=self._prefill_tokens, adapters=own)

    def note_prefixes(self, hidden: Tensor) -> None:
        for part, states in self.split(hidden):
            if part.prefix is not None:
                self._prefixes[part.prefix].hidden = torch.cat((*self._hidden_of_sources(part), states[0]))

    def _hidden_of_sources(self, part: RowsPart) -> Iterator[Tensor]:
        for source in part.now.prefixes:
            if source is not None and (hidden := self._prefixes[source.group].hidden) is not None:
                yield hidden[: source.tokens]

    def prefix_of(self, row: RowState) -> SharedOf | None:
        shared = self._shared[row.row]
        return None if shared is None else SharedOf(self._prefixes[shared.group], shared.tokens)

    @property
    def spared_tokens(self) -> int:
        joining = self._rows[self.joining] if self.joining is not None else []
        shared = (prefix.tokens for row in joining if (prefix := self._waiting.need(row).prefix) is not None)
        return sum(shared) - sum(part.tokens.numel() for part in self.parts if part.prefix is not None)

    def _drop(self, step: int, growing: Sequence[int]) -> None:
        for part in self.parts:
            if part.prefix is not None:
                self._prefixes.computed(part.prefix)
        while self._copied:
            self._prefixes.leave(self._copied.pop())
        for row in self._rows:
            if row.finished:
                if (prefix := self._shared.pop(row.row)) is not None:
                    self._prefixes.leave(prefix.group)
                self._waiting.end(row)
                del self._slots[row.row]
        super()._drop(step, growing)

    def _keep(self, places: Sequence[int]) -> None:
        """The seats stay as they are, whichever row leaves."""


def _first(slots: Occupancy, need: SeatNeed) -> StepSlots:
    """A row's first step, after the tokens that were computed before it came."""
    return slots.at(0).behind(need.spared) if need.spared else slots.at(0)
