"""Occupancy: how many slots each row of a batch holds at each step. This is the project's only slot arithmetic: allocator, cost
model, simulator, engine and tests all call it, so that what is predicted is what happens.

A row appends its newest token after its others. If it then holds more than its budget, one token is evicted and the newest
takes its slot, so that the slots in use are always one range from the start.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import isqrt
from statistics import fmean
from typing import TypeVar

from h2o_flexgen.core.buffer_layout import KVLayout
from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.workload import Batch
from h2o_flexgen.policies.recall import ALL, attended

T = TypeVar("T")


@dataclass(frozen=True)
class RowBudget:
    """The slots that one row holds between passes, and which tokens in them cannot be evicted."""

    slots: int
    sinks: int = 0  # the first tokens of the text
    window: int = 0  # the newest tokens, in decode
    prompt_window: int = 0  # the newest tokens, when the prompt is selected from
    queries: int | None = None  # only the last N prompt queries contribute to scores; None: all do
    recall: float = ALL  # the share of what is held that a decode step attends


@dataclass(frozen=True)
class StepSlots:
    """What the rows of one COMPUTE hold when it begins and when it is over. They may have begun at different times."""

    is_prefill: bool  # each row may have several new tokens
    seen: tuple[int, ...]  # tokens of each row's text before the new ones
    new: tuple[int, ...]  # new tokens of each row
    counts: tuple[int, ...]  # slots in use before
    after: tuple[int, ...]  # slots in use afterwards
    budgets: tuple[RowBudget, ...]
    stores_singly: bool = False  # in decode one slot of each row changes, and these do not lie side by side
    copies: bool = False  # what was seen lies elsewhere, in a prefix that rows share, and comes into their own slots now

    @cached_property
    def held(self) -> int:
        """Slots in use before, in the row that has most."""
        return max(self.counts)

    @cached_property
    def kept(self) -> int:
        """Slots in use afterwards, in the row that has most."""
        return max(self.after)

    @cached_property
    def evicts(self) -> bool:
        return any(after < count + new for after, count, new in zip(self.after, self.counts, self.new))

    @property
    def attended(self) -> tuple[int, ...]:
        """Slots that each row attends, of those that it holds with its new tokens, where it chooses them."""
        held = zip(self.budgets, self.counts, self.new)
        return tuple([attended(budget.recall, count + new) for budget, count, new in held])

    @cached_property
    def changed(self) -> tuple[int, int]:
        """The range of slots that are written, over all rows. Where they are stored one by one, any may have changed before."""
        return 0 if self.evicts or self.stores_singly or self.copies else min(self.counts), self.kept

    @cached_property
    def begins(self) -> tuple[bool, ...]:
        """Whether each row's text begins in this step, even if after a copy."""
        return tuple(self.copies or not seen for seen in self.seen) if self.is_prefill else (False,) * len(self.seen)

    def behind(self, spared: int) -> StepSlots:
        """The same first step of one row where its first tokens were computed before, and are copied."""
        return replace(
            self,
            seen=(spared,),
            new=(self.new[0] - spared,),
            counts=(spared,),
            copies=True,
        )

    @classmethod
    def of_rows(cls, steps: Sequence[StepSlots]) -> StepSlots:
        """The step of rows that are each at a step of their own: all read their prompts, or none does."""

        def of_all(values: Iterable[tuple[T, ...]]) -> tuple[T, ...]:
            return tuple(chain.from_iterable(values))

        joined = cls(
            steps[0].is_prefill,
            of_all(one.seen for one in steps),
            of_all(one.new for one in steps),
            of_all(one.counts for one in steps),
            of_all(one.after for one in steps),
            of_all(one.budgets for one in steps),
            copies=any(one.copies for one in steps),
        )
        return replace(joined, stores_singly=not joined.is_prefill and max(joined.counts) > min(joined.counts))


