"""Graphs of decode steps on the clocked device: the work is the same at every step, and is ordered behind what it needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clocked.checker import Checker
from tests.clocked.tensor import NAME
from tests.helpers.contract import POLICIES, Case, Checkpoints, compare, generate_with


@pytest.mark.parametrize("place", [0, 1, 6, 8])
def test_what_is_replayed_is_ordered(place: int, by_twins: Checkpoints, offload: Path, checker: Checker) -> None:
    kind = ("opt", "llama-gqa")[place % 2]
    of_weights = ((100, 0), (0, 50))[place % 2]  # all there, or through buffers
    case = Case(kind, (*of_weights, 100, 0, 100, 0), (5, 9, 2), 6, device=NAME, policy=POLICIES[place])
    with case.open(by_twins, offload) as llm:
        compare(case, by_twins, *generate_with(llm, case))
        assert llm.stats is not None
        assert llm.stats.blocks[0].replayed > 0
