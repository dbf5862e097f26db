"""KVStep: what all layers need to know of their caches for the rows of one COMPUTE, as tensors that are made once.

All numbers of the rows go to the device in one table, so that no layer copies anything there and waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from h2o_flexgen.core.prefix_groups import SharedPrefix
from h2o_flexgen.core.workload import ECHO_TOKENS, evenly
from h2o_flexgen.kernels.append import RotationAngles
from h2o_flexgen.kernels.evict import Leaving, Newest
from h2o_flexgen.kernels.pick_tokens import Upload
from h2o_flexgen.models.new_tokens import Rotation
from h2o_flexgen.policies.occupancy import StepSlots


class _Rows(NamedTuple):
    """Numbers of every row: the lines of the table, as lists and then as tensors."""

    seen: Tensor
    counts: Tensor
    new: Tensor
    after: Tensor
    before: Tensor
    sinks: Tensor
    window: Tensor
    queries: Tensor
    begins: Tensor
    attended: Tensor
    echo: Tensor


class EchoPart(NamedTuple):
    """Tokens of an echo that see each other, and the number of tokens before them."""

    rows: Tensor | None  # the rows that have such parts; None: all
    places: slice  # its tokens among those of the echo
    before: Tensor  # tokens that each of these rows holds, the new ones included
    weights: Tensor  # (rows, tokens), fp32: 1, but 0 for pads


@dataclass(frozen=True)
class KVStep:
    slots: StepSlots
    table: Tensor  # (lines of _Rows, rows)
    capacity: int  # slots allocated per row
    prefixes: tuple[SharedPrefix | None, ...] = ()  # what each row shares with others; empty if no row shares anything
    upload: Upload = Tensor.to
    echoes_within: int | None = None  # the positions of the model, if an echo follows the new tokens

    @classmethod
    def of(
        cls,
        slots: StepSlots,
        capacity: int,
        device: torch.device,
        prefixes: Sequence[SharedPrefix | None] = (),
        upload: Upload = Tensor.to,
        echoes_within: int | None = None,
    ) -> KVStep:
        """`upload` copies numbers to the device; by default the caller waits for the copy."""
        shared = tuple(prefixes) if any(prefixes) else ()
        echo = _echo(slots, shared, echoes_within)
        return cls(slots, upload(_table(slots, shared, echo), device), capacity, shared, upload, echoes_within)

    def follow(self, other: KVStep) -> None:
        """Copies the numbers of another step of the same rows into its own memory, from which graphs read them."""
        for name, known in vars(self).items():
            if isinstance(known, Tensor):
                known.copy_(getattr(other, name))
        for kind, turn in self._turns.items():
            for known, now in zip(turn, other.turn(*kind), strict=True):
                known.copy_(now)

    def make_as_in(self, other: KVStep) -> None:
        """Makes now what the step of other rows has made when it was wanted."""
        for name in vars(other).keys() - vars(self).keys():
            getattr(self, name)
        for kind in other._turns:
            self.turn(*kind)

    @cached_property
    def _lines(self) -> _Rows:
        return _Rows(*self.table.unbind())

    @cached_property
    def positions(self) -> Tensor:
        """The new tokens' positions among the tokens that the policy judges, from 0; pads follow them. (rows, tokens)"""
        return self._lines.seen.unsqueeze(1) + torch.arange(max(self.slots.new), device=self.table.device)

    @property
    def counts(self) -> Tensor:
        """Slots that each row held before. (rows,)"""
        return self._lines.counts

    def on(self, device: torch.device, upload: Upload = Tensor.to) -> KVStep:
        """The same for caches on this device."""
        if device == self.counts.device:
            return self
        return KVStep.of(self.slots, self.capacity, device, self.prefixes, upload, self.echoes_within)

    @property
    def rows(self) -> int:
        return len(self.slots.counts)

    @property
    def is_prefill(self) -> bool:
        """Whether each row may have several new tokens."""
        return self.slots.is_prefill

    @property
    def tokens(self) -> int:
        """Tokens of each row that are computed: the new ones with their pads, and their echo."""
        return max(self.slots.new) * (1 if self.echoes_within is None else 2)

    def pieces(self, most: int) -> tuple[slice, ...]:
        """The pieces in which one prompt is computed that has more tokens than are computed at once; none otherwise. No piece
        has tokens of both the prompt and its echo, or of two parts of the echo."""
        if not self.is_prefill or self.rows > 1 or self.tokens <= most:
            return ()
        new = max(self.slots.new)
        parts = [(0, new), *((new + part.places.start, new + part.places.stop) for part in self.echo)]
        return tuple(piece for part in parts for piece in evenly(*part, most))

    @property
    def held(self) -> int:
        """Slots in use before this step, in the row that has most."""
        return self.slots.held

    @property
    def evicts(self) -> bool:
        return self.slots.evicts

    # -- shared prefixes: they come before the tokens that the policy judges, unless rows copy them into their own slots ----

    @cached_property
    def groups(self) -> tuple[tuple[SharedPrefix, Tensor], ...]:
        """The prefixes that rows share, and the rows of each."""
        rows: dict[SharedPrefix, list[int]] = {}
        for row, prefix in enumerate(self.prefixes):
            if prefix is not None:
                rows.setdefault(prefix, []).append(row)
        return tuple((prefix, self.upload(torch.tensor(own), self.table.device)) for prefix, own in rows.items())

    @property
    def before(self) -> Tensor:
        """Tokens of each row's text before those that the policy judges. (rows, 1)"""
        return self._lines.before[:, None]

    @cached_property
    def text_positions(self) -> Tensor:
        """The positions in their texts of all tokens that are computed: the new ones, and then their echo. Each part of
        the echo directly follows the text. (rows, tokens)"""
        if self.echoes_within is None:
            return self.positions + self.before
        seen, new, part = (line.unsqueeze(1) for line in (self._lines.seen, self._lines.new, self._lines.echo))
        echo = seen + new + torch.arange(self.positions.shape[1], device=part.device) % part
        return torch.cat((self.positions, echo), dim=1) + self.before

    def turn(self, rotation: Rotation, dtype: torch.dtype, rolls: bool = False) -> RotationAngles:
        """How far the new tokens are turned: to their positions in their texts or, if positions roll, to their order among the
        tokens held."""
        kind = rotation, dtype, rolls
        if kind not in self._turns:  # the same for all layers
            self._turns[kind] = rotation.turn(self.new_order if rolls else self.text_positions, dtype)
        return self._turns[kind]

    @cached_property
    def _turns(self) -> dict[tuple[Rotation, torch.dtype, bool], RotationAngles]:
        return {}

    @cached_property
    def row_index(self) -> Tensor:
        return torch.arange(self.counts.shape[0], device=self.counts.device)

    @cached_property
    def behind_held(self) -> Tensor:
        """True for slots after those in use before this step. (rows, 1, slots)"""
        return torch.arange(self.capacity, device=self.counts.device) >= self.counts[:, None, None]

    @cached_property
    def with_newest(self) -> Tensor:
        """Keys that each row attends to in decode. (rows,)"""
        return self.counts + 1

    @cached_property
    def newest(self) -> Newest:
        return Newest(self.row_index, self.counts, self.with_newest, self.positions)

    @cached_property
    def leaving(self) -> Leaving:
        return Leaving(self.sinks, self.window, self.after)

    @cached_property
    def behind_newest(self) -> Tensor:
        """True for slots after a row's newest key in decode. (rows, 1, slots)"""
        return torch.arange(self.capacity, device=self.counts.device) > self.counts[:, None, None]

    @cached_property
    def mask(self) -> Tensor:
        """0 for slots with a key, the newest included, and -inf for those after it. (rows, 1, 1, slots), fp32"""
        return (
            torch.zeros(self.behind_newest.shape, dtype=torch.float32, device=self.behind_newest.device)
            .masked_fill_(self.behind_newest, -torch.inf)
            .unsqueeze(1)
        )

    @property
    def attended(self) -> Tensor:
        """Slots that each row attends in decode, where it chooses them. (rows,)"""
        return self._lines.attended

    @cached_property
    def echo(self) -> tuple[EchoPart, ...]:
        """The parts in which the echo is attended; none if there is no echo. A row's parts do not depend on the other rows."""
        if self.echoes_within is None:
            return ()
        tokens, each = self.positions.shape[1], _echo(self.slots, self.prefixes, self.echoes_within)
        parts = [part if part < new else tokens for part, new in zip(each, self.slots.new)]
        return tuple(
            self._echo_part([row for row, own in enumerate(parts) if own == part], slice(start, min(start + part, tokens)))
            for part in sorted(set(parts))
            for start in range(0, tokens, part)
        )

    def _echo_part(self, rows: Sequence[int], places: slice) -> EchoPart:
        new, counts, device = self._lines.new, self.counts, self.table.device
        own = None if len(rows) == self.rows else self.upload(torch.tensor(rows), device)
        if own is not None:
            new, counts = new[own], counts[own]
        counted = torch.arange(places.start, places.stop, device=device) < new[:, None]
        return EchoPart(own, places, counts + new, counted.float())

    # -- row by row, as (rows, 1, 1) -------------------------------------------------------------------------------------

    @property
    def lengths(self) -> Tensor:
        """New tokens of each row in a prefill; pads follow them."""
        return _column(self._lines.new)

    @property
    def sinks(self) -> Tensor:
        """Tokens before this position are protected."""
        return _column(self._lines.sinks)

    @property
    def window(self) -> Tensor:
        """Tokens from this position on are protected."""
        return _column(self._lines.window)

    @property
    def after(self) -> Tensor:
        """Slots that each row holds after this step."""
        return _column(self._lines.after)

    @property
    def queries(self) -> Tensor:
        """How many of the last new queries contribute to scores; a budget may limit them for prompts."""
        return _column(self._lines.queries)

    @cached_property
    def is_new(self) -> Tensor:
        """True for rows with a text that begins in this step."""
        return _column(self._lines.begins).bool()

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
        """The place of each slot's token if none is evicted; arbitrary for slots after a row's own. (rows, 1, kept)"""
        slots = torch.arange(self.slots.kept, device=self.counts.device)
        counts = self.counts[:, None, None]
        last = self.held + self.positions.shape[1] - 1
        return torch.where(slots < counts, slots, slots - counts + self.held).clamp(max=last)

    @cached_property
    def is_held(self) -> Tensor:
        """True for the places of held tokens that a row has. (rows, 1, held)"""
        return self.held_order < self.counts[:, None, None]

    @cached_property
    def without_gaps(self) -> Tensor:
        """All places, in an order that puts those that a row has first, without gaps. (rows, 1, held + tokens)"""
        is_missing = torch.nn.functional.pad(~self.is_held, (0, self.positions.shape[1]))
        return is_missing.byte().argsort(dim=-1, stable=True)

    @property
    def has_gaps(self) -> bool:
        """Whether some rows lack held tokens, so that empty places come before those of the new tokens."""
        return min(self.slots.counts) < self.held

    @cached_property
    def places_in_turn(self) -> Tensor:
        """The place of each token that a row has, in their order; arbitrary after the last. (rows, 1, held + tokens)"""
        turns, counts = self._all_places, self.counts[:, None, None]
        return torch.where(turns < counts, turns, turns - counts + self.held).clamp(max=len(turns) - 1)

    @cached_property
    def turn_of_place(self) -> Tensor:
        """The number of each place's token among those that its row has; arbitrary for places without one. (rows, 1, held +
        tokens)"""
        places = self._all_places
        return torch.where(places < self.held, places, places - self.held + self.counts[:, None, None])

    @property
    def _all_places(self) -> Tensor:
        return torch.arange(self.held + self.positions.shape[1], device=self.counts.device)


