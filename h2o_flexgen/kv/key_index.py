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


@dataclass
class ChosenSlots:
    """The slots that a decode step has chosen before it attends, for as long as they are on their way from a disk, and those
    that it changes. A cache and its parts have it together."""

    now: KVStep | None = None
    slots: Tensor | None = None  # (rows, kv_heads, most)
    is_needed: bool = False  # the other slots are not there
    changed: Tensor | None = None  # (rows, kv_heads): where the newest tokens of the last step are, under a policy that evicts

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
        if self.stored.format == INDEX:  # keys lie on disk, and their index is a copy
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
        chosen: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention over the slots that a step chooses, or has chosen, and what every slot got, as `decode_attention` has both:
        those that are not chosen get nothing."""
        slots = self.choose(now, q, keys, more, cap) if chosen is None else chosen
        out, got = chosen_attention(q, keys, values, slots, now.attended, more, gathers, cap)
        return out, None if got is None else by_slot(got, slots, keys.data.shape[2])

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
