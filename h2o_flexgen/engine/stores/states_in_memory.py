"""States of rows as tensors, where they lie in memory: views of a region, and what they begin with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from h2o_flexgen.core.buffer_layout import StateLayout

States = Mapping[str, Tensor]  # of a layer, by their names: (rows, ...), fp32


def states_over(region: Tensor, layout: StateLayout) -> States:
    """The states that lie in a region, by their names."""
    by_row = region[: layout.nbytes].view(torch.float32).view(layout.rows, -1)
    found = {}
    for start, one in zip(layout.starts, layout.tensors):
        first = start // by_row.itemsize
        found[one.name] = by_row[:, first : first + one.nbytes // by_row.itemsize].unflatten(1, one.shape)
    return found


def begin_behind(states: States, prefixes: Iterable[tuple[int, Tensor]], at_the_end_of: Callable[[int], States]) -> None:
    """Gives rows the states at the end of the prefixes that they begin with. `prefixes`: the number of each group, and its
    rows."""
    for group, rows in prefixes:
        for name, kept in at_the_end_of(group).items():
            states[name][rows] = kept
