"""Seats: a running block, in which rows come and go. Each batch has seats, and a queue of rows that wait for them.

Rows are divided into classes of what they need, one for each batch of the block, so that a seat has little more room than its
rows use. Classes are of equal work, so that all batches are busy until the end. Rows that share a prefix follow each other, in
the same order in all queues, so that few prefixes are held at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

from h2o_flexgen.core.prefix_groups import NO_GROUP, SharedPrefix, room_of


class SeatNeed(NamedTuple):
    """What a row may need: the tokens of its prompt that take slots of its own, and how many it may grow; none if it only
    scores its prompt."""

    prompt_len: int
    gen_len: int
    prefix: SharedPrefix | None = None  # what its prompt begins with, as others do
    copies: bool = False  # takes that into its own slots

    @classmethod
    def behind(cls, prefix: SharedPrefix | None, prompt_len: int, gen_len: int, is_copied: bool) -> SeatNeed:
        """The need of a row with this prompt. The prefix takes none of its slots, unless it is copied."""
        if prefix is None:
            return cls(prompt_len, gen_len)
        if is_copied:
            return cls(prompt_len, gen_len, prefix, copies=True)
        return cls(prompt_len - prefix.tokens, gen_len, prefix)

    @property
    def alone(self) -> SeatNeed:
        """The same slots, for a row that shares nothing."""
        return SeatNeed(self.prompt_len, self.gen_len)

    @property
    def spared(self) -> int:
        """Tokens that are copied into its own slots."""
        return self.prefix.tokens if self.copies and self.prefix is not None else 0

    @property
    def read(self) -> int:
        """Tokens of its prompt that are computed for it alone."""
        return self.prompt_len - self.spared

    @property
    def group(self) -> int:
        return NO_GROUP if self.prefix is None else self.prefix.group

    @property
    def tokens(self) -> int:
        return self.prompt_len + self.gen_len

    @property
    def work(self) -> int:
        """Passes in which the row takes a seat, if it grows as long as it may."""
        return max(1, self.gen_len)


class PrefixRoom(NamedTuple):
    """Room for the prefixes that rows share, in tokens."""

    longest: int  # tokens of the longest prefix
    of_batch: int  # for the prefixes of rows with a seat; of requests that arrive, for those that a pass computes
    of_all: int  # for all prefixes of all rows that come and go
    computed: int  # tokens that a pass may compute of them: without the states that lie beside them

    @classmethod
    def planned(cls, tokens: int, longest: int, batches: int, beside: int = 0) -> PrefixRoom:
        """The room of each of so many batches where no request is known yet: all have these tokens together. `beside`: the
        room of the states of each prefix."""
        own = max(0, tokens - beside)
        longest = min(longest, own)
        computed = max(room_of(longest), room_of(-(-own // batches)))
        return cls(longest, computed + beside, tokens, computed)


@dataclass(frozen=True)
class Seats:
    """The seats of a batch: the rows that wait for them, in this order, and the largest needs among those."""

    queue: tuple[int, ...]
    largest: tuple[SeatNeed, ...]  # each row in the queue needs no more than one of these, in prompt and in growth
    longest_prompt: int  # tokens that are computed for one row alone
    prefixes: PrefixRoom
    needs: tuple[SeatNeed, ...] = field(repr=False, compare=False)  # of each row in the queue
    work: int  # of all these rows together

    def for_batches_of(self, size: int) -> Seats:
        """The same queue for so many seats."""
        if not self.prefixes.longest:
            return self
        of_batch, computed = _most_at_once([need.prefix for need in self.needs], size)
        return replace(self, prefixes=self.prefixes._replace(of_batch=of_batch, computed=computed))


def seats_of(needs: Sequence[SeatNeed], rows: Iterable[int], batches: int) -> tuple[Seats, ...]:
    """Divides rows among at most this many batches, of one seat each so far: first those that need most, as memory has to be
    enough for them, and in each queue first those that may grow longest, so that none of them is alone at the end."""
    order = sorted(sorted(rows), key=lambda row: -needs[row].tokens)
    classes: list[list[int]] = [[] for _ in range(batches)]
    done = list(accumulate((needs[row].work for row in order), initial=0))
    for row, before in zip(order, done):
        classes[before * batches // done[-1]].append(row)
    longest = _longest_of_groups(needs[row] for row in order)
    of_all = sum(prefix.room for prefix in {needs[row].prefix for row in order} if prefix is not None)
    return tuple(_seats(needs, own, longest, of_all) for own in classes if own)


def _longest_of_groups(needs: Iterable[SeatNeed]) -> dict[int, int]:
    """How long a row of each group may grow."""
    longest: dict[int, int] = {}
    for need in needs:
        if need.prefix is not None:
            longest[need.group] = max(need.gen_len, longest.get(need.group, 0))
    return longest


def _seats(needs: Sequence[SeatNeed], rows: Sequence[int], longest: dict[int, int], of_all: int) -> Seats:
    def turn(need: SeatNeed) -> tuple[int, ...]:
        return -longest.get(need.group, need.gen_len), need.group, -need.gen_len, -need.prompt_len

    own = {needs[row] for row in rows}
    turns = {need: place for place, need in enumerate(sorted(own, key=turn))}
    queue = sorted(sorted(rows), key=lambda row: turns[needs[row]])
    longest_shared = max((need.prefix.tokens for need in own if need.prefix is not None), default=0)
    of_batch, computed = _most_at_once([needs[row].prefix for row in queue], 1)
    room = PrefixRoom(longest_shared, of_batch, of_all, computed)
    largest, in_turn = _largest({need.alone for need in own}), tuple(needs[row] for row in queue)
    return Seats(tuple(queue), largest, max(need.read for need in own), room, in_turn, sum(need.work for need in in_turn))


def _most_at_once(prefixes: Sequence[SharedPrefix | None], size: int) -> tuple[int, int]:
    """The most room that the prefixes of so many neighbours take, and what of it is for tokens."""
    users: Counter[SharedPrefix] = Counter()
    most = most_tokens = room = beside = 0
    for place, joins in enumerate(prefixes):
        leaves = prefixes[place - size] if place >= size else None
        if leaves is not None:
            users[leaves] -= 1
            room -= 0 if users[leaves] else leaves.room
            beside -= 0 if users[leaves] else leaves.beside
        if joins is not None:
            room += 0 if users[joins] else joins.room
            beside += 0 if users[joins] else joins.beside
            users[joins] += 1
        most, most_tokens = max(most, room), max(most_tokens, room - beside)
    return most, most_tokens


def _largest(needs: Iterable[SeatNeed]) -> tuple[SeatNeed, ...]:
    """The needs that no other exceeds in both."""
    kept: list[SeatNeed] = []
    for need in sorted(needs, reverse=True):
        if not kept or need.gen_len > kept[-1].gen_len:
            kept.append(need)
    return tuple(kept)