@dataclass(frozen=True)
class Occupancy:
    batch: Batch
    budgets: tuple[RowBudget, ...]  # row by row
    gen_len: int
    prompt_only: bool = False  # only prompt tokens are evicted

    @cached_property
    def capacity(self) -> int:
        """Slots per row to allocate. The last generated token is not stored, or only by the next block."""
        if self.batch.context is not None:
            return max(min(self.batch.context, budget.slots + 1) for budget in self.budgets)
        if self.batch.seats is not None:
            return max(budget.slots for budget in self.budgets)
        return max(self.held(1), self.held(self.gen_len - 1) + 1 if self.gen_len > 1 else 0)

    def layout(self, spec: ModelSpec, heads: int) -> KVLayout:
        """How keys and values of the batch lie in one layer, of so many of its KV heads."""
        by_row = any(budget.recall != ALL for budget in self.budgets)
        journal = 0 if by_row else self.journal_capacity
        return KVLayout(self.batch.size, heads, self.capacity, journal, heads * spec.kv_bytes_per_head, by_row)

    @property
    def evicts(self) -> bool:
        """True if any row may ever lose a token."""
        generated = 0 if self.prompt_only else self.gen_len - 1
        return any(total + generated > slots for _, total, slots in self._kinds)

    @cached_property
    def taken_in(self) -> tuple[int, ...]:
        """Tokens that each row has seen after step 0."""
        return tuple(before + length for before, length in zip(self.batch.before, self.batch.lengths))

    def counts(self, step: int) -> tuple[int, ...]:
        """Slots in use in each row when COMPUTE of a step begins; for step 0 (the prompt) those left by an earlier block."""
        if step == 0:
            return tuple(min(before, budget.slots) for before, budget in zip(self.batch.before, self.budgets))
        return tuple([self._count(total, budget.slots, step) for total, budget in zip(self.taken_in, self.budgets)])

    @staticmethod
    def joint_step(rows: Sequence[tuple[Occupancy, int]]) -> StepSlots:
        """The decode step of rows that are each at a step of their own, and for which there is an occupancy of each alone."""
        totals = [(own, own.taken_in[0], own.budgets[0].slots, step) for own, step in rows]
        counts = tuple([own._count(total, slots, step) for own, total, slots, step in totals])
        return StepSlots(
            is_prefill=False,
            seen=tuple([total + step - 1 for _, total, _, step in totals]),
            new=(1,) * len(rows),
            counts=counts,
            after=tuple([own._count(total, slots, step + 1) for own, total, slots, step in totals]),
            budgets=tuple([own.budgets[0] for own, _ in rows]),
            stores_singly=max(counts) > min(counts),
        )

    def at(self, step: int) -> StepSlots:
        """What the rows hold before and after one step."""
        is_prefill, taken_in = step == 0, self.taken_in
        return StepSlots(
            is_prefill,
            self.batch.before if is_prefill else tuple(total + step - 1 for total in taken_in),
            self.batch.lengths if is_prefill else (1,) * self.batch.size,
            self.counts(step),
            self.counts(step + 1),
            self.budgets,
            self._is_scattered(step),
        )

    def held(self, step: int) -> int:
        """Slots in use when COMPUTE of a step begins, in the row that has most."""
        return max(self._distinct_counts(step))

    def evicts_at(self, step: int) -> bool:
        if step == 0:
            return any(total > slots for _, total, slots in self._kinds)
        return any(self._count(total, slots, step + 1) <= self._count(total, slots, step) for _, total, slots in self._kinds)

    def changed(self, step: int) -> tuple[int, int]:
        """The range of slots that COMPUTE of `step` writes (0 is prefill), over all rows."""
        return 0 if self.evicts_at(step) else min(self._distinct_counts(step)), self.held(step + 1)

    @cached_property
    def _kinds(self) -> tuple[tuple[int, int, int], ...]:
        """The distinct (tokens before the block, tokens after step 0, slots) of the rows: large batches have few."""
        return tuple(set(zip(self.batch.before, self.taken_in, (budget.slots for budget in self.budgets))))

    def _distinct_counts(self, step: int) -> list[int]:
        if step == 0:
            return [min(before, slots) for before, _, slots in self._kinds]
        return [self._count(total, slots, step) for _, total, slots in self._kinds]

    # -- slots moved, over all rows ---------------------------------------------------------------------------------------

    def stored(self, step: int) -> int:
        """Slots stored from device to host: the range that changed, or the one slot per head that the newest token took."""
        first, last = self.changed(step)
        return 1 if self._is_scattered(step) else last - first

    def written(self, step: int) -> int:
        """Slots written to disk: those stored, or all of them if the journal is full."""
        return (
            self.held(step + 1)
            if self._is_scattered(step) and self.journal_entries(step) == self.journal_capacity
            else self.stored(step)
        )

    def journal_entries(self, step: int) -> int:
        """Slots in the disk journal when `step` begins, which are read in addition to those held. Step 0 leaves none; what an
        earlier block left before it is not counted."""
        since = step - self._first_scattered
        return since % (self.journal_capacity + 1) if since > 0 else 0

    def mean_read(self, step: int) -> float:
        """Slots read from disk on average: those held and, once tokens are evicted, the journal's mean length."""
        return self.held(step) + (self._mean_entries if self._is_scattered(step) else 0.0)

    def mean_written(self, step: int) -> float:
        """Slots written to disk on average."""
        anew = self._share_written_anew if self._is_scattered(step) else 0.0
        return anew * self.held(step + 1) + (1 - anew) * self.stored(step)

    @property
    def journal_capacity(self) -> int:
        """Slots that fill the journal on disk: scattered slots would be slow to write, so they are appended to it until it is
        full and all slots are written anew. At this length reading it and writing anew cost least together."""
        return isqrt(2 * max(budget.slots for budget in self.budgets)) if self._may_scatter else 0

    @cached_property
    def _mean_entries(self) -> float:
        """The journal's mean length over all steps that evict."""
        return fmean(map(self.journal_entries, range(self._first_scattered, self.gen_len)))

    @cached_property
    def _share_written_anew(self) -> float:
        """The share of evicting steps that find the journal full."""
        full = self.journal_capacity
        return fmean(self.journal_entries(step) == full for step in range(self._first_scattered, self.gen_len))

    @property
    def first_evicting_step(self) -> int:
        """The first decode step in which a row loses a token, or the step after the last if none does."""
        return self._first_scattered

    @property
    def _may_scatter(self) -> bool:
        if self.batch.context is not None:
            return any(budget.slots < self.batch.context for budget in self.budgets)
        if self.batch.seats is not None:
            return True  # rows of different ages store one slot each, and these do not lie side by side
        return self._first_scattered < self.gen_len

    @cached_property
    def _first_scattered(self) -> int:
        """The first decode step in which any row has to evict; from then on every step evicts."""
        if self.prompt_only:
            return self.gen_len
        return min(max(1, slots - total + 1) for _, total, slots in self._kinds)

    def _is_scattered(self, step: int) -> bool:
        return step > 0 and self.evicts_at(step)

    # --------------------------------------------------------------------------------------------------------------------

    def _count(self, total: int, budget: int, step: int) -> int:
        if self.prompt_only:
            return min(total, budget) + step - 1
        return min(total + step - 1, budget)
