"""Steps of mixtures are recorded, whichever experts their rows are given to, and have the bits of the resident loop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen.core import model_spec
from h2o_flexgen.engine.graphs import StepGraphs
from h2o_flexgen.formats.kernel_table import EXACT, INT8, TORCH
from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.kernels.native import processor
from h2o_flexgen.kernels.recording import Program
from h2o_flexgen.llm import LLM
from h2o_flexgen.models import mixture
from h2o_flexgen.planning.working_space import RECORDED_BYTES, calls_of_experts, graph_count
from tests.helpers.contract import WEIGHTS, Case, Checkpoints, compare, generate_with
from tests.helpers.samples import every_nth, first_of, spread

RESIDENT, WEIGHTS_MOVE = (100, 0, 100, 0, 100, 0), (0, 40, 100, 0, 100, 0)
KINDS = "olmoe", "gpt-oss", "glm4-moe", "qwen2-moe", "qwen3-moe", "mixtral", "granite-moe", "minimax", "deepseek-v3"
KINDS += ("hunyuan-moe", "llama4")
PACKED_MIXTURES = ("olmoe", "gguf-q4_0", EXACT), ("qwen3-moe", "gguf-q4_0", INT8), ("gpt-oss", "gguf-mxfp4", EXACT)
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
        with_experts = {number for number, layer in enumerate(llm.spec.layers) if layer.turns is not None}
        counted = _counted(llm)
    refused = {layer: why for own in graphs for layer, why in own.refused.items() if layer in with_experts}
    assert graphs and not refused and not any(own.given_up for own in graphs)
    assert sum(own.replayed for own in graphs) >= 2 * len(with_experts)
    assert 0 < _held(graphs) <= counted


def _counted(llm: LLM) -> int:
    """Bytes of programs that a plan counts."""
    assert llm.stats is not None
    planned = llm.stats.last_block.planned
    return graph_count(planned) * RECORDED_BYTES + calls_of_experts(planned, llm.loaded.site)


def _held(graphs: list[StepGraphs]) -> int:
    programs = [graph.replay for own in graphs for batch in own._batches.values() for graph in batch.graphs.values()]
    return sum(program.nbytes for program in programs if isinstance(program, Program))


@pytest.mark.skipif(processor("cpu").build == TORCH, reason="torch alone is not recorded")
@pytest.mark.parametrize(("kind", "weight_codec", "compute"), every_nth(spread(CASES), 3))
def test_recorded_mixtures_give_the_bits_of_the_resident_loop(
    kind: str, weight_codec: str, compute: str, graphs: list[StepGraphs], checkpoints: Checkpoints, offload: Path
) -> None:
    percent = RESIDENT if compute == INT8 or weight_codec == PLAIN else WEIGHTS_MOVE
    case = Case(kind, percent, (5, 9, 2), STEPS, weight_codec=weight_codec, compute=compute)
    hold(case, graphs, checkpoints, offload)


@pytest.mark.skipif(processor("cpu").build == TORCH, reason="torch alone is not recorded")
@pytest.mark.parametrize(("kind", "stored", "compute"), PACKED_MIXTURES)
def test_so_do_those_in_a_checkpoints_own_form(
    kind: str, stored: str, compute: str, graphs: list[StepGraphs], checkpoints: Checkpoints, offload: Path
) -> None:
    hold(Case(kind, RESIDENT, (5, 9, 2), STEPS, stored=stored, compute=compute), graphs, checkpoints, offload)


@pytest.mark.skipif(processor("cpu").build == TORCH, reason="torch alone is not recorded")
@pytest.mark.parametrize("recorded", [1, 99])
@pytest.mark.parametrize(("kind", "stored", "compute"), first_of(spread(PACKED_MIXTURES), 1))
def test_turns_are_recorded_or_left_behind_those_that_are(
    kind: str,
    stored: str,
    compute: str,
    recorded: int,
    graphs: list[StepGraphs],
    checkpoints: Checkpoints,
    offload: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All experts of a block are in one layer, and few of them get their rows at once."""
    monkeypatch.setattr(mixture, "MOST_TOGETHER", 0.1)
    monkeypatch.setattr(mixture, "FEW_ROWS", 1)
    monkeypatch.setattr(model_spec, "RECORDED_TURNS", recorded)
    case = Case(kind, RESIDENT, (5, 9, 2), STEPS, stored=stored, compute=compute, sep_layer=False)
    later = noted_later_turns(monkeypatch)
    hold(case, graphs, checkpoints, offload)
    programs = [graph.replay for own in graphs for batch in own._batches.values() for graph in batch.graphs.values()]
    largest = max(program.nbytes for program in programs if isinstance(program, Program))
    assert (largest > RECORDED_BYTES, bool(later)) == (recorded > 1, recorded == 1)


def noted_later_turns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Those that are computed behind recorded ones."""
    asked, seen = mixture._asked, list[int]()

    def noted(state: mixture.Routed, own: range, first: int = 0) -> Iterator[mixture.ExpertGroup]:
        for group in asked(state, own, first):
            seen.extend([first] * (first > 0))
            yield group

    monkeypatch.setattr(mixture, "_asked", noted)
    return seen
