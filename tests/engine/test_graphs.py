"""Graphs of decode steps: what a device may capture is the same work on the same addresses at every step, and gives the bits of
the resident loop; and what cannot be captured is computed without."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from h2o_flexgen.engine.graphs import StepGraphs
from h2o_flexgen.engine.job import Request
from h2o_flexgen.formats.kernel_sizes import ROOM_CHUNK
from h2o_flexgen.formats.kernel_table import CUDA, TORCH
from h2o_flexgen.kernels import recording
from h2o_flexgen.kernels.native import processor
from h2o_flexgen.memory.memories import own_site
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.working_space import SLACK, graph_bytes, graph_count
from h2o_flexgen.sampling.params import SamplingParams
from tests.helpers.contract import (
    BY_HEAD,
    POLICIES,
    UNLIKE,
    WEIGHTS,
    Case,
    Checkpoints,
    compare,
    fits,
    generate_with,
    kept_as,
)
from tests.helpers.pretended import PretendedDevice
from tests.helpers.recorded import repeated
from tests.helpers.room import holds
from tests.helpers.samples import every_nth, first_of, spread
from tests.helpers.tiny import KINDS
from tests.whole import test_stream as stream

NEAR = [kind for kind in KINDS if kind.endswith("-near")]  # have positions for few tokens
LONG_ENOUGH = sorted(kind for kind in KINDS if kind not in NEAR)
RESIDENT, STEPS = (100, 0, 100, 0, 100, 0), 8
WEIGHTS_MOVE = (30, 40, 100, 0, 100, 0)


def asked(case: Case) -> dict[str, object]:
    """Graphs, where the usual choice asks for a check of the GPU first."""
    return {"graphs": "on"} if case.device == CUDA else {}


def replayed(case: Case, checkpoints: Checkpoints, offload: Path, **options: object) -> int:
    with case.open(checkpoints, offload, **asked(case), **options) as llm:
        compare(case, checkpoints, *generate_with(llm, case))
        assert llm.stats is not None
        assert not any(run.graphs_given_up for run in llm.stats.blocks)
        return sum(run.replayed for run in llm.stats.blocks)


def is_without_graphs(device: str) -> bool:
    """On a CPU kernels in C are recorded."""
    return device == "cpu" and processor("cpu").build == TORCH


@pytest.mark.parametrize("place", first_of(range(len(UNLIKE)), 5))
def test_replayed_steps_give_the_bits_of_the_resident_loop(
    place: int, any_device: str, checkpoints: Checkpoints, offload: Path
) -> None:
    """Where weights come through buffers, a layer has a graph for each of them."""
    format, product = WEIGHTS[place % len(WEIGHTS)]
    case = Case(
        ("opt", "llama-gqa", "neox-parallel")[place % 3],
        (RESIDENT, WEIGHTS_MOVE)[place % 2],
        (5, 9, 2, 7),
        STEPS,
        device=any_device,
        schedule=("zigzag", "flexgen_barrier", "row_by_row")[place % 3],
        policy=UNLIKE[place],
        weight_codec=format,
        compute=product,
        kv_codec=("plain", "group4")[place % 2],
    )
    assert replayed(case, checkpoints, offload) > 0 or is_without_graphs(any_device)


@pytest.mark.parametrize("percent", [RESIDENT, WEIGHTS_MOVE])
def test_rows_that_begin_to_evict_while_steps_are_replayed_take_new_graphs(
    percent: tuple[float, ...], any_device: str, checkpoints: Checkpoints, offload: Path
) -> None:
    """Some steps are replayed while all slots are kept, and then others evict."""
    policy = ("kv_policy", "h2o"), ("heavy", 6), ("recent", 5)
    case = Case("llama-gqa", percent, (5, 4, 3, 5), 16, device=any_device, policy=policy)
    assert replayed(case, checkpoints, offload) > 0 or is_without_graphs(any_device)


@pytest.mark.parametrize("policy", [(), (("kv_policy", "h2o"), ("kv_budget", 0.7))])
def test_steps_that_choose_what_they_attend_are_the_same_work(
    policy: tuple[tuple[str, object], ...], any_device: str, checkpoints: Checkpoints, offload: Path
) -> None:
    """Also with rows that hold as little as a step attends, until they have grown."""
    chosen = (*policy, ("kv_recall", 0.5))
    case = Case("llama-gqa", WEIGHTS_MOVE, (45, 17, 38, 62), STEPS, device=any_device, policy=chosen)
    assert replayed(case, checkpoints, offload) > 0 or is_without_graphs(any_device)


@pytest.mark.skipif(processor("cpu").build == TORCH, reason="there are no kernels in C")
@pytest.mark.parametrize("place", every_nth(range(len(LONG_ENOUGH)), 3))
def test_every_layer_of_every_family_is_recorded(place: int, checkpoints: Checkpoints, offload: Path) -> None:
    policies = [own for own in (*POLICIES, *BY_HEAD) if fits(LONG_ENOUGH[place], own)]
    format, product = WEIGHTS[place % len(WEIGHTS)]
    case = Case(
        LONG_ENOUGH[place],
        RESIDENT,
        (5, 9, 2),
        STEPS,
        dtype=("float32", "bfloat16", "float16")[place % 3],
        policy=policies[place % len(policies)],
        weight_codec=format,
        compute=product,
        kv_codec=kept_as(LONG_ENOUGH[place], ("plain", "group4", "group8")[place // 3 % 3]),
    )
    with case.open(checkpoints, offload) as llm:
        compare(case, checkpoints, *generate_with(llm, case))
        assert llm.stats is not None and llm.stats.replayed > 0
        assert llm.stats.unrecorded == {}


def test_every_layer_but_the_head_is_replayed_from_the_third_step_on(
    checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    case = Case("opt", RESIDENT, (5, 9, 2, 7), STEPS, device="pretended")
    with case.open(checkpoints, offload) as llm:
        layers = len(llm.spec.layers) - 1
        generate_with(llm, case)
        assert llm.stats is not None
        assert llm.stats.last_block.replayed == 2 * layers * (STEPS - 1 - 2), "two batches; two steps come before a capture"


def test_layers_may_meet_a_buffer_for_the_first_time_when_they_are_captured(
    checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    """Of four buffers three are met before: by the prompts and by two steps. Views of the last one are made in the capture."""
    case = Case("opt", (0, 60, 100, 0, 100, 0), (5, 9), 10, buffers=4, sep_layer=False, device="pretended")
    assert replayed(case, checkpoints, offload) > 0


@pytest.mark.parametrize("sep_layer", [True, False])
def test_layers_have_a_graph_for_each_buffer_that_their_weights_come_through(
    sep_layer: bool, checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    """With an odd number of layers they change buffers from step to step, and with an even one they do not."""
    case = Case("opt", (0, 60, 100, 0, 100, 0), (5, 9, 2, 7), STEPS, device="pretended")
    with case.open(checkpoints, offload, sep_layer=sep_layer) as llm:
        layers = len(llm.spec.layers) - 1
        generate_with(llm, case)
        assert llm.stats is not None
        assert llm.stats.last_block.replayed == 2 * layers * (STEPS - 1 - 2)


@pytest.mark.parametrize("percent", [(100, 0, 0, 100, 100, 0), (100, 0, 100, 0, 0, 100)])
def test_nothing_is_captured_where_kv_or_activations_move(
    percent: tuple[float, ...], checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    case = Case("opt", percent, (5, 9), STEPS, device="pretended")
    assert replayed(case, checkpoints, offload) == 0
    with pytest.raises(ValueError, match="graphs='on' is for plans that keep all KV and activations"):
        case.open(checkpoints, offload, graphs="on")


def test_off_is_off(any_device: str, checkpoints: Checkpoints, offload: Path) -> None:
    case = Case("opt", RESIDENT, (5, 9), STEPS, device=any_device)
    with case.open(checkpoints, offload, graphs="off") as llm:
        compare(case, checkpoints, *generate_with(llm, case))
        assert llm.stats is not None and not any(run.replayed for run in llm.stats.blocks)
    with pytest.raises(ValueError, match="graphs 'onn' is unknown; known: auto, on, off"):
        Plan(graphs="onn")


def test_rows_that_leave_take_new_graphs(any_device: str, checkpoints: Checkpoints, offload: Path) -> None:
    case = Case("opt", RESIDENT, (5, 9, 2, 7), 24, gpu_batch_size=4, device=any_device)
    expected = [checkpoints.greedy(case, row, 24)[0] for row in range(4)]
    limits = (24, 3, 9, 16)
    with case.open(checkpoints, offload, **asked(case)) as llm:
        completions = llm.generate(case.prompts, [SamplingParams(max_tokens=limit) for limit in limits])
        assert llm.stats is not None
        assert llm.stats.last_block.replayed > 0 or is_without_graphs(any_device)
    assert [list(each.token_ids) for each in completions] == [row[:limit] for row, limit in zip(expected, limits)]


def test_rows_that_come_and_go_have_the_tokens_of_rows_alone(any_device: str, checkpoints: Checkpoints, offload: Path) -> None:
    case = Case("llama-gqa", RESIDENT, (5, 9, 2, 7, 4, 6), 12, device=any_device)
    expected = [checkpoints.greedy(case, row, 12)[0] for row in range(6)]
    with case.open(checkpoints, offload) as llm:
        requests = [Request(prompt, SamplingParams(max_tokens=12)) for prompt in case.prompts]
        done = list(llm.generate_stream(requests))
    assert [list(each.token_ids) for each in sorted(done, key=lambda each: each.index)] == expected


def test_rows_that_come_and_go_take_new_graphs_where_they_begin_to_evict(
    any_device: str, checkpoints: Checkpoints, offload: Path
) -> None:
    lengths, policy = (5, 4, 3, 5, 4, 6), (("kv_policy", "h2o"), ("heavy", 6), ("recent", 5))
    case = Case("llama-gqa", RESIDENT, lengths, device=any_device, policy=policy)
    stream.hold_contract(case, (16,) * len(lengths), checkpoints, offload)


@pytest.mark.skipif(processor("cpu").build == TORCH, reason="there are no kernels in C")
def test_steps_of_rows_that_share_prefixes_are_recorded(checkpoints: Checkpoints, offload: Path) -> None:
    """Some rows share one prefix, others another one, and one shares nothing."""
    texts = [list(range(first, first + 40)) for first in (1, 51)]
    prompts = [*([*texts[0][:36], 7, row] for row in (1, 2, 3)), *([*texts[1][:34], row] for row in (4, 5)), [9, 8, 7]]
    requests = [Request(prompt, SamplingParams(max_tokens=9 + place)) for place, prompt in enumerate(prompts)]
    found = {}
    for graphs in ("off", "auto"):
        case = Case("llama-gqa", RESIDENT, (5,), STEPS, gpu_batch_size=6, num_gpu_batches=1)
        with case.open(checkpoints, offload, graphs=graphs, shared_prefixes=True, least_prefix=16) as llm:
            done = sorted(llm.generate_stream(requests), key=lambda each: each.index)
            found[graphs] = [each.token_ids for each in done]
            assert llm.stats is not None and llm.stats.unrecorded == {}
            assert (llm.stats.replayed > 0) == (graphs == "auto")
    assert found["off"] == found["auto"]


class Refusing(PretendedDevice):
    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")


def test_what_cannot_be_captured_is_computed_without_unless_graphs_are_asked_for(
    checkpoints: Checkpoints, offload: Path, pretended: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.helpers.pretended.PretendedDevice", Refusing)
    case = Case("opt", RESIDENT, (5, 9), STEPS, device="pretended")
    with case.open(checkpoints, offload) as llm:
        compare(case, checkpoints, *generate_with(llm, case))
        assert llm.stats is not None
        assert llm.stats.last_block.replayed == 0
        assert llm.stats.last_block.graphs_given_up == "operation not permitted when stream is capturing"
    with (
        case.open(checkpoints, offload, graphs="on") as llm,
        pytest.raises(RuntimeError, match=r"a layer cannot be captured \(operation not permitted"),
    ):
        llm.generate(case.prompts, SamplingParams(max_tokens=STEPS))


@pytest.mark.skipif(processor("cpu").build == TORCH, reason="there are no kernels in C")
@pytest.mark.parametrize("place", first_of(range(len(UNLIKE)), 5))
def test_the_room_of_programs_is_counted(
    place: int, checkpoints: Checkpoints, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks are as small as they may be, so that the room is what programs take of it."""
    monkeypatch.setattr(recording, "ROOM_CHUNK", recording.PART)
    format, product = WEIGHTS[place % len(WEIGHTS)]
    case = Case(
        ("llama-gqa", "neox-parallel", "opt", "gemma2", "olmoe", "gpt-oss", "glm4-moe", "qwen2-moe", "deepseek-v3")[place % 9],
        RESIDENT,
        (5, 9, 2, 7, 5, 9, 2, 7),
        STEPS,
        gpu_batch_size=8,
        num_gpu_batches=1,
        policy=UNLIKE[place],
        weight_codec=format,
        compute=product,
        kv_codec=("plain", "group4")[place % 2],
    )
    with case.open(checkpoints, offload) as llm:
        generate_with(llm, case)
        assert llm.stats is not None
        planned, site = llm.stats.last_block.planned, own_site("cpu", False)
        taken = llm.loaded.device._room.nbytes
    assert taken <= SLACK * graph_bytes(planned.kv, 0, planned.plan, site) - ROOM_CHUNK
    assert taken > 0


