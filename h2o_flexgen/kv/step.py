"""Pass: one batch's way through all layers at one step: what its layers have in common, worked out once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from h2o_flexgen.policies.occupancy import Occupancy


@dataclass(frozen=True)
class KVStep:
    is_prefill: bool  # several tokens of each row may come at once, padded behind
    positions: Tensor  # (rows, tokens) of the new tokens in their texts, from 0
    counts: Tensor  # (rows,) slots that each row holds before
    capacity: int  # slots of the images
    slots: Occupancy
    step: int

    @classmethod
    def of(cls, slots: Occupancy, step: int, capacity: int, device: torch.device) -> KVStep:
        counts = torch.tensor(slots.counts(step), device=device)
        if step == 0:
            before = torch.tensor(slots.batch.before, device=device).unsqueeze(1)
            return cls(True, before + torch.arange(slots.batch.prompt_len, device=device), counts, capacity, slots, step)
        return cls(False, (torch.tensor(slots.taken_in, device=device) + step - 1).unsqueeze(1), counts, capacity, slots, step)

    @cached_property
    def held(self) -> int:
        """Slots in use before, in the row that has most."""
        return self.slots.held(self.step)

    @cached_property
    def evicts(self) -> bool:
        return self.slots.evicts_at(self.step)

    @cached_property
    def row_index(self) -> Tensor:
        return torch.arange(self.counts.shape[0], device=self.counts.device)

    @cached_property
    def behind_held(self) -> Tensor:
        """Slots behind what a row holds before. (rows, 1, slots)"""
        return torch.arange(self.capacity, device=self.counts.device) >= self.counts[:, None, None]

    @cached_property
    def with_newest(self) -> Tensor:
        """In decode: keys that each row attends. (rows,)"""
        return self.counts + 1

    @cached_property
    def behind_newest(self) -> Tensor:
        """In decode: slots behind a row's newest key. (rows, 1, slots)"""
        return torch.arange(self.capacity, device=self.counts.device) > self.counts[:, None, None]

    @cached_property
    def mask(self) -> Tensor:
        """0 where a row has a key, its newest one included, -inf on the slots behind. (rows, 1, 1, slots), fp32"""
        return (
            torch.zeros(self.behind_newest.shape, dtype=torch.float32, device=self.behind_newest.device)
            .masked_fill_(self.behind_newest, -torch.inf)
            .unsqueeze(1)
        )

    # -- row by row, as (rows, 1, 1) -------------------------------------------------------------------------------------

    @cached_property
    def lengths(self) -> Tensor:
        """New tokens of each row in a prefill; what stands behind them are pads."""
        return self._column(list(self.slots.batch.lengths))

    @cached_property
    def sinks(self) -> Tensor:
        """Tokens before this position are protected."""
        return self._column([budget.sinks for budget in self.slots.budgets])

    @cached_property
    def window(self) -> Tensor:
        """Tokens from this position on are protected."""
        rows = zip(self.slots.taken_in, self.slots.batch.before, self.slots.budgets)
        return self._column(
            [
                total + self.step - (budget.prompt_window if self.is_prefill and not before else budget.window)
                for total, before, budget in rows
            ]
        )

    @cached_property
    def after(self) -> Tensor:
        """Slots that each row holds when this pass is over."""
        return self._column(list(self.slots.counts(self.step + 1)))

    @cached_property
    def queries(self) -> Tensor:
        """Of a prompt so many queries, the last, count in its scores. Behind the prompt all of a pass do."""
        batch = self.slots.batch
        return self._column(
            [
                length if before or budget.queries is None else budget.queries
                for length, before, budget in zip(batch.lengths, batch.before, self.slots.budgets)
            ]
        )

    @cached_property
    def is_new(self) -> Tensor:
        """Rows that had seen nothing before."""
        return self._column([before == 0 for before in self.slots.batch.before])

    # -- several tokens behind what is held: places are those of what is held, oldest first, and then of the new tokens ---

    @cached_property
    def new_order(self) -> Tensor:
        """Of each new token, its place in the text if only what is held were the text. (rows, tokens)"""
        return self.counts[:, None] + torch.arange(self.positions.shape[1], device=self.counts.device)

    @cached_property
    def held_order(self) -> Tensor:
        return torch.arange(self.held, device=self.counts.device)

    @cached_property
    def places_if_all_stay(self) -> Tensor:
        """Slot by slot the place of its token where nobody has to go; behind those of a row, any place. (rows, 1, kept)"""
        slots = torch.arange(self.slots.held(1), device=self.counts.device)
        counts = self.counts[:, None, None]
        last = self.held + self.positions.shape[1] - 1
        return torch.where(slots < counts, slots, slots - counts + self.held).clamp(max=last)

    @cached_property
    def is_held(self) -> Tensor:
        """Of the places of what is held, oldest first, those that a row has. (rows, 1, held)"""
        return self.held_order < self.counts[:, None, None]

    def _column(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, device=self.counts.device)[:, None, None]
