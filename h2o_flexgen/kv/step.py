"""KVStep: what all layers need to know of their caches for the rows of one COMPUTE, as tensors that are made once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from h2o_flexgen.policies.occupancy import StepSlots


@dataclass(frozen=True)
class KVStep:
    slots: StepSlots
    positions: Tensor  # (rows, tokens): the new tokens' positions in their texts, from 0; pads stand behind them
    counts: Tensor  # (rows,): slots that each row held before
    capacity: int  # slots allocated per row

    @classmethod
    def of(cls, slots: StepSlots, capacity: int, device: torch.device) -> KVStep:
        seen, new = torch.tensor(slots.seen, device=device), torch.arange(max(slots.new), device=device)
        return cls(slots, seen.unsqueeze(1) + new, torch.tensor(slots.counts, device=device), capacity)

    @property
    def rows(self) -> int:
        return len(self.slots.counts)

    @property
    def is_prefill(self) -> bool:
        """Whether each row may have several new tokens."""
        return self.slots.is_prefill

    @property
    def held(self) -> int:
        """Slots in use before this step, in the row that has most."""
        return self.slots.held

    @property
    def evicts(self) -> bool:
        return self.slots.evicts

    @cached_property
    def row_index(self) -> Tensor:
        return torch.arange(self.counts.shape[0], device=self.counts.device)

    @cached_property
    def behind_held(self) -> Tensor:
        """True for slots behind those in use before this step. (rows, 1, slots)"""
        return torch.arange(self.capacity, device=self.counts.device) >= self.counts[:, None, None]

    @cached_property
    def with_newest(self) -> Tensor:
        """Keys that each row attends to in decode. (rows,)"""
        return self.counts + 1

    @cached_property
    def behind_newest(self) -> Tensor:
        """True for slots behind a row's newest key in decode. (rows, 1, slots)"""
        return torch.arange(self.capacity, device=self.counts.device) > self.counts[:, None, None]

    @cached_property
    def mask(self) -> Tensor:
        """0 for slots with a key, the newest included, and -inf for those behind. (rows, 1, 1, slots), fp32"""
        return (
            torch.zeros(self.behind_newest.shape, dtype=torch.float32, device=self.behind_newest.device)
            .masked_fill_(self.behind_newest, -torch.inf)
            .unsqueeze(1)
        )

    # -- row by row, as (rows, 1, 1) -------------------------------------------------------------------------------------

    @cached_property
    def lengths(self) -> Tensor:
        """New tokens of each row in a prefill; pads stand behind them."""
        return self._column(self.slots.new)

    @cached_property
    def sinks(self) -> Tensor:
        """Tokens before this position are protected."""
        return self._column([budget.sinks for budget in self.slots.budgets])

    @cached_property
    def window(self) -> Tensor:
        """Tokens from this position on are protected."""
        rows = zip(self.slots.seen, self.slots.new, self.slots.budgets)
        begins = [self.is_prefill and not seen for seen in self.slots.seen]
        return self._column(
            [
                seen + new - (budget.prompt_window if begun else budget.window)
                for (seen, new, budget), begun in zip(rows, begins)
            ]
        )

    @cached_property
    def after(self) -> Tensor:
        """Slots that each row holds after this step."""
        return self._column(self.slots.after)

    @cached_property
    def queries(self) -> Tensor:
        """How many of the last new queries contribute to scores; a budget may limit them for prompts."""
        rows = zip(self.slots.seen, self.slots.new, self.slots.budgets)
        return self._column([new if seen or budget.queries is None else budget.queries for seen, new, budget in rows])

    @cached_property
    def is_new(self) -> Tensor:
        """True for rows whose text begins in this step."""
        return self._column([seen == 0 for seen in self.slots.seen])

    # -- several new tokens: a place counts the held tokens, oldest first, and then the new ones --------------------------

    @cached_property
    def new_order(self) -> Tensor:
        """Each new token's position if the held tokens were the whole text before it. (rows, tokens)"""
        return self.counts[:, None] + torch.arange(self.positions.shape[1], device=self.counts.device)

    @cached_property
    def held_order(self) -> Tensor:
        return torch.arange(self.held, device=self.counts.device)

    @cached_property
    def places_if_all_stay(self) -> Tensor:
        """The place of each slot's token if none is evicted; arbitrary for slots behind a row's own. (rows, 1, kept)"""
        slots = torch.arange(self.slots.kept, device=self.counts.device)
        counts = self.counts[:, None, None]
        last = self.held + self.positions.shape[1] - 1
        return torch.where(slots < counts, slots, slots - counts + self.held).clamp(max=last)

    @cached_property
    def is_held(self) -> Tensor:
        """True for the places of held tokens that a row really has. (rows, 1, held)"""
        return self.held_order < self.counts[:, None, None]

    def _column(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, device=self.counts.device)[:, None, None]
