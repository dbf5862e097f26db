"""The states of rows where prompts are read twice. The echo goes on from the states behind the prompt, and so does each part of
it, as each part follows the prompt where it is attended. What an echo makes of them is not kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from h2o_flexgen.kv.step import EchoPart, KVStep
from h2o_flexgen.models.row_states import Passing, RowStates


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
