"""Workload: the prompts to run, how many tokens each may grow, and how they are divided into blocks.

A *batch* (micro-batch) is what one COMPUTE task works on; a *block* is the batches that share one pass over the weights.
Prompts are sorted by length before they are divided, so that rows of one batch need little padding. Requests are dealt to
several processes so that all are busy for about the same time.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise, repeat, zip_longest
from typing import NamedTuple

from h2o_flexgen.core.allowed_values import Bounds
from h2o_flexgen.core.hints import shown
from h2o_flexgen.core.prefix_groups import NO_GROUP, SharedPrefix, room_of
from h2o_flexgen.core.seats import PrefixRoom, SeatNeed, Seats, seats_of

MOST_PROMPTS = 1_000_000  # prompts in a workload: many functions loop over them
MOST_BATCHES = 10_000  # batches in a block
MOST_TOKENS = 10_000_000  # tokens in a text, prompt or generation: the longest contexts of any model
PROMPTS, TOKENS = Bounds(1, MOST_PROMPTS), Bounds(1, MOST_TOKENS)
GATHER = Bounds(0, 3600, is_whole=False, note=", in seconds")  # that a block waits for requests behind its first
ECHO_TOKENS = 2048  # of the echo of a prompt that are computed as one part, at most: those see each other


def check_num_prompts(num: int) -> None:
    """Refuses a number of prompts that is too large, before a list of that length is made."""
    if num > MOST_PROMPTS:
        raise ValueError(f"{shown(num)} prompts are more than one run takes; give {MOST_PROMPTS} at most, or run them in parts")


def evenly(first: int, last: int, most: int) -> Iterator[slice]:
    """The pieces, one after the other and of about one length, of a range of tokens of which at most so many are computed at
    once."""
    count = -(-(last - first) // most)
    bounds = (first + (last - first) * piece // count for piece in range(count + 1))
    return (slice(*pair) for pair in pairwise(bounds))


@dataclass(frozen=True)
class Batch:
    """The rows of one micro-batch: their places in the input, and the tokens of each that step 0 takes in."""

    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    seen: tuple[int, ...] = ()  # tokens already in each row's KV; empty for new texts
    context: int | None = None  # for a text with KV that outlives the block: the most tokens it may grow to
    seats: Seats | None = None  # where rows come and go: then `rows` and `lengths` are the most that may be there
    echoes_within: int | None = None  # the positions of the model, where prompts are read twice, one copy after the other

    @property
    def size(self) -> int:
        return len(self.rows)

    @property
    def before(self) -> tuple[int, ...]:
        """Tokens already in each row's KV before step 0."""
        return self.seen or (0,) * self.size

    @property
    def longest_prefix(self) -> int:
        """Tokens of the longest prefix that its rows share with others."""
        return 0 if self.seats is None else self.seats.prefixes.longest

    def longest_text(self, gen_len: int) -> int:
        """Tokens of the longest text that a row may have, with its prompt. `gen_len`: how far rows grow that begin together."""
        if self.seats is not None:
            return max(need.tokens for need in self.seats.largest) + self.longest_prefix
        return self.prompt_len + gen_len if self.context is None else self.context

    @property
    def lives_on(self) -> bool:
        return self.context is not None

    @property
    def echoes(self) -> bool:
        return self.echoes_within is not None

    @property
    def readings(self) -> int:
        """How often every token of a prompt is computed."""
        return 2 if self.echoes else 1

    def parts(self, tokens: int) -> tuple[Batch, ...]:
        """Neighbouring rows that have their prompts read together: at most `tokens` with padding and echo, or one row. A
        longer prompt is a part of its own, and computed piece by piece."""
        return tuple(map(self.only, self._places_of_parts(tokens)))

    def _places_of_parts(self, tokens: int) -> list[range]:
        starts, longest = [0], 0
        for place, length in enumerate(self.lengths):
            longest = max(longest, length)
            if place > starts[-1] and self.readings * (place + 1 - starts[-1]) * longest > tokens:
                starts.append(place)
                longest = length
        return [range(start, end) for start, end in pairwise([*starts, self.size])]

    def kinds_of_parts(self, tokens: int) -> Mapping[Batch, int]:
        """The distinct parts, apart from their places in the input, and how many of each there are."""
        if tokens not in self._kinds:
            before, alike = self.before, dict[object, list[range]]()
            for part in self._places_of_parts(tokens):
                own = slice(part.start, part.stop)
                alike.setdefault((self.lengths[own], before[own]), []).append(part)
            self._kinds[tokens] = {self.only(parts[0]).anywhere: len(parts) for parts in alike.values()}
        return self._kinds[tokens]

    @cached_property
    def _kinds(self) -> dict[int, Mapping[Batch, int]]:
        return {}

    @property
    def anywhere(self) -> Batch:
        """The same work at the first places of the input."""
        return replace(self, rows=tuple(range(self.size)))

    def only(self, places: Sequence[int]) -> Batch:
        """Only the rows at these places, in this order."""
        rows, lengths, seen = (tuple(each[place] for place in places) for each in (self.rows, self.lengths, self.before))
        return replace(self, rows=rows, lengths=lengths, seen=seen if self.seen else ())

    @property
    def prompt_len(self) -> int:
        """Length of the longest row, to which the others are padded (on the right) in prefill."""
        return max(self.lengths)


