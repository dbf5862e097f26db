"""Seats: a running block, in which rows come and go. Each batch has seats, and a queue of rows that wait for them.

Rows are divided into classes of what they need, one for each batch of the block, so that a seat has little more room than its
rows use. Classes are of equal work, so that all batches are busy until the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple


class Need(NamedTuple):
    """What a row may need: the tokens of its prompt, and how many it may grow; none if it only scores its prompt."""

    prompt_len: int
    gen_len: int

    @property
    def tokens(self) -> int:
        return self.prompt_len + self.gen_len

    @property
    def work(self) -> int:
        """Passes in which the row takes a seat, if it grows as long as it may."""
        return max(1, self.gen_len)


@dataclass(frozen=True)
class Seats:
    """The seats of a batch: who waits for them, in this order, and the largest needs among those."""

    queue: tuple[int, ...]
    largest: tuple[Need, ...]  # each row in the queue needs no more than one of these, in prompt and in growth
    needs: tuple[Need, ...] = field(repr=False, compare=False)  # of each row in the queue

    @property
    def longest_prompt(self) -> int:
        return max(need.prompt_len for need in self.largest)


def seats_of(needs: Sequence[Need], rows: Iterable[int], batches: int) -> tuple[Seats, ...]:
    """Divides rows among at most this many batches: first those that need most, as memory has to be enough for them, and in
    each queue first those that may grow longest, so that none of them is alone at the end."""
    order = sorted(rows, key=lambda row: (-needs[row].tokens, row))
    classes: list[list[int]] = [[] for _ in range(batches)]
    done = list(accumulate((needs[row].work for row in order), initial=0))
    for row, before in zip(order, done):
        classes[before * batches // done[-1]].append(row)
    return tuple(_seats(needs, own) for own in classes if own)


def _seats(needs: Sequence[Need], rows: Sequence[int]) -> Seats:
    queue = sorted(rows, key=lambda row: (-needs[row].gen_len, -needs[row].prompt_len, row))
    return Seats(tuple(queue), _largest({needs[row] for row in rows}), tuple(needs[row] for row in queue))


def _largest(needs: Iterable[Need]) -> tuple[Need, ...]:
    """The needs that no other exceeds in both."""
    kept: list[Need] = []
    for need in sorted(needs, reverse=True):
        if not kept or need.gen_len > kept[-1].gen_len:
            kept.append(need)
    return tuple(kept)