def _column(values: Tensor) -> Tensor:
    return values[:, None, None]


def _echo(slots: StepSlots, prefixes: Sequence[SharedPrefix | None], positions: int | None) -> Sequence[int]:
    """The tokens of each row's echo that are computed as one part: so many that text and part fit the model's positions."""
    if positions is None:
        return [1] * len(slots.new)
    apart = [0 if prefix is None else prefix.tokens for prefix in prefixes] or [0] * len(slots.new)
    texts = [before + seen + new for before, seen, new in zip(apart, slots.seen, slots.new)]
    assert max(texts) < positions, f"{max(texts)} of {positions} positions leave none for an echo"
    return [min(ECHO_TOKENS, positions - text) for text in texts]


def _table(slots: StepSlots, prefixes: Sequence[SharedPrefix | None], echo: Sequence[int]) -> Tensor:
    budgets, begins = slots.budgets, slots.begins
    apart = () if slots.copies else prefixes
    windows: list[int] = [budget.prompt_window if begin else budget.window for budget, begin in zip(budgets, begins)]
    lines: tuple[Sequence[int], ...] = (
        slots.seen,
        slots.counts,
        slots.new,
        slots.after,
        [0 if prefix is None else prefix.tokens for prefix in apart] or [0] * len(slots.counts),
        [budget.sinks for budget in budgets],
        [seen + new - window for seen, new, window in zip(slots.seen, slots.new, windows)],
        [
            budget.queries if begin and budget.queries is not None else new
            for new, budget, begin in zip(slots.new, budgets, begins)
        ],
        begins,
        slots.attended,
        echo,
    )
    return torch.from_numpy(np.array(lines))  # torch reads lists several times slower
