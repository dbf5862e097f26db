"""What a KV policy keeps of a workload: what was asked for, and what it means in slots and in rows that fit the same memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.units import format_bytes
from h2o_flexgen.planning.workload_plan import WorkloadPlan
from h2o_flexgen.policies.full import Full
from h2o_flexgen.policies.occupancy import Occupancy
from h2o_flexgen.policies.policy import KVPolicy


@dataclass(frozen=True)
class Kept:
    planned: WorkloadPlan

    @property
    def spec(self) -> ModelSpec:
        return self.planned.spec

    @property
    def policy(self) -> KVPolicy:
        return self.planned.plan.policy

    def line(self) -> str:
        asked = ", ".join(f"{name} {value}" for name, value in self._asked.items())
        named = f"{self.policy.name} ({asked})" if asked else self.policy.name
        if not self.evicts:
            return f"{named} keeps all {_range(*self._held_range)} tokens of a row"
        total, kept = (format_bytes(slots * self._row_bytes) for slots in (self._capacity(Full()), self._capacity(self.policy)))
        rows = f"{self.rows_in_same_memory:.1f} times as many rows in the same memory"
        tokens = f"{_range(*self._held_range)} of {_range(*self._length_range)} tokens of a row ({100 * self.share:.1f} %)"
        return f"{named} keeps {tokens}; a row takes {kept} instead of {total}: {rows}"

    def as_json(self) -> dict[str, object]:
        return {
            "policy": self.policy.name,
            "asked": self._asked,
            "slots": list(self._held_range),
            "share": round(self.share, 4),
            "evicts": self.evicts,
            "rows_in_same_memory": round(self.rows_in_same_memory, 3),
        }

    @property
    def evicts(self) -> bool:
        return any(slots.evicts for slots, _ in self._slots)

    @property
    def share(self) -> float:
        """The share of all tokens that is held at the end."""
        held, totals = (sum(count * sum(each(slots)) for slots, count in self._slots) for each in (_held, _totals))
        return held / totals

    @property
    def rows_in_same_memory(self) -> float:
        """Memory of a row of the full cache over that of a row of this one, notes included."""
        noted = self.spec.kv_heads * self.policy.note_bytes * len(self.spec.kv_layers)
        return self._capacity(Full()) * self._row_bytes / (self._capacity(self.policy) * (self._row_bytes + noted))

    @property
    def _asked(self) -> dict[str, object]:
        return {name: getattr(self.policy.options, name) for name in self.policy.options.given}

    @cached_property
    def _slots(self) -> tuple[tuple[Occupancy, int], ...]:
        """Of the batches of a block of each shape, and how many such blocks there are."""
        return tuple((slots, count) for block, count in self.planned.blocks.alike for slots in block.slots)

    @property
    def _held_range(self) -> tuple[int, int]:
        return _least_and_most(_held(slots) for slots, _ in self._slots)

    @property
    def _length_range(self) -> tuple[int, int]:
        return _least_and_most(_totals(slots) for slots, _ in self._slots)

    @property
    def _row_bytes(self) -> int:
        """Of one slot of one row, over all layers."""
        return self.spec.kv_bytes_per_slot * len(self.spec.kv_layers)

    def _capacity(self, policy: KVPolicy) -> int:
        """Slots of a row of the first batch, whose rows are the longest."""
        block = self.planned.blocks.first.block
        return policy.slots(block.batches[0], block.gen_len).capacity


def _held(slots: Occupancy) -> Sequence[int]:
    """When the last token is generated, which is never stored."""
    return slots.counts(slots.gen_len)


def _totals(slots: Occupancy) -> Sequence[int]:
    return [total + slots.gen_len - 1 for total in slots.taken_in]


def _least_and_most(each: Iterable[Sequence[int]]) -> tuple[int, int]:
    counts = [count for one in each for count in one]
    return min(counts), max(counts)


def _range(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"
