"""The contract: whatever the plan, the tokens are those of the plain resident loop, and its logits bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest
import torch

from tests.contract import Case, Checkpoints, hold_contract
from tests.resident import resident_generate

RAGGED, EQUAL, MANY = (5, 9, 2, 7, 4), (6, 6, 6, 6), (3, 11, 8, 1, 6, 2, 9, 5, 4, 7)
MIXES = (
    (100, 0, 100, 0, 100, 0),
    (0, 100, 0, 100, 0, 100),
    (0, 0, 0, 0, 0, 0),
    (30, 30, 20, 50, 40, 30),
    (50, 0, 0, 100, 0, 0),
    (0, 40, 60, 0, 0, 50),
    (0, 0, 100, 0, 100, 0),
    (100, 0, 0, 0, 0, 100),
)
CHOICES = {
    "kind": ("opt", "llama-gqa", "neox-parallel", "opt-350m", "qwen3", "neox-sequential"),
    "percent": MIXES,
    "lengths": (RAGGED, EQUAL, MANY),
    "gpu_batch_size": (1, 2, 3),
    "num_gpu_batches": (1, 2, 4),
    "slots": (1, 2, 3),
    "sep_layer": (True, False),
    "overlap": (True, False),
    "schedule": ("zigzag", "flexgen_barrier", "row_by_row"),
}


def covering(choices: dict[str, Sequence[object]], seed: int = 0, tries: int = 40) -> Iterator[dict[str, object]]:
    """Cases in which every two values of any two choices meet at least once: of random ones those that bring most new pairs."""
    random, names = Random(seed), list(choices)
    missing = {
        ((one, first), (other, second))
        for one, other in itertools.combinations(names, 2)
        for first, second in itertools.product(choices[one], choices[other])
    }
    while missing:
        wanted = dict(min(missing, key=str))
        drawn = [{name: wanted.get(name, random.choice(choices[name])) for name in names} for _ in range(tries)]
        best = max(drawn, key=lambda case: len(missing & _pairs(case)))
        missing -= _pairs(best)
        yield best


def _pairs(case: dict[str, object]) -> set[object]:
    return set(itertools.combinations(case.items(), 2))


@pytest.mark.parametrize("values", list(covering(CHOICES)))
def test_tokens_and_logits_equal_the_resident_loop_for_every_pair_of_choices(
    values: dict[str, object], any_device: str, checkpoints: Checkpoints, offload: Path
) -> None:
    hold_contract(Case(device=any_device, **values), checkpoints, offload)  # type: ignore[arg-type]
