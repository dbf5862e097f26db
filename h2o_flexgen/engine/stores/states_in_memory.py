"""States of rows as tensors, where they lie in memory: views of a region, and what they begin with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.core.buffer_layout import StateLayout

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
