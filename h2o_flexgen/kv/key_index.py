"""KeyIndex: the keys of a cache in few bits, by which the query of a decode step chooses the slots that it attends.

The index of a slot is what its key becomes in these bits, as it is stored: it follows from the slots alone, whatever order they
were written in. Keys that are stored in these bits are their own index.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from torch import Tensor

from h2o_flexgen.kernels.chosen_slots import Always
from h2o_flexgen.kernels.decode_attention import KVSlots
from h2o_flexgen.kernels.more_keys import More
from h2o_flexgen.kernels.operations import append, choose_slots, chosen_attention, take_slots
from h2o_flexgen.kv.slots import Coding
from h2o_flexgen.kv.step import KVStep
from h2o_flexgen.policies.recall import FIRST, INDEX, RECENT, attended

ALWAYS = Always(FIRST, RECENT)


@dataclass
class ChosenSlots:
    """The slots that a decode step has chosen before it attends, for as long as they are on their way from a disk. A cache and
    its parts have it together."""

    now: KVStep | None = None
    slots: Tensor | None = None  # (rows, kv_heads, most)
    is_needed: bool = False  # the other slots are not there

    def taken(self, now: KVStep) -> Tensor | None:
        """The slots of this step, if they are chosen; they are forgotten here."""
        if self.now is not now:
            assert not self.is_needed, "what was not chosen before is not there"
            return None
        slots, self.now, self.slots = self.slots, None, None
        return slots


@dataclass(frozen=True)
class KeyIndex:
    stored: Coding  # how keys are stored
    most: int  # slots of a row that a step attends at most
    codes: Tensor | None = None  # (rows, kv_heads, slots, bytes); None: keys are their own index

    @classmethod
    def over(cls, region: Tensor | None, share: float, stored: Coding, shape: tuple[int, int, int]) -> KeyIndex:
        """An index over a region of memory; `shape` is (rows, kv_heads, slots)."""
        most = attended(share, shape[2])
        if region is None:
            return cls(stored, most)
        width = replace(stored, format=INDEX).width
        return cls(stored, most, region[: prod(shape) * width].view(*shape, width))

    @property
    def kind(self) -> Hashable:
        """What is done by it, apart from what it has: equal for two that do the same."""
        return self.most, self.codes is None

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
        if self.stored.format == INDEX:  # keys lie on disk, and their index is a copy
            return keys
        return self._coding.encode(self.stored.decode(keys))

    def choose(self, now: KVStep, q: Tensor, keys: KVSlots, more: More | None, cap: float | None) -> Tensor:
        """The slots that a decode step attends, q (rows, kv_heads, group, head_dim). The newest token is among the stored ones,
        and is noted here."""
        codes = keys.data if self.codes is None else self._with_newest(now, q, keys.data, self.codes)
        return choose_slots(q, KVSlots(codes, INDEX), now.with_newest, now.attended, self.most, ALWAYS, more, cap)

    def attend(
        self,
        now: KVStep,
        q: Tensor,
        keys: KVSlots,
        values: KVSlots,
        more: More | None,
        cap: float | None,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """Attention over the slots that a step chooses, or has chosen."""
        slots = self.choose(now, q, keys, more, cap) if chosen is None else chosen
        return chosen_attention(q, keys, values, slots, now.attended, more, cap)

    def _with_newest(self, now: KVStep, q: Tensor, keys: Tensor, codes: Tensor) -> Tensor:
        newest = keys.new_empty(*keys.shape[:2], 1, keys.shape[3])
        take_slots(keys, now.counts[:, None, None], newest)
        query = q[:, None, 0, :1]  # it says what is computed with, and stays as it is
        append(codes[None, : len(keys)], now.newest, query, self._of(newest).transpose(1, 2), None, None, None)
        return codes[: len(keys)]
