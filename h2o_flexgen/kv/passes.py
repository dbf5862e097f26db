"""Pass: one batch's way through all layers at one step: what its layers have in common, worked out once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from h2o_flexgen.kv.slots import Slots


@dataclass(frozen=True)
class Pass:
    is_prefill: bool
    positions: Tensor  # (rows, tokens) of the new tokens in their texts, from 0
    counts: Tensor  # (rows,) slots that each row holds before
    capacity: int  # slots of the images
    slots: Slots
    step: int

    @classmethod
    def of(cls, slots: Slots, step: int, capacity: int, device: torch.device) -> Pass:
        lengths = torch.tensor(slots.lengths, device=device)
        if step == 0:
            positions = torch.arange(max(slots.lengths), device=device).expand(len(slots.lengths), -1)
            return cls(True, positions, torch.zeros_like(lengths), capacity, slots, step)
        counts = torch.tensor(slots.counts(step), device=device)
        return cls(False, (lengths + step - 1).unsqueeze(1), counts, capacity, slots, step)

    @cached_property
    def evicts(self) -> bool:
        return self.slots.evicts_at(self.step)

    @cached_property
    def row_index(self) -> Tensor:
        return torch.arange(self.counts.shape[0], device=self.counts.device)

    @cached_property
    def empty(self) -> Tensor:
        """Slots behind a row's newest key. (rows, 1, slots)"""
        slots = torch.arange(self.capacity, device=self.counts.device)
        return (slots > self.counts.unsqueeze(1)).unsqueeze(1)

    @cached_property
    def mask(self) -> Tensor:
        """0 where a row has a key, its newest one included, -inf on the slots behind. (rows, 1, 1, slots), fp32"""
        return torch.zeros(self.empty.shape, device=self.empty.device).masked_fill_(self.empty, -torch.inf).unsqueeze(1)

    # -- what the budget of each row says, as (rows, 1, 1) ---------------------------------------------------------------

    @cached_property
    def lengths(self) -> Tensor:
        return self._column(list(self.slots.lengths))

    @cached_property
    def sinks(self) -> Tensor:
        """Tokens before this position are protected."""
        return self._column([budget.sinks for budget in self.slots.budgets])

    @cached_property
    def window(self) -> Tensor:
        """Tokens from this position on are protected."""
        windows = [budget.prompt_window if self.is_prefill else budget.window for budget in self.slots.budgets]
        seen = [length + self.step for length in self.slots.lengths]
        return self._column([total - window for total, window in zip(seen, windows)])

    @cached_property
    def after(self) -> Tensor:
        """Slots that each row holds when this pass is over."""
        return self._column(list(self.slots.counts(self.step + 1)))

    @cached_property
    def queries(self) -> Tensor:
        """Of a prompt so many queries, the last, count in its scores."""
        return self._column(
            [
                length if budget.queries is None else budget.queries
                for length, budget in zip(self.slots.lengths, self.slots.budgets)
            ]
        )

    def _column(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self.counts.device)[:, None, None]
