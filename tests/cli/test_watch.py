"""Watch: the work that it adds up is the work of the schedule, over all blocks, whatever their shapes."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
import torch

from h2o_flexgen.cli import watch as watch_module
from h2o_flexgen.cli.report.arithmetic import Arithmetic
from h2o_flexgen.cli.watch import Crowd, RunWatch, clock, say_threads
from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.site import Site
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.engine import resources as engine_threads
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.engine.reports import Stage
from h2o_flexgen.planning.block_plan import BlockPlan, BlockPlans
from h2o_flexgen.planning.cost import Cost, predicted_bytes
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.schedule import SCHEDULES
from h2o_flexgen.schedule.ops import Op
from tests.helpers.tiny import tiny_config

WORKLOAD = Workload((9, 3, 7, 5, 4), gen_len=3)
PLAN = Plan(gpu_batch_size=2, num_gpu_batches=2).with_percent((0, 40, 0, 50, 0, 50))


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    from h2o_flexgen.models import create_model

    return create_model(tiny_config("opt"), "float32").spec


def planned(spec: ModelSpec, schedule: str = "zigzag") -> BlockPlans:
    return BlockPlans.of(spec, replace(PLAN, schedule=schedule), WORKLOAD, Site())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_visit_of_every_block_counts_once(spec: ModelSpec, schedule: str) -> None:
    blocks, stream = planned(spec, schedule), io.StringIO()
    watch = RunWatch(blocks, Progress(0, "run", stream))
    done = []
    watch._progress.update = lambda text, number, details: done.append(number)  # type: ignore[method-assign]
    for block in blocks:
        for task in block.schedule.tasks():
            if task.op is Op.COMPUTE:
                watch.visit(task, tokens=0)
    assert done == list(range(1, blocks.visits + 1))
    assert watch.total == done[-1] == sum(3 * len(spec.layers) * batches for batches in (2, 1))
    flops = sum(Cost(block).flops(task) for block in blocks for task in block.schedule.tasks() if task.op is Op.COMPUTE)
    assert sum(watch.flops.values()) == pytest.approx(flops)
    assert watch.flops.keys() == {2 * 9, 2 * 5, 3, 2, 1}  # rows of the products: prefills of the batches, decode steps
    assert [set(ends) for ends in watch.first_decode_ends] == [set(range(len(spec.layers)))] * 2


class Busy:
    """Others that keep a core busy."""

    def cores(self) -> float:
        return 1.0


@pytest.mark.parametrize(("shares", "threads"), [(False, 1), (True, 2)])
def test_threads_that_share_work_out_need_not_be_fewer_in_a_crowd(
    shares: bool, threads: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    had = torch.get_num_threads()
    monkeypatch.setattr(Arithmetic, "shares_work", shares)
    monkeypatch.setattr(engine_threads, "cores", lambda: 2)
    monkeypatch.setattr(watch_module, "cores", lambda: 2)
    monkeypatch.setattr(engine_threads, "quota_cores", lambda: math.inf)
    for name in engine_threads.CHOSEN:
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(2)
    try:
        told = say_threads(Busy(), None, Arithmetic(PLAN, "float32", None))  # type: ignore[arg-type]
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(had)
    assert ("slow: 2 threads compute on 2 cores" in capsys.readouterr().err) is shares is told


def test_a_run_looks_for_a_crowd_at_the_end_of_each_visit(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, watch = list[bool](), RunWatch(planned(spec), Progress(0, "run", io.StringIO()))
    monkeypatch.setattr(Crowd, "look", lambda self: looks.append(True))
    visits = [task for task in planned(spec)[0].schedule.tasks() if task.op is Op.COMPUTE][:3]
    for task in visits:
        watch.visit(task, tokens=0)
    assert len(looks) == 3
    told = (
        RunWatch(planned(spec), Progress(0, "run", io.StringIO()), is_crowded)._crowd._is_told for is_crowded in (True, False)
    )
    assert [*told] == [True, False], "what was said before is not said again"


@pytest.mark.parametrize("visits", [0, 1, 10])
def test_when_memory_runs_out_progress_goes_on_and_ends_at_its_total(spec: ModelSpec, visits: int) -> None:
    """In the second block, after so many visits of it."""
    blocks = planned(spec)
    first, second = blocks
    smaller = replace(PLAN, gpu_batch_size=1, num_gpu_batches=1)
    rest = BlockPlans.of(spec, smaller, Workload((9,), gen_len=3), Site())
    stream, done = io.StringIO(), list[int]()
    progress = Progress(blocks.visits, "run", stream)
    watch = RunWatch(blocks, progress)
    progress.update = lambda text, number, details: done.append(number)  # type: ignore[method-assign]

    def computed(block: BlockPlan, most: int | None = None) -> None:
        for task in [task for task in block.schedule.tasks() if task.op is Op.COMPUTE][:most]:
            watch.visit(task, tokens=task.step)

    computed(first)
    computed(second, visits)
    watch.shrink(1, rest, "going on with less")
    computed(rest[0])
    assert done == list(range(1, watch.total + 1))
    assert watch.total == blocks.followed_by(rest, 1).visits + visits == progress._total
    assert [*watch.blocks] == [first, *rest] and len(watch.first_decode_ends) == 2
    assert watch.first_decode_ends[1].keys() == set(range(len(spec.layers)))
    assert stream.getvalue() == "going on with less\n"


def test_the_text_names_block_step_layer_batch_rate_and_the_time_left(spec: ModelSpec) -> None:
    blocks = planned(spec)
    seen: list[str] = []
    progress = Progress(0, "run", io.StringIO())
    progress.update = lambda text, done, details: seen.append(f"{' '.join(details)}, {text}")  # type: ignore[method-assign]
    watch = RunWatch(blocks, progress)
    watch.stage(Stage.LOADING)
    watch.stage(Stage.GENERATING)
    for task in blocks[0].schedule.tasks():
        if task.op is Op.COMPUTE:
            watch.visit(task, tokens=task.step)
    assert seen[0].startswith(f"block 1/2 step 1/3 layer 1/{len(spec.layers)} batch 1/2, reading prompts")
    assert seen[-1].startswith(f"block 1/2 step 3/3 layer {len(spec.layers)}/{len(spec.layers)} batch 2/2, ")
    assert watch.load_seconds >= 0


def test_the_time_left_counts_visits_that_read_prompts_by_themselves(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's takes 10 s here, and a decode step's 1 s."""
    now, seen = [0.0], list[str]()
    monkeypatch.setattr(watch_module.time, "perf_counter", lambda: now[0])
    progress = Progress(0, "run", io.StringIO())
    blocks, visits = planned(spec), [10.0, 1.0, 1.0]
    watch = RunWatch(blocks, progress)
    progress.update = lambda text, done, details: seen.append(text)  # type: ignore[method-assign]
    tasks = [task for block in blocks for task in block.schedule.tasks() if task.op is Op.COMPUTE]
    left = sum(visits[task.step] for task in tasks)
    for number, task in enumerate(tasks):
        now[0] += visits[task.step]
        left -= visits[task.step]
        watch.visit(task, tokens=0)
        is_told = number >= 2 * len(spec.layers)
        assert seen[-1] == (f"0.00 tokens/s, ETA {clock(left)}" if is_told else "reading prompts")


