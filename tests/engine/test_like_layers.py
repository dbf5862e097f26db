"""Layers that are alike are not recorded again: two of a kind are, and the others are made from the first one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_flexgen.engine.graphs import LikeLayers, Likeness
from h2o_flexgen.formats.kernel_table import TORCH
from h2o_flexgen.kernels import operations
from h2o_flexgen.kernels.native import processor
from h2o_flexgen.kernels.recording import CallRecording, Program, WorkingRoom
from tests.helpers.contract import Case, Checkpoints, compare, generate_with

pytestmark = pytest.mark.skipif(processor("cpu").build == TORCH, reason="torch alone is not recorded")
RESIDENT, STEPS = (100, 0, 100, 0, 100, 0), 8


class Layers:
    """Layers that norm a row. Each may use memory of its own that its likeness does not name."""

    def __init__(self, hidden: bool = False) -> None:
        self._room, self._hides = WorkingRoom(), hidden

    def recorded(self, likeness: Likeness) -> Program:
        (x, out) = likeness.memory
        weight = torch.rand(64) if self._hides else self._weight
        self._held.append(weight)
        return CallRecording.of(lambda: out.copy_(operations.rms_norm(x, weight, 1e-5)), self._room)

    _weight, _held = torch.ones(64), list[Tensor]()


def likeness(number: int, width: int = 64) -> Likeness:
    return Likeness("norm", (torch.full((2, width), float(number)), torch.zeros(2, width)), f"norm {number}")


def test_the_third_layer_is_made_from_the_first() -> None:
    known, layers = LikeLayers(), Layers()
    for number in range(2):
        own = likeness(number)
        assert known.made(own) is None
        known.add(own, layers.recorded(own))
    third = likeness(3)
    made = known.made(third)
    assert made is not None
    made()
    assert torch.equal(third.memory[1], operations.rms_norm(third.memory[0], torch.ones(64), 1e-5))


def test_memory_that_is_not_named_keeps_layers_apart() -> None:
    known, layers = LikeLayers(), Layers(hidden=True)
    for number in range(3):
        own = likeness(number)
        assert known.made(own) is None, "it would compute with the first layer's weights"
        known.add(own, layers.recorded(own))


def test_other_kinds_and_other_sizes_are_not_alike() -> None:
    known, layers = LikeLayers(), Layers()
    for number in range(2):
        known.add(likeness(number), layers.recorded(likeness(number)))
    assert known.made(likeness(2)._replace(kind="another")) is None
    assert known.made(likeness(2, width=32)) is None


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often was recorded, and how often a program was made from another one."""
    counted, record, move = Counter[str](), CallRecording.of.__func__, Program.moved  # type: ignore[attr-defined]

    def recorded(cls: type[CallRecording], *given: Any) -> Program:
        counted["recorded"] += 1
        made: Program = record(cls, *given)
        return made

    def moved(self: Program, *given: Any) -> Program:
        counted["moved"] += 1
        return move(self, *given)

    monkeypatch.setattr(CallRecording, "of", classmethod(recorded))
    monkeypatch.setattr(Program, "moved", moved)
    return counted


@pytest.mark.parametrize(
    ("kind", "codec"),
    [("llama-gqa", "plain"), ("opt", "group4"), ("olmoe", "plain"), ("olmoe", "group4"), ("qwen3-moe", "group8")],
)
def test_two_layers_of_each_kind_are_recorded(
    kind: str, codec: str, recordings: Counter[str], checkpoints: Checkpoints, offload: Path
) -> None:
    """Of experts, the slices with the same numbers in all blocks are of one kind, and the router's is one of them."""
    case = Case(kind, RESIDENT, (5, 9, 2, 7), STEPS, weight_codec=codec)
    with case.open(checkpoints, offload) as llm:
        compare(case, checkpoints, *generate_with(llm, case))
        _, *blocks, _ = llm.spec.layers
    alike, batches = Counter((layer.functions, layer.part) for layer in blocks), 2
    assert max(alike.values()) > 2, "some are made from others"
    assert recordings["recorded"] == batches * (1 + sum(min(2, count) for count in alike.values()))
    assert recordings["moved"] == batches * sum(count - 1 for count in alike.values()), "the proofs, and the layers that follow"
