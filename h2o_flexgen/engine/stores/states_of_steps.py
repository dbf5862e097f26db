"""States of rows in decode steps that take several tokens of a row: these lie apart, and some may be on trial.

What tokens on trial bring to a state is noted, and the state stays as it was. Those that stay are replayed from the notes by
the next pass, before its own. So a token that is taken back leaves no trace, and nothing of a state is kept twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.models.row_states import Passing, RowStates


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

    def apart(self, x: Tensor) -> Tensor:
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
        return self.laid.apart(passing(by_row, state, self.laid.lengths, bool(notes)))
