"""Blocks of which attention and mlp share one norm: it is stored, moved and counted once, also where both are one layer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.contract import Case, Checkpoints, hold_contract

MIXES = (0, 0, 0, 0, 0, 0), (30, 30, 20, 50, 40, 30), (0, 60, 100, 0, 100, 0)


@pytest.mark.parametrize("percent", MIXES)
@pytest.mark.parametrize("kind", ["stablelm-parallel", "phi", "cohere"])
@pytest.mark.parametrize("sep_layer", [True, False])
def test_a_shared_norm_is_moved_once(
    kind: str, percent: tuple[float, ...], sep_layer: bool, checkpoints: Checkpoints, offload: Path
) -> None:
    hold_contract(Case(kind, percent, (5, 9, 2, 7), 4, sep_layer=sep_layer), checkpoints, offload)