@pytest.mark.skipif(processor("cpu").build == TORCH, reason="there are no kernels in C")
@pytest.mark.skipif(sys.platform != "linux", reason="only there pages that were given back are known to be of zeros")
def test_prompts_of_the_next_block_find_an_empty_room(checkpoints: Checkpoints, offload: Path) -> None:
    """What steps need is promised to prompts as well, which come first in a block."""
    case = Case("opt", RESIDENT, (5, 9, 2, 7, 5, 9, 2, 7), STEPS, gpu_batch_size=2, num_gpu_batches=2)
    seen = list[tuple[int, bool]]()
    with case.open(checkpoints, offload) as llm:
        room = llm.loaded.device._room
        llm.generate(case.prompts, case.params, on_visit=lambda task, _: seen.append((task.step, holds(room))))
    first, second = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert first[-1] == (STEPS - 1, True) and first[0] == second[0] == (0, False)
    assert not any(held for step, held in seen if step == 0)


@pytest.mark.skipif(processor("cpu").build == TORCH, reason="there are no kernels in C")
@pytest.mark.parametrize(
    ("kind", "schedule"),
    first_of(spread([("opt", "zigzag"), ("falcon-h1", "zigzag"), ("opt", "row_by_row"), ("opt", "flexgen_barrier")]), 2),
)
@pytest.mark.parametrize("percent", [RESIDENT, (0, 40, 100, 0, 100, 0), (100, 0, 0, 0, 100, 0), (0, 40, 0, 0, 100, 0)])
def test_there_are_no_more_programs_than_are_counted(
    percent: tuple[float, ...],
    kind: str,
    schedule: str,
    checkpoints: Checkpoints,
    offload: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, make = list[StepGraphs](), StepGraphs.__init__

    def noted(self: StepGraphs, *given: Any) -> None:
        make(self, *given)
        made.append(self)

    monkeypatch.setattr(StepGraphs, "__init__", noted)
    case = Case(kind, percent, (5, 9, 2, 7), 12, buffers=3, schedule=schedule)
    with case.open(checkpoints, offload) as llm:
        generate_with(llm, case)
        assert llm.stats is not None
        counted = graph_count(llm.stats.last_block.planned)
    recorded = sum(len(batch.graphs) for own in made for batch in own._batches.values())
    assert 0 < recorded <= counted


@pytest.mark.parametrize("percent", [RESIDENT, WEIGHTS_MOVE, (0, 0, 0, 0, 0, 0)])
def test_threads_that_generate_at_once_take_turns(percent: tuple[float, ...], checkpoints: Checkpoints, offload: Path) -> None:
    """Programs share the room that they work in, and all runs share the buffers through which weights come."""
    case = Case("llama-gqa", percent, (5, 9, 2, 7), 12)
    params = SamplingParams(max_tokens=case.gen_len)
    with case.open(checkpoints, offload) as llm, ThreadPoolExecutor(3) as threads:
        expected = [each.token_ids for each in llm.generate(case.prompts, params)]
        made = threads.map(lambda _: [each.token_ids for each in llm.generate(case.prompts, params)], range(6))
        assert all(own == expected for own in made)


# -- what is held to be fit for a graph -------------------------------------------------------------------------------------


def test_the_same_work_on_the_same_addresses_is_repeated() -> None:
    x, out = torch.arange(4.0), torch.zeros(4)
    again = repeated(lambda: out.copy_((x * 2).relu() + 1))  # type: ignore[arg-type, return-value]
    again()
    x += 5
    again()
    assert out.tolist() == [11.0, 13.0, 15.0, 17.0]


def _other_tensor(step: int) -> None:
    torch.ones(3).add_(torch.tensor([float(step)] * 3))


def _other_number(step: int) -> None:
    STAYING.mul_(step)


def _other_shape(step: int) -> None:
    STAYING[: step + 1].add_(1)


def _more_work(step: int) -> None:
    for _ in range(step + 1):
        STAYING.add_(1)


def _read_back(step: int) -> None:
    STAYING.add_(STAYING[0].item())


STAYING = torch.ones(8)


@pytest.mark.parametrize("work", [_other_tensor, _other_number, _other_shape, _more_work, _read_back])
def test_work_that_changes_from_step_to_step_is_found(work: Callable[[int], None]) -> None:
    steps = iter(range(3))
    again = repeated(lambda: work(next(steps)))
    with pytest.raises(AssertionError, match="a graph"):
        again()
        again()


def test_memory_that_is_made_anew_between_steps_is_found() -> None:
    """Also where it comes to lie where the last one lay, as an allocator likes to have it."""
    found = list[torch.Tensor]()
    again = repeated(lambda: found[0][:3].add_(1))  # type: ignore[arg-type, return-value]
    with pytest.raises(AssertionError, match=r"a graph would repeat .*aten\.add_"):
        for _ in range(2):
            found[:] = [torch.ones(8)]
            again()
