"""LikeLayers: recordings of layers that do the same work, each on memory of its own.

The first two layers of a kind are recorded. If the second recording is the first one with the second layer's memory, those of
all other layers of the kind are made in the same way, in a fraction of the time. Otherwise each layer is recorded. So nothing
is taken on trust: memory of a layer that its likeness does not name would show in the second recording.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from h2o_flexgen.kernels.recording import Program


class Likeness(NamedTuple):
    """What a layer does, and on which memory."""

    kind: Hashable
    memory: Sequence[Tensor]
    place: str  # in the model, for reports

    @property
    def key(self) -> Hashable:
        return self.kind, tuple((each.dtype, each.shape, each.stride()) for each in self.memory)


@dataclass
class _First:
    """The first recording of a kind."""

    program: Program
    memory: Sequence[Tensor]
    others_are_like_it: bool | None = None  # None: there was no second one yet


class LikeLayers:
    def __init__(self) -> None:
        self._known: dict[Hashable, _First] = {}

    def made(self, likeness: Likeness) -> Program | None:
        """The recording for a layer, if it is known without being made."""
        first = self._known.get(likeness.key)
        if first is None or not first.others_are_like_it:
            return None
        return first.program.moved([*zip(first.memory, likeness.memory)], likeness.place.encode())

    def add(self, likeness: Likeness, program: Program) -> None:
        """Learns from a recording that was made."""
        first = self._known.setdefault(likeness.key, _First(program, likeness.memory))
        if first.program is not program and first.others_are_like_it is None:
            first.others_are_like_it = first.program.does_as(program, [*zip(first.memory, likeness.memory)])
