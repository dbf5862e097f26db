"""Visits: what a layer costs beside its work, and a read beside its bytes, in runs of a model so small that nothing else is
left of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from h2o_flexgen.memory.device import Device
from h2o_flexgen.memory.memories import Memories
from h2o_flexgen.models.dummy import DummySource
from h2o_flexgen.planning.machine import VISITS
from h2o_flexgen.planning.model_spec import ModelSpec
from h2o_flexgen.planning.plan import Plan, Shares
from h2o_flexgen.planning.schedule import Op
from h2o_flexgen.planning.trace import Trace
from h2o_flexgen.planning.workload import Workload
from h2o_flexgen.runtime.engine import Engine
from h2o_flexgen.runtime.profiling.products import HEAD_DIM, OPT, small_model
from h2o_flexgen.runtime.profiling.sizes import Sizes
from h2o_flexgen.runtime.profiling.subject import Figures, Subject
from h2o_flexgen.runtime.row_state import RowState
from h2o_flexgen.runtime.sampling import Sampler
from h2o_flexgen.runtime.sampling_params import SamplingParams
from h2o_flexgen.runtime.tokenizer import ByteTokenizer

TASK, VISIT = "task_seconds", "visit_seconds"
BLOCKS, PROMPT_LEN, SEED = 4, 4, 0


def visits(device: Device, folder: Path, dtype: str, sizes: Sizes) -> list[Subject]:
    return [
        Subject("visits of layers", lambda: _of_visits(device, folder, dtype, sizes)),
        Subject("reads of next to nothing", lambda: _of_reads(device, folder, dtype, sizes)),
    ]


def _of_visits(device: Device, folder: Path, dtype: str, sizes: Sizes) -> Figures:
    """With weights in memory: nobody else wants the processor."""
    spec, trace = _run(device, folder, dtype, sizes, Shares(1.0, 0.0))
    return {f"{VISIT} {kind}": _median(spec, trace, Op.COMPUTE, (kind,)) for kind in VISITS}


def _of_reads(device: Device, folder: Path, dtype: str, sizes: Sizes) -> Figures:
    spec, trace = _run(device, folder, dtype, sizes, Shares(0.0, 0.0))
    return {TASK: _median(spec, trace, Op.READ_W, VISITS)}


def _median(spec: ModelSpec, trace: Trace, op: Op, kinds: Sequence[str]) -> float:
    """Of the tasks of a step."""
    wanted = (span for span in trace.spans if span.key.step and span.key.op is op)
    return statistics.median(span.end - span.start for span in wanted if spec.layers[span.key.layer].kind in kinds)


def _run(device: Device, folder: Path, dtype: str, sizes: Sizes, weights: Shares) -> tuple[ModelSpec, Trace]:
    plan = Plan(gpu_batch_size=1, weights=weights, pin_weight=False)
    model = small_model(OPT, dtype, HEAD_DIM, BLOCKS)
    (block,) = Workload.uniform(1, PROMPT_LEN, sizes.steps).blocks(1, 1)
    row = RowState(
        0, [0] * PROMPT_LEN, SamplingParams(max_tokens=sizes.steps, ignore_eos=True), ByteTokenizer(model.spec.vocab)
    )
    with closing(Memories(device, folder, False)) as memories, closing(DummySource(SEED, dtype, folder)) as source:
        engine = Engine(model, source, plan if device.accelerator else plan.folded(), memories)
        return model.spec, engine.run(block, [row], Sampler(SEED)).trace
