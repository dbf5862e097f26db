"""KVStep: what all layers need to know of their caches for the rows of one COMPUTE, as tensors that are made once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from h2o_flexgen.core.prefixes import SharedPrefix
from h2o_flexgen.policies.occupancy import StepSlots


@dataclass(frozen=True)
class KVStep:
    slots: StepSlots
    positions: Tensor  # (rows, tokens): the new tokens' positions in what is judged, from 0; pads stand behind them
    counts: Tensor  # (rows,): slots that each row held before
    capacity: int  # slots allocated per row
    prefixes: tuple[SharedPrefix | None, ...] = ()  # what each row shares with others, unless nobody shares anything

    @classmethod
    def of(cls, slots: StepSlots, capacity: int, device: torch.device, prefixes: Sequence[SharedPrefix | None] = ()) -> KVStep:
        seen, new = torch.tensor(slots.seen, device=device), torch.arange(max(slots.new), device=device)
        shared = tuple(prefixes) if any(prefixes) else ()
        return cls(slots, seen.unsqueeze(1) + new, torch.tensor(slots.counts, device=device), capacity, shared)

    def on(self, device: torch.device) -> KVStep:
        """The same for caches on this device."""
        return self if device == self.counts.device else KVStep.of(self.slots, self.capacity, device, self.prefixes)

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

    # -- shared prefixes: they stand before what is judged, unless rows take a copy into their own slots --------------------

    @cached_property
    def groups(self) -> tuple[tuple[SharedPrefix, Tensor], ...]:
        """The prefixes that rows share, and the rows of each."""
        rows: dict[SharedPrefix, list[int]] = {}
        for row, prefix in enumerate(self.prefixes):
            if prefix is not None:
                rows.setdefault(prefix, []).append(row)
        return tuple((prefix, torch.tensor(own, device=self.counts.device)) for prefix, own in rows.items())

    @cached_property
    def before(self) -> Tensor:
        """Tokens of each row's text before what is judged. (rows, 1)"""
        apart = () if self.slots.copies else self.prefixes
        tokens = [0 if prefix is None else prefix.tokens for prefix in apart] or [0] * self.rows
        return torch.tensor(tokens, device=self.counts.device)[:, None]

    @cached_property
    def text_positions(self) -> Tensor:
        """The new tokens' positions in their texts. (rows, tokens)"""
        return self.positions + self.before

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
        rows = zip(self.slots.seen, self.slots.new, self.slots.budgets, self.slots.begins)
        return self._column(
            [seen + new - (budget.prompt_window if begins else budget.window) for seen, new, budget, begins in rows]
        )

    @cached_property
    def after(self) -> Tensor:
        """Slots that each row holds after this step."""
        return self._column(self.slots.after)

    @cached_property
    def queries(self) -> Tensor:
        """How many of the last new queries contribute to scores; a budget may limit them for prompts."""
        rows = zip(self.slots.new, self.slots.budgets, self.slots.begins)
        return self._column([budget.queries if begins and budget.queries is not None else new for new, budget, begins in rows])

    @cached_property
    def is_new(self) -> Tensor:
        """True for rows whose text begins in this step."""
        return self._column(self.slots.begins)

    # -- several new tokens: a place counts the held tokens, oldest first, and then the new ones --------------------------

    @cached_property
    def new_order(self) -> Tensor:
        """Each new token's position if the tokens held, here and in a prefix, were the whole text before it. (rows, tokens)"""
        return self.before + self.counts[:, None] + torch.arange(self.positions.shape[1], device=self.counts.device)

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

    @cached_property
    def without_gaps(self) -> Tensor:
        """All places such that those that a row has come first, one behind the other. (rows, 1, held + tokens)"""
        is_missing = torch.nn.functional.pad(~self.is_held, (0, self.positions.shape[1]))
        return is_missing.byte().argsort(dim=-1, stable=True)

    def _column(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, device=self.counts.device)[:, None, None]