@dataclass(frozen=True)
class Block:
    """The batches that share one pass over the weights, and the number of tokens that each row may grow."""

    batches: tuple[Batch, ...]
    gen_len: int

    @property
    def num_rows(self) -> int:
        return sum(batch.size for batch in self.batches)

    @property
    def is_running(self) -> bool:
        """Whether rows come and go."""
        return any(batch.seats is not None for batch in self.batches)

    @cached_property
    def only_reads(self) -> bool:
        """Whether no row has more than the token that its prompt's pass picks. What a layer keeps of them is then needed in its
        own visit alone, and all layers keep it in one place."""
        if any(batch.context is not None or any(batch.seen) for batch in self.batches):
            return False
        growing = (need.gen_len for batch in self.batches if batch.seats is not None for need in batch.seats.largest)
        return max(growing, default=1) <= 1 if self.is_running else self.gen_len == 1

    @property
    def prefix_room(self) -> int:
        """Tokens of shared prefixes that are held at once, at most."""
        rooms = [batch.seats.prefixes for batch in self.batches if batch.seats is not None]
        return min(sum(room.of_batch for room in rooms), max((room.of_all for room in rooms), default=0))

    @property
    def rows(self) -> list[int]:
        return [row for batch in self.batches for row in batch.rows]

    def echoed(self, positions: int) -> Block:
        """The same block where prompts are read twice, one copy after the other."""
        return replace(self, batches=tuple(replace(batch, echoes_within=positions) for batch in self.batches))

    def with_rows(self, rows: Sequence[int]) -> Block:
        """A block of the same shape with other rows."""
        starts = accumulate((batch.size for batch in self.batches), initial=0)
        own = (tuple(rows[start : start + batch.size]) for start, batch in zip(starts, self.batches))
        return replace(self, batches=tuple(replace(batch, rows=each) for batch, each in zip(self.batches, own)))


