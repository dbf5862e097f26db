"""KeyIndex: the keys of a cache in few bits, by which the query of a decode step chooses the slots that it attends.

The index of a slot is what its key becomes in these bits, as it is stored: it follows from the slots alone, whatever order they
were written in. Keys that are stored in these bits are their own index.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.kernels.chosen_slots import Always, by_slot, move_newest, put_newest
from h2o_flexgen.kernels.decode_attention import KVSlots
from h2o_flexgen.kernels.more_keys import More
from h2o_flexgen.kernels.operations import choose_slots, chosen_attention, take_slots
from h2o_flexgen.kv.slots import Coding
from h2o_flexgen.kv.step import KVStep
from h2o_flexgen.policies.policy import KVPolicy
from h2o_flexgen.policies.recall import FIRST, INDEX, NEWEST, RECENT, attended

ALWAYS = Always(FIRST, RECENT)
OUT_OF_ORDER = Always(FIRST, NEWEST)


class SlotsRead(NamedTuple):
    """Chosen slots that are in memory by themselves, where what steps have read stays. They are attended there, in the order of
    the slots."""

    tokens: Tensor  # (sets, rows, kv_heads, entries, width); rows have the entries together
    entries: Tensor  # (rows, kv_heads, most): of the chosen slots
    newest: Tensor  # (rows,): of the newest tokens

    def put_newest(self, now: KVStep, keys: Tensor, values: Tensor) -> None:
        """Copies the newest tokens from an image, (rows, kv_heads, slots, width) of each set."""
        for own, there in zip((keys, values), self.tokens):  # keys alone may have the values in them
            there[0, :, self.newest] = own[torch.arange(len(self.newest)), :, now.counts].transpose(0, 1)


class AttendedSlots(NamedTuple):
    """The slots that a decode step attends, (rows, kv_heads, most), and where they are if not in the image."""

    slots: Tensor
    read: SlotsRead | None = None


@dataclass
class ChosenSlots:
    """The slots that a decode step has chosen before it attends, for as long as they are on their way from elsewhere, and those
    that it changes. A cache and its parts have it together."""

    now: KVStep | None = None
    slots: Tensor | None = None  # (rows, kv_heads, most)
    read: SlotsRead | None = None
    is_needed: bool = False  # the other slots are not there
    changed: Tensor | None = None  # (rows, kv_heads): where the newest tokens of the last step are

    def taken(self, now: KVStep) -> AttendedSlots | None:
        """The slots of this step, if they are chosen; they are forgotten here."""
        if self.now is not now or self.slots is None:
            assert not self.is_needed, "what was not chosen before is not there"
            return None
        chosen, self.now, self.slots, self.read = AttendedSlots(self.slots, self.read), None, None, None
        return chosen


@dataclass(frozen=True)
class KeyIndex:
    stored: Coding  # how keys are stored
    most: int  # slots of a row that a step attends at most
    codes: Tensor | None = None  # (rows, kv_heads, slots, bytes); None: keys are their own index
    in_order: bool = True  # slots have the order of the text: nothing is evicted
    together: bool = False  # the heads of a row choose the same slots

    @classmethod
    def over(cls, region: Tensor | None, policy: KVPolicy, stored: Coding, shape: tuple[int, int, int]) -> KeyIndex:
        """An index over a region of memory; `shape` is (rows, kv_heads, slots)."""
        most, width = attended(policy.recall, shape[2]), replace(stored, format=INDEX).width
        codes = None if region is None else region[: prod(shape) * width].view(*shape, width)
        return cls(stored, most, codes, policy.keeps_all, policy.chooses_together)

    @property
    def kind(self) -> Hashable:
        """What is done by it, apart from what it has: equal for two that do the same."""
        return self.most, self.codes is None, self.in_order, self.together

    def part(self, rows: slice) -> KeyIndex:
        return self if self.codes is None else replace(self, codes=self.codes[rows])

    def copy_row(self, target: int, source: int, slots: int) -> None:
        if self.codes is not None:
            self.codes[target, :, :slots] = self.codes[source, :, :slots]

    def note(self, keys: Tensor, first: int, end: int) -> None:
        """Notes a range of slots of the stored keys (rows, kv_heads, slots, width)."""
        if self.codes is not None:
            self.codes[: len(keys), :, first:end] = self._of(keys[:, :, first:end])

    @cached_property
    def _coding(self) -> Coding:
        return replace(self.stored, format=INDEX)

    def _of(self, keys: Tensor) -> Tensor:
        if self.stored.format == INDEX:  # keys lie elsewhere, and their index is a copy
            return keys
        return self._coding.encode(self.stored.decode(keys))

    def choose(self, now: KVStep, q: Tensor, keys: KVSlots, more: More | None, cap: float | None) -> Tensor:
        """The slots that a decode step attends, q (rows, kv_heads, group, head_dim). The newest token is among the stored ones,
        and is noted here."""
        codes = keys.data if self.codes is None else self._with_newest(now, keys.data, self.codes)
        index, always = KVSlots(codes, INDEX), ALWAYS if self.in_order else OUT_OF_ORDER
        return choose_slots(q, index, now.with_newest, now.attended, self.most, always, more, cap, self.together)

    def attend(
        self,
        now: KVStep,
        q: Tensor,
        keys: KVSlots,
        values: KVSlots,
        more: More | None,
        gathers: str | None,
        cap: float | None,
        chosen: AttendedSlots | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention over the slots that a step chooses, or has chosen, and what every slot got, as `decode_attention` has both:
        those that are not chosen get nothing."""
        slots, read = (self.choose(now, q, keys, more, cap), None) if chosen is None else chosen
        places, count = slots, keys.data.shape[2]
        if read is not None:
            read.put_newest(now, keys.data, values.data)
            own = keys._replace(data=read.tokens[0])
            keys, values = own, own if values is keys else values._replace(data=read.tokens[-1])
            places = read.entries
        out, got = chosen_attention(q, keys, values, places, now.attended, more, gathers, cap)
        return out, None if got is None else by_slot(got, slots, count)

    def _with_newest(self, now: KVStep, keys: Tensor, codes: Tensor) -> Tensor:
        newest = keys.new_empty(*keys.shape[:2], 1, keys.shape[3])
        take_slots(keys, now.counts[:, None, None], newest)
        own = codes[: len(keys)]
        put_newest(own, now.counts, self._of(newest))
        return own

    def follow(self, now: KVStep, taken: Tensor) -> None:
        """Notes that the newest token of each row has taken over a slot of each head, (rows, kv_heads)."""
        if self.codes is not None:
            move_newest(self.codes[: len(taken)], now.counts, taken)