def test_slices_of_experts_are_named_beside_their_number() -> None:
    from h2o_flexgen.models import create_model

    of_experts = create_model(tiny_config("olmoe"), "float32").spec
    details: list[str] = []
    progress = Progress(0, "run", io.StringIO())
    progress.update = lambda text, done, seen: details.append(seen[2])  # type: ignore[method-assign]
    watch = RunWatch(planned(of_experts), progress)
    for task in planned(of_experts)[0].schedule.tasks():
        if task.op is Op.COMPUTE:
            watch.visit(task, tokens=0)
    layers = len(of_experts.layers)
    assert details[0] == f"layer 1/{layers}" and details[4] == f"layer 3/{layers} (experts 0-1 of block 0)"
    last = of_experts.layer_names[layers - 2]
    assert details[-4] == f"layer {layers - 1}/{layers} ({last.title})" and last.title == "expert 8 of block 2"


def test_blocks_of_one_shape_are_predicted_once_and_counted_each(spec: ModelSpec) -> None:
    one, alike = (BlockPlans.of(spec, PLAN, Workload.uniform(count, 6, 3), Site()) for count in (4, 8))
    assert predicted_bytes(alike) == {op: 2 * nbytes for op, nbytes in predicted_bytes(one).items()}
    assert predicted_bytes(one) == Cost(alike[0]).op_bytes()


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "0:00"), (61, "1:01"), (3600, "1:00:00"), (36061, "10:01:01")])
def test_times_are_written_like_a_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text