class BlockSize(NamedTuple):
    batch_size: int
    num_batches: int

    @classmethod
    def of(cls, block: Block) -> BlockSize:
        return cls(max(batch.size for batch in block.batches), len(block.batches))

    @property
    def smaller(self) -> BlockSize | None:
        """A block half as large; None below one row. Rows are halved first: as many batches hide the weights as well."""
        if self.batch_size > 1:
            return self._replace(batch_size=self.batch_size // 2)
        return self._replace(num_batches=self.num_batches // 2) if self.num_batches > 1 else None

    def __str__(self) -> str:
        return f"{self.batch_size} x {self.num_batches}"


@dataclass(frozen=True)
class Workload:
    prompt_lens: tuple[int, ...]
    gen_len: int
    context: int | None = None  # for texts with KV that lives on: the workload is then the last block, which needs the most
    gen_lens: tuple[int, ...] | None = None  # where rows come and go: the tokens that each may grow, at most `gen_len`
    prefixes: tuple[SharedPrefix | None, ...] = ()  # what each of these shares with others; empty if none shares anything
    copies_prefixes: bool = False  # rows take them into their own slots
    prefix_room: int = 0  # where no request is known yet: tokens of prefixes that may be kept for requests to come
    prefix_states: int = 0  # of these, what each prefix takes for the states at its end

    def __post_init__(self) -> None:
        if not self.prompt_lens:
            raise ValueError("no prompts were given; give at least one")
        check_num_prompts(len(self.prompt_lens))
        if not 1 <= self.gen_len <= MOST_TOKENS:
            raise ValueError(f"tokens to generate is {shown(self.gen_len)}; give 1 to {MOST_TOKENS}")
        for length, row in self.first_of_length.items():
            if length < 1:
                raise ValueError(f"prompt {row} is empty; every prompt needs at least one token")
            if length > MOST_TOKENS:
                raise ValueError(f"prompt {row} has {shown(length)} tokens; the most is {MOST_TOKENS}")

    @classmethod
    def uniform(cls, num_prompts: int, prompt_len: int, gen_len: int) -> Workload:
        check_num_prompts(num_prompts)
        return cls((prompt_len,) * num_prompts, gen_len)

    @classmethod
    def running(
        cls, needs: Sequence[SeatNeed], prefixes: Sequence[SharedPrefix | None] = (), copies_prefixes: bool = False
    ) -> Workload:
        """Rows that come and go, with whole prompts: a row that ends makes room for the next."""
        check_num_prompts(len(needs))
        gen_lens = tuple(need.gen_len for need in needs)
        lengths, shared = tuple(need.prompt_len for need in needs), tuple(prefixes) if any(prefixes) else ()
        return cls(lengths, max((1, *gen_lens)), None, gen_lens, shared, copies_prefixes)

    @classmethod
    def arriving(cls, need: SeatNeed, rows: int, prefix_room: int = 0, prefix_states: int = 0) -> Workload:
        """So many rows that are not known yet, none of which needs more; and room for what they may turn out to share."""
        return replace(cls.running([need] * rows), prefix_room=room_of(prefix_room), prefix_states=prefix_states)

    def thinned(self, most: int) -> Workload:
        """A workload like this one, of no more rows, if rows come and go: the neediest, and the others evenly chosen."""
        if self.gen_lens is None or self.num_prompts <= most:
            return self
        gen_lens = self.gen_lens
        order = sorted(range(self.num_prompts), key=lambda row: (-self.prompt_lens[row] - gen_lens[row], row))
        rows = [order[(place * len(order) + len(order) // 2) // most if place else 0] for place in range(most)]
        prefixes = tuple(self.prefixes[row] for row in rows) if self.prefixes else ()
        lengths = tuple(self.prompt_lens[row] for row in rows)
        return replace(self, prompt_lens=lengths, gen_lens=tuple(gen_lens[row] for row in rows), prefixes=prefixes)

    @property
    def num_prompts(self) -> int:
        return len(self.prompt_lens)

    @property
    def num_tokens(self) -> int:
        """Tokens that all prompts together may grow."""
        return self.num_prompts * self.gen_len if self.gen_lens is None else sum(self.gen_lens)

    @cached_property
    def first_of_length(self) -> Mapping[int, int]:
        """The distinct lengths of prompts, each with its first row, in the order of these rows."""
        rows: dict[int, int] = {}
        for row, length in enumerate(self.prompt_lens):
            rows.setdefault(length, row)
        return rows

    def blocks(self, batch_size: int, num_batches: int, rows: Sequence[int] | None = None) -> tuple[Block, ...]:
        """The blocks of all rows, or of those that are left."""
        return tuple(
            first.with_rows(own[start : start + first.num_rows])
            for first, own in self.alike_blocks(batch_size, num_batches, rows)
            for start in range(0, len(own), first.num_rows)
        )

    def alike_blocks(
        self, batch_size: int, num_batches: int, rows: Sequence[int] | None = None
    ) -> Iterator[tuple[Block, Sequence[int]]]:
        """The first block of each shape, and the rows of all blocks of this shape: a million prompts of one length have two
        shapes at most. Longest prompts come first, so the need for memory is greatest at the start and not after hours. So
        blocks of one shape follow each other, and all their prompts have one length. Rows that come and go are one block."""
        if self.gen_lens is not None:
            block = self._running_block(batch_size, num_batches, rows)
            yield block, block.rows
            return
        order, size, start = self._longest_first(rows), batch_size * num_batches, 0
        lengths = [-self.prompt_lens[row] for row in order]
        while start < len(order):
            whole = (bisect_right(lengths, lengths[start], start) - start) // size * size
            end = min(start + (whole or size), len(order))
            yield self._block(order[start : min(start + size, end)], batch_size), order[start:end]
            start = end

    @cached_property
    def needs(self) -> Sequence[SeatNeed]:
        gen_lens = (self.gen_len,) * self.num_prompts if self.gen_lens is None else self.gen_lens
        prefixes = self.prefixes or (None,) * self.num_prompts
        known: dict[SeatNeed, SeatNeed] = {}  # equal ones are one: there may be a million rows
        each = map(SeatNeed.behind, prefixes, self.prompt_lens, gen_lens, repeat(self.copies_prefixes))
        return [known.setdefault(need, need) for need in each]

    def _running_block(self, batch_size: int, num_batches: int, rows: Sequence[int] | None) -> Block:
        """Its steps are passes over the weights: never more than there are tokens to generate, and prompts to be read."""
        enough = min(num_batches, -(-(self.num_prompts if rows is None else len(rows)) // batch_size))
        each = [self._with_room(own.for_batches_of(batch_size), enough) for own in self._seats(enough, rows)]
        batches = tuple(
            Batch(own.queue[:batch_size], (own.longest_prompt,) * min(batch_size, len(own.queue)), seats=own) for own in each
        )
        return Block(batches, sum(own.work for own in each) + 1)

    def _with_room(self, seats: Seats, batches: int) -> Seats:
        """The seats with the room for prefixes that was asked for, if it was."""
        if not self.prefix_room:
            return seats
        room = PrefixRoom.planned(self.prefix_room, seats.longest_prompt - 1, batches, self.prefix_states)
        return replace(seats, prefixes=room)

    def _seats(self, batches: int, rows: Sequence[int] | None) -> tuple[Seats, ...]:
        """All rows are divided once for each number of batches: a search asks for very many sizes."""
        if rows is not None:
            return seats_of(self.needs, rows, batches)
        if batches not in self._known_seats:
            self._known_seats[batches] = seats_of(self.needs, range(self.num_prompts), batches)
        return self._known_seats[batches]

    @cached_property
    def _known_seats(self) -> dict[int, tuple[Seats, ...]]:
        return {}

    def _longest_first(self, rows: Sequence[int] | None = None) -> list[int]:
        in_order = range(self.num_prompts) if rows is None else sorted(rows)
        return sorted(in_order, key=self.prompt_lens.__getitem__, reverse=True)  # a stable sort: equal lengths stay in order

    def _block(self, rows: Sequence[int], batch_size: int) -> Block:
        starts = range(0, len(rows), batch_size)
        return Block(tuple(self._batch(tuple(rows[start : start + batch_size])) for start in starts), self.gen_len)

    def _batch(self, rows: tuple[int, ...]) -> Batch:
        lengths = tuple(self.prompt_lens[row] for row in rows)
        seen = () if self.context is None else tuple(self.context - length for length in lengths)
        return Batch(rows, lengths, seen, self.context)


CUTS = 4  # portions of a part's work into which those that share a prefix are cut, so that no part gets much more than others


def dealt(work: Sequence[int], parts: int, groups: Sequence[int] | None = None) -> list[list[int]]:
    """The places of requests in each part, in order. The largest go first, each to the part that has least. Those of a group
    share a prefix and stay together, as far as that leaves parts equal; `groups` has the group of each, NO_GROUP for none."""
    portions = _portions(work, [NO_GROUP] * len(work) if groups is None else groups, sum(work) / (CUTS * parts))
    dealt_to: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0, part) for part in range(parts)]
    for portion in sorted(portions, key=lambda places: (-sum(work[place] for place in places), places[0])):
        load, part = heapq.heappop(loads)
        dealt_to[part] += portion
        heapq.heappush(loads, (load + sum(work[place] for place in portion), part))
    return [sorted(places) for places in dealt_to]


def _portions(work: Sequence[int], groups: Sequence[int], most: float) -> list[list[int]]:
    """Requests that stay together."""
    of_group: dict[int, list[list[int]]] = defaultdict(list)
    loads: dict[int, int] = {}
    for place, group in enumerate(groups):
        if group == NO_GROUP or not of_group[group] or loads[group] + work[place] > most:
            of_group[group].append([])
            loads[group] = 0
        of_group[group][-1].append(place)
        loads[group] += work[place]
    return [portion for portions in of_group.values() for portion in portions]


def longest_part(workload: Workload, parts: int) -> Workload:
    """A workload that is at least as long as each part of it, row by row: a plan for it has room for any of them."""
    if parts == 1:
        return workload
    lengths = workload.prompt_lens
    of_parts = [sorted((lengths[row] for row in rows), reverse=True) for rows in dealt(lengths, parts)]
    return Workload(tuple(max(each) for each in zip_longest(*of_parts, fillvalue=0)), workload.gen_len)
