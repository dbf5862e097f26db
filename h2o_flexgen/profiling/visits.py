"""Visits: what a layer costs besides its work, and a read besides its bytes, in runs of a model so small that nothing else
remains."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

import torch
from torch import Tensor

from h2o_flexgen.checkpoints.dummy import DummySource
from h2o_flexgen.core.model_spec import ATTENTION_VISIT, MLP_VISIT, ModelSpec
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.engine.engine import Engine, OnVisit
from h2o_flexgen.engine.head import Picker
from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.memory.device import Device
from h2o_flexgen.memory.memories import Memories, own_site
from h2o_flexgen.models.base import Model
from h2o_flexgen.planning.block_plan import BlockPlans
from h2o_flexgen.planning.plan import Plan, Shares
from h2o_flexgen.profiling.bench import Bench, Clock, Figures, ProfileSizes, ProfileWatch, Subject
from h2o_flexgen.profiling.products import HEAD_DIM, small_llama, small_opt
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.sampling.sampler import Sampler
from h2o_flexgen.schedule.ops import Key, Op, Task
from h2o_flexgen.schedule.trace import Trace
from h2o_flexgen.text.tokenizer import ByteTokenizer

TASK, VISIT, PART = "task_seconds", "visit_seconds", "part_seconds"
TIMED_VISITS = (ATTENTION_VISIT, MLP_VISIT)
BLOCKS, PROMPT_LEN, SEED = 4, 4, 0
KV = {"kv_read_per_s": Op.READ_KV.lane, "kv_write_per_s": Op.WRITE_KV.lane}  # field -> lane
KV_BATCHES, KV_STEPS = 2, 4
FEW_STEPS = 2  # of the first run, for processors that are slow
SHRINKS = (8, 2, 1)  # how many times fewer rows, and shorter ones, there are at first, for disks that are slow
DISPLACING_BYTES = 64 << 20  # more than a cache holds
WEIGHT, WEIGHT_OF_KV = 3.0, 6.0


def visits(
    bench: Bench, host: Bench, folder: Path, dtype: str, sizes: ProfileSizes, watch: ProfileWatch | None = None
) -> list[Subject]:
    """Runs to measure, each on its own. That of KV takes long on a slow disk, so it reports its visits; in the others,
    reporting would be measured as well. `host` is the bench of the CPU."""
    displacing = host.pool.view((min(DISPLACING_BYTES, host.pool.nbytes) // 4,), torch.float32)
    trials = Trials(bench.clock, folder, dtype, displacing, sizes, watch or ProfileWatch())
    steps, tokens = (min(FEW_STEPS, sizes.steps), sizes.steps), max(1, sizes.kv_rows * sizes.slots // 2)
    of_kv = tuple(dict.fromkeys(max(1, tokens // shrink**2) for shrink in SHRINKS))
    return [
        Subject("visits of layers", trials.of_visits, steps, weight=WEIGHT, of_rounds=min),
        Subject("reads of next to nothing", trials.of_reads, steps, weight=WEIGHT),
        Subject("KV on disk", trials.of_kv, of_kv, enough=inf, weight=WEIGHT_OF_KV),
    ]


class VisitByVisit(Device):
    """A CPU that replays each visit by itself, as it does where something moves between them."""

    chains = False


@dataclass(frozen=True, eq=False)
class Trials:
    """Runs of small models on one device."""

    clock: Clock
    folder: Path
    dtype: str
    displacing: Tensor  # more values than caches hold
    sizes: ProfileSizes
    watch: ProfileWatch

    @property
    def device(self) -> Device:
        return self.clock.device

    def of_visits(self, steps: int) -> Figures:
        """Visits with weights in memory, so that nothing else needs the processor: once with caches that are emptied between
        them, and once without that, since further parts of a visit find there what the first has used."""
        between = None if self.device.accelerator else Between(self.displacing)
        spec, trace = self._tiny(Shares(1.0, 0.0), steps, between)
        own = (lambda key: 0.0) if between is None else between.seconds.__getitem__
        whole = {f"{VISIT} {kind}": _median(spec, trace, Op.COMPUTE, (kind,), own) for kind in TIMED_VISITS}
        warm = trace if between is None else self._tiny(Shares(1.0, 0.0), steps)[1]
        return {**whole, **{f"{PART} {kind}": _median(spec, warm, Op.COMPUTE, (kind,)) for kind in TIMED_VISITS}}

    def of_reads(self, steps: int) -> Figures:
        return {TASK: _median(*self._tiny(Shares(0.0, 0.0), steps), Op.READ_W, TIMED_VISITS)}

    def of_kv(self, tokens: int) -> Figures:
        """KV transfers of large batches, with nothing else on the disk: bytes over the time in which a lane was busy. The model
        has far more KV than products, which are not asked for here."""
        model = small_llama(self.dtype, HEAD_DIM, heads=max(1, self.sizes.width // HEAD_DIM))
        weights, kv = Shares(1.0, 0.0), Shares(0.0, 0.0)
        shrink = round((self.sizes.kv_rows * self.sizes.slots / 2 / tokens) ** 0.5)
        rows, prompt_len = max(1, self.sizes.kv_rows // shrink), max(1, self.sizes.slots // 2 // shrink)
        plan = Plan(gpu_batch_size=rows, num_gpu_batches=KV_BATCHES, weights=weights, kv=kv)

        def tell(task: Task, tokens: int) -> None:
            self.watch.inside(f"step {task.step + 1} of {KV_STEPS}, batch {task.batch + 1} of {KV_BATCHES}")

        trace = self._trace(model, plan, prompt_len, KV_STEPS, tell)
        return {name: trace.moved_bytes(lane) / trace.busy_seconds(lane) for name, lane in KV.items()}

    def _tiny(self, weights: Shares, steps: int, on_visit: OnVisit | None = None) -> tuple[ModelSpec, Trace]:
        plan = Plan(gpu_batch_size=1, weights=weights)
        model = small_opt(self.dtype, HEAD_DIM, BLOCKS)
        if self.device.accelerator:
            self.clock.make_ready(lambda: self._trace(model, plan, PROMPT_LEN, FEW_STEPS, None))
        return model.spec, self._trace(model, plan, PROMPT_LEN, steps, on_visit)

    def _trace(self, model: Model, plan: Plan, prompt_len: int, steps: int, on_visit: OnVisit | None) -> Trace:
        """Runs one block and returns its trace."""
        device, folder = self.device if self.device.accelerator else VisitByVisit(), self.folder
        site = own_site(device.kind, device.accelerator)
        plan = plan.at(site)
        planned = BlockPlans.of(model.spec, plan, Workload.uniform(plan.block_size, prompt_len, steps), site).first
        params, tokenizer = SamplingParams(max_tokens=steps, ignore_eos=True), ByteTokenizer(model.spec.vocab)
        rows = [RowState(row, [0] * prompt_len, params, tokenizer) for row in range(plan.block_size)]
        with closing(Memories(device, folder)) as memories, closing(DummySource(SEED, self.dtype, folder)) as source:
            return Engine(model, source, plan, memories).run(planned, rows, Picker(Sampler(SEED)), on_visit).trace


def _median(
    spec: ModelSpec, trace: Trace, op: Op, kinds: Sequence[str], own: Callable[[Key], float] = lambda key: 0.0
) -> float:
    """The median over the decode steps' tasks in layers of blocks, without the time `own` that this module spent in them."""
    layers = {index for index, layer in enumerate(spec.layers) if layer.block is not None and {*layer.visits} <= {*kinds}}
    wanted = (span for span in trace.spans if span.key.step and span.key.op is op and span.key.layer in layers)
    return statistics.median(span.end - span.start - own(span.key) for span in wanted)


@dataclass(frozen=True, eq=False)
class Between:
    """Plays the part of the weights that a run reads between visits: they displace the next layer's data and program from the
    caches, and a visit then takes several times as long."""

    memory: Tensor  # more than caches hold
    seconds: dict[Key, float] = field(default_factory=dict)  # that each call took

    def __call__(self, task: Task, tokens: int) -> None:
        begun = time.perf_counter()
        self.memory.sum()
        self.seconds[task.key] = time.perf_counter() - begun
