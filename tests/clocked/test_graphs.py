"""Graphs of decode steps on the clocked device. What was captured is repeated without Python, as a GPU does it: it gives the
tokens of the resident loop, and is ordered behind what it needs, also where rows leave and others join."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from h2o_flexgen.engine.job import Request
from h2o_flexgen.engine.stores.weights import Wanted
from h2o_flexgen.kernels import operations
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.schedule.ops import Visit
from tests.clocked.checker import Checker
from tests.clocked.device import ClockedDevice
from tests.clocked.tensor import NAME, ClockedTensor
from tests.clocked.test_launches import STANDING_IN, table_of
from tests.helpers.contract import BY_HEAD, POLICIES, WEIGHTS, Case, Checkpoints, compare, compare_each_alone, generate_with
from tests.helpers.samples import every_nth, first_of

STAYING, MOVING = (100, 0, 100, 0, 100, 0), (0, 50, 100, 0, 100, 0)  # all weights are there, or come through buffers
SCHEDULES = ("zigzag", "row_by_row", "flexgen_barrier")


@pytest.mark.parametrize("place", every_nth(range(8), 3))
def test_what_is_replayed_is_ordered(place: int, by_twins: Checkpoints, offload: Path, checker: Checker) -> None:
    format, product = WEIGHTS[place % 5]
    case = Case(
        ("opt", "llama-gqa", "neox-parallel", "gemma3")[place // 2],
        (STAYING, MOVING)[place % 2],
        (5, 9, 2),
        6,
        schedule=SCHEDULES[place % 3],
        device=NAME,
        policy=(*POLICIES[0:2], *POLICIES[6:10], BY_HEAD[0], POLICIES[2])[place],
        weight_codec=format,
        compute=product,
        kv_codec=("plain", "group4")[place // 2 % 2],
    )
    with case.open(by_twins, offload) as llm:
        compare(case, by_twins, *generate_with(llm, case))
        assert llm.stats is not None and llm.stats.last_block.replayed > 0


@pytest.mark.parametrize("percent", [STAYING, MOVING])
def test_rows_that_leave_take_new_graphs(
    percent: tuple[float, ...], by_twins: Checkpoints, offload: Path, checker: Checker
) -> None:
    case = Case("llama-gqa", percent, (5, 9, 2, 7), gpu_batch_size=4, sep_layer=False, device=NAME, policy=POLICIES[1])
    with case.open(by_twins, offload) as llm:
        limits = (16, 3, 8, 16)
        done = llm.generate(case.prompts, [SamplingParams(max_tokens=limit) for limit in limits])
        compare_each_alone(case, limits, by_twins, done)
        assert llm.stats is not None and llm.stats.last_block.replayed > 0


@pytest.mark.parametrize("percent", [STAYING, MOVING])
def test_rows_that_come_and_go_take_new_graphs(
    percent: tuple[float, ...], by_twins: Checkpoints, offload: Path, checker: Checker
) -> None:
    case = Case("llama-gqa", percent, (5, 9, 2, 7, 4), gpu_batch_size=2, num_gpu_batches=1, device=NAME)
    limits = (12, 7, 12, 8, 9)
    with case.open(by_twins, offload) as llm:
        requests = [Request(prompt, SamplingParams(max_tokens=limit)) for prompt, limit in zip(case.prompts, limits)]
        done = sorted(llm.generate_stream(requests), key=lambda each: each.index)
        compare_each_alone(case, limits, by_twins, done)
        assert llm.stats is not None and llm.stats.replayed > 0


@pytest.mark.parametrize(
    "mixture", first_of([("olmoe", MOVING), ("gemma4", STAYING), ("gpt-oss", MOVING), ("nemotron-h", STAYING)], 1)
)
@pytest.mark.parametrize("counts", [True, False])
def test_experts_are_captured_where_memory_counts_their_rows(
    mixture: tuple[str, tuple[float, ...]],
    counts: bool,
    by_twins: Checkpoints,
    offload: Path,
    checker: Checker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of few rows, those experts alone are fetched that a router has chosen: it tells so behind its graph, and keeps no more
    than that for it. Prompts are too long to be counted, so they make nothing ready for graphs, and steps meet each buffer."""
    monkeypatch.setattr(by_twins, "resident", {})  # what stands in for kernels has bits of its own
    chosen = operations.chosen
    if counts:
        monkeypatch.setattr(operations, "chosen", lambda op, *of, **more: STANDING_IN.get(op) or chosen(op, *of, **more))
    table_of.cache_clear()
    told, chose = list[torch.Tensor](), Wanted.chose

    def noted(wanted: Wanted, visit: Visit, experts: torch.Tensor) -> None:
        told.append(experts)
        chose(wanted, visit, experts)

    monkeypatch.setattr(Wanted, "chose", noted)
    case = Case(*mixture, (30, 28), 8, num_gpu_batches=1, buffers=3, device=NAME)
    with case.open(by_twins, offload, graphs="on") as llm:
        compare(case, by_twins, *generate_with(llm, case))
        assert llm.stats is not None
        run, layers = llm.stats.last_block, llm.spec.layers
    with_graphs = [layer for layer in layers if not layer.makes_logits and (counts or not layer.reads_back)]
    replays, others = divmod(run.replayed, len(with_graphs))
    assert others == 0 and replays > 1, "each layer has as many"
    assert (counts and mixture[1] == MOVING) <= any(holds_no_more(one) for one in told)


def holds_no_more(tensor: torch.Tensor) -> bool:
    inner = tensor.inner if isinstance(tensor, ClockedTensor) else tensor
    return inner.untyped_storage().nbytes() == inner.nbytes


def test_what_a_gpu_refuses_to_capture_is_refused(checker: Checker) -> None:
    """Waits and events of the capturing thread, and values of the host: of these a replay would find something else there."""
    device, of_host = ClockedDevice(), torch.ones(4)
    there = torch.zeros(4, device=device.torch_device)
    before = device.mark()
    assert before is not None
    works: list[Callable[[], object]] = [
        lambda: there.copy_(of_host),
        lambda: there.copy_(of_host, non_blocking=True),
        lambda: of_host.to(device.torch_device),
        lambda: there[of_host.long()],
        lambda: there.sum().item(),
        lambda: there.cpu(),
        there.tolist,
        lambda: device.upload(of_host, device.torch_device),
        lambda: device.mark(),
        lambda: device.wait(before),
        before.query,
        before.synchronize,
    ]
    for number, work in enumerate(works):
        with pytest.raises(AssertionError, match=r"a graph cannot|CUDA refuses"):
            device.capture(lambda now=work: now())  # type: ignore[misc]
            raise LookupError(number)
    again = device.capture(lambda: there.add_(torch.tensor(2.0)))
    again()
    assert there.tolist() == [2.0] * 4
