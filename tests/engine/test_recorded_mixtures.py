"""Steps of mixtures are recorded, whichever experts their rows are given to, and have the bits of the resident loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen.engine.graphs import StepGraphs
from h2o_flexgen.formats.kernel_table import EXACT, INT8, TORCH
from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.kernels.native import processor
from tests.helpers.contract import WEIGHTS, Case, Checkpoints, compare, generate_with

RESIDENT, WEIGHTS_MOVE = (100, 0, 100, 0, 100, 0), (0, 40, 100, 0, 100, 0)
KINDS = "olmoe", "gpt-oss", "glm4-moe", "qwen2-moe", "qwen3-moe", "mixtral", "granite-moe", "minimax", "deepseek-v3"
KINDS += ("hunyuan-moe", "llama4")
STORED = ("olmoe", "gguf-q4_0", EXACT), ("qwen3-moe", "gguf-q4_0", INT8), ("gpt-oss", "gguf-mxfp4", EXACT)
STEPS = 9
# two kinds in all that weights are written in; the others, whose experts are multiplied as theirs are, in some of it
CASES = [
    (kind, *weights)
    for place, kind in enumerate(KINDS)
    for other, weights in enumerate(WEIGHTS)
    if place < 2 or (place + other) % 3 == 0
]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[StepGraphs]:
    """Those that engines make."""
    made, make = list[StepGraphs](), StepGraphs.__init__

    def noted(self: StepGraphs, *given: Any) -> None:
        make(self, *given)
        made.append(self)

    monkeypatch.setattr(StepGraphs, "__init__", noted)
    return made


def hold(case: Case, graphs: list[StepGraphs], checkpoints: Checkpoints, offload: Path) -> None:
    """No layer with experts is refused."""
    with case.open(checkpoints, offload) as llm:
        compare(case, checkpoints, *generate_with(llm, case))
        with_experts = {number for number, layer in enumerate(llm.spec.layers) if layer.experts}
    refused = {layer: why for own in graphs for layer, why in own.refused.items() if layer in with_experts}
    assert graphs and not refused and not any(own.given_up for own in graphs)
    assert sum(own.replayed for own in graphs) >= 2 * len(with_experts)


@pytest.mark.skipif(processor("cpu").build == TORCH, reason="torch alone is not recorded")
@pytest.mark.parametrize(("kind", "weight_codec", "compute"), CASES)
def test_recorded_mixtures_give_the_bits_of_the_resident_loop(
    kind: str, weight_codec: str, compute: str, graphs: list[StepGraphs], checkpoints: Checkpoints, offload: Path
) -> None:
    percent = RESIDENT if compute == INT8 or weight_codec == PLAIN else WEIGHTS_MOVE
    case = Case(kind, percent, (5, 9, 2), STEPS, weight_codec=weight_codec, compute=compute)
    hold(case, graphs, checkpoints, offload)


@pytest.mark.skipif(processor("cpu").build == TORCH, reason="torch alone is not recorded")
@pytest.mark.parametrize(("kind", "stored", "compute"), STORED)
def test_so_do_those_in_a_checkpoints_own_form(
    kind: str, stored: str, compute: str, graphs: list[StepGraphs], checkpoints: Checkpoints, offload: Path
) -> None:
    hold(Case(kind, RESIDENT, (5, 9, 2), STEPS, stored=stored, compute=compute), graphs, checkpoints, offload)
