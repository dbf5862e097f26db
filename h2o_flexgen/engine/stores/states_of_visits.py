"""The states of rows as a visit finds them: views of the memory where they lie, and what passes them.

A decode step may take several tokens of a row, and some may be on trial. What these bring to a state is noted, and the state
stays as it was. Those that stay are replayed from the notes by the next pass, before its own. So a token that is taken back
leaves no trace, and nothing of a state is kept twice.

Where prompts are read twice, the echo goes on from the states behind the prompt, and so does each part of it, as each part
follows the prompt where it is attended. What an echo makes of them is not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.core.buffer_layout import StateLayout
from h2o_flexgen.kv.step import EchoPart, KVStep
from h2o_flexgen.models.new_tokens import Passing, RowStates

States = Mapping[str, Tensor]  # of a layer, by their names: (rows, ...)


def states_over(region: Tensor, layout: StateLayout) -> States:
    """The states that lie in a region, by their names."""
    by_row = region[: layout.nbytes].view(layout.rows, -1)
    return {
        one.name: by_row[:, start : start + one.nbytes].view(getattr(torch, one.dtype)).unflatten(1, one.shape)
        for start, one in zip(layout.starts, layout.tensors)
    }


class StatesInPassing(NamedTuple):
    """What prompts pass instead of the states of their rows: the same in fp32, of which what is left is kept at last. So it is
    rounded once, in however many pieces a prompt comes. States in fp32 are passed as they are."""

    in_full: States
    kept: States

    @classmethod
    def of(cls, kept: States) -> StatesInPassing:
        return cls({name: one.float() for name, one in kept.items()}, kept)  # itself, if it is in fp32

    def keep(self) -> None:
        for name, one in self.in_full.items():
            if one is not self.kept[name]:
                self.kept[name].copy_(one)


def begin_behind(states: States, prefixes: Iterable[tuple[int, Tensor]], at_the_end_of: Callable[[int], States]) -> None:
    """Gives rows the states at the end of the prefixes that they begin with. `prefixes`: the number of each group, and its
    rows."""
    for group, rows in prefixes:
        for name, kept in at_the_end_of(group).items():
            states[name][rows] = kept


class TokensLaid(NamedTuple):
    """The places of tokens of rows among all of a step, (tokens, 1, ...), and those row by row."""

    places: Tensor  # (rows, most tokens of a row): those that are missing have the place of the first
    lengths: Tensor  # (rows,): how many each has
    rows: Tensor  # (tokens,): the row of each
    turns: Tensor  # (tokens,): its number there

    @classmethod
    def of(cls, places: Sequence[Sequence[int]], device: torch.device) -> TokensLaid:
        most, count = max(map(len, places)), sum(map(len, places))
        filled, of_tokens = [[*own, *[0] * (most - len(own))] for own in places], [(0, 0)] * count
        for row, own in enumerate(places):
            for turn, place in enumerate(own):
                of_tokens[place] = row, turn
        rows, turns = zip(*of_tokens)
        return cls(*(torch.tensor(each, device=device) for each in (filled, [*map(len, places)], rows, turns)))

    def by_row(self, x: Tensor) -> Tensor:
        return x[:, 0][self.places]

    def one_by_one(self, x: Tensor) -> Tensor:
        return x[self.rows, self.turns].unsqueeze(1)


class Replays(NamedTuple):
    """How many of the tokens that were on trial stay."""

    counts: Tensor  # of each row
    most: int

    @classmethod
    def of(cls, counts: Sequence[int], device: torch.device) -> Replays | None:
        return cls(torch.tensor(counts, device=device), max(counts)) if any(counts) else None


@dataclass(frozen=True)
class StatesOfSteps(RowStates):
    laid: TokensLaid | None = None  # None: a token of each row
    notes: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)  # by state; of none nothing is on trial
    replays: Replays | None = None

    def passed(self, name: str, brought: Sequence[Tensor], passing: Passing) -> Tensor:
        state, notes = self.by_name[name], self.notes.get(name, ())
        if self.replays is not None:
            passing([each[:, : self.replays.most] for each in notes], state, self.replays.counts, False)
        if self.laid is None:
            return passing(brought, state, None, False)
        by_row = [self.laid.by_row(each) for each in brought]
        for noted, own in zip(notes, by_row):
            noted[:, : own.shape[1]] = own
        return self.laid.one_by_one(passing(by_row, state, self.laid.lengths, bool(notes)))


@dataclass(frozen=True)
class EchoedStates(RowStates):
    """It counts the tokens that have passed: a long prompt and its echo come piece by piece."""

    step: KVStep = field(kw_only=True)
    _read: dict[str, int] = field(default_factory=dict)  # tokens so far, by state
    _of_part: dict[str, Tensor] = field(default_factory=dict)  # the states of the part of an echo that is read

    def passed(self, name: str, brought: Sequence[Tensor], passing: Passing) -> Tensor:
        first, new = self._read.get(name, 0), max(self.step.slots.new)
        self._read[name] = last = first + brought[0].shape[1]
        if last <= new:
            return super().passed(name, brought, passing)
        prompt: Tensor | None = None
        if first < new:
            prompt = super().passed(name, [each[:, : new - first] for each in brought], passing)
        echo = [each[:, max(0, new - first) :] for each in brought]
        echoed = self._echoed(name, echo, max(first, new) - new, passing)
        return echoed if prompt is None else torch.cat((prompt, echoed), dim=1)

    def _echoed(self, name: str, brought: Sequence[Tensor], first: int, passing: Passing) -> Tensor:
        """What tokens of an echo find, of which the first one is there."""
        rows, count = brought[0].shape[:2]
        out: Tensor | None = None
        for part in self.step.echo:
            start, stop = max(part.places.start, first), min(part.places.stop, first + count)
            if start >= stop:
                continue
            own = slice(None) if part.rows is None else part.rows
            if start == part.places.start:
                self._of_part[name] = self.by_name[name][own].clone()
            tokens = slice(start - first, stop - first)
            made = passing([each[own, tokens] for each in brought], self._of_part[name], _lengths(part), False)
            out = made.new_empty(rows, count, *made.shape[2:]) if out is None else out
            out[own, tokens] = made
        assert out is not None, "these tokens are in no part of an echo"
        return out


def _lengths(part: EchoPart) -> Tensor | None:
    """The tokens of each row that are no pads, of a part that is read at once; a row that comes in pieces has none."""
    return part.weights.sum(dim=1).long() if len(part.weights) > 1 else None
