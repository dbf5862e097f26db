"""What makes a run slow although a flag or an action would mend it: a line for each reason, which names the mending.

The reasons follow from facts that are at hand: nothing is measured for them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from h2o_flexgen.cli.report.arithmetic import Arithmetic
from h2o_flexgen.core.allowed_values import AUTO
from h2o_flexgen.core.model_spec import NEARLY_ALL, asked_for, rows_asking
from h2o_flexgen.core.site import DISK, Site
from h2o_flexgen.engine.graphs import BY_ADAPTERS
from h2o_flexgen.formats.kernel_table import CPU, EXACT, INT8, PRODUCTS, TORCH, TRITON
from h2o_flexgen.kernels.functions import why_launches_are_slow
from h2o_flexgen.kernels.native import BF16, FP16, SWITCH, unbuilt, variants
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.planning.footprint import MemoryLimits
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.plan import OFF, Plan
from h2o_flexgen.planning.predict import BlockPrediction, with_fewer_blocks
from h2o_flexgen.planning.search import BUFFERS, WORTH_BUFFERS
from h2o_flexgen.planning.workload_plan import WorkloadPlan
from h2o_flexgen.profiling.gpu_checks import outlived_check

SLOW = "slow"  # the first word of each line
WORTH_SAYING: Mapping[str, float] = {INT8: 1.3, EXACT: 1.1}  # times that other products must be faster to be named
WORTH_MORE_BUFFERS = 1.1  # the same of more buffers
NO_KERNELS = (
    "no kernels in C were built, and what takes their place in torch is slower; get a C compiler (`apt install gcc` or "
    "`dnf install gcc`), and install again, from a checkout with `pip install -e .`"
)

NO_TRITON = "Triton is not installed, and what takes the place of the kernels for GPUs in torch is slower; `pip install triton`"


def say_slow(reasons: Iterable[str]) -> None:
    for reason in reasons:
        print(f"{SLOW}: {reason}", file=sys.stderr, flush=True)


def plan_reasons(planned: WorkloadPlan, arithmetic: Arithmetic) -> Iterator[str]:
    """The reasons that each command names which plans work for many rows. Those in the processor, where it is known."""
    yield from kernel_reasons(arithmetic)
    yield from experts_reason(planned.blocks.first)
    yield from unguessed_reason(planned.blocks.first)
    yield from unread_reason(planned.blocks.first)
    if arithmetic.processor is not None:
        yield from unchecked_reason(planned.plan, planned.site)


def kernel_reasons(
    arithmetic: Arithmetic,
    libraries: Callable[[str], Sequence[str]] = variants,
    missing: Callable[[], str | None] = unbuilt,
    launches: Callable[[], str | None] = why_launches_are_slow,
) -> Iterator[str]:
    """The reasons in what computes.

    `libraries` says what there is for a kind of device and runs here, the best first. `missing` is the library that suits this
    CPU best, if it was not built. `launches`: why those of a GPU's kernels are slow.
    """
    own = arithmetic.processor
    if own is None:
        return
    found = libraries(own.device)
    if not found:
        yield NO_KERNELS if own.device == CPU else NO_TRITON
    elif own.build != found[0]:
        yield f"{SWITCH}={own.build} asks for less than this processor can do ({found[0]}); unset it"
    elif own.device == CPU and (better := missing()) is not None:
        yield (
            f"the kernels here were built for another processor ({own.build}), and those for this one ({better}) are faster; "
            "in the checkout, `pip install -e .` builds them"
        )
    if own.build == TRITON and (why := launches()) is not None:
        yield f"{why}, so that each launch takes several times as long; install a Triton from 3.6 to 3.9"
    if own.device != CPU and arithmetic.dtype == BF16 and BF16 not in own.instructions:
        yield f"a GPU here has no instructions for products of {BF16}; with --dtype {FP16} they are several times as fast"
    if (own.device, own.build) == (CPU, TORCH) and arithmetic.plan.compute == INT8:
        yield f"--compute {INT8} is slower than {EXACT} products where there are no kernels in C; leave it out"


def compute_reason(first: BlockPlan, machine: Machine) -> Iterator[str]:
    """The reason that products are exact, if the machine's profile says that rounded ones would be much faster. Where they are
    rounded, that exact ones would be faster."""
    plan = first.plan
    other = EXACT if plan.compute == INT8 else INT8
    if not first.spec.can_compute(other):
        return
    changed = replace(first, plan=replace(plan, compute=other), spec=replace(first.spec, product=PRODUCTS[other]))
    own, its = (_seconds(one, machine) for one in (first, changed))
    if own < WORTH_SAYING[other] * its:
        return
    gain = f"would be {own / its:.1f} times as fast, says the profile of {machine.name}"
    if other == INT8:
        yield f"products are exact; --compute {INT8} {gain}; it rounds activations to 8 bits"
    else:
        yield f"products are in 8 bits; exact ones {gain}; leave --compute {INT8} out"


def buffers_reason(planned: WorkloadPlan, machine: Machine, limits: MemoryLimits) -> Iterator[str]:
    """The reason that the lanes of a plan that was given wait for each other, if the machine's profile says that more buffers
    would mend it, and there is room for them."""
    first = planned.blocks.first
    is_streamed = any(map(first.schedule.traffic.moves_weights, range(len(first.spec.layers))))
    if planned.plan.buffers == 1 or planned.plan.has_own_buffers or not is_streamed:
        return
    own = best = _seconds(first, machine)
    enough = planned.plan.buffers
    for buffers in filter(enough.__lt__, BUFFERS):
        more = replace(planned, plan=replace(planned.plan, buffers=buffers))
        if not more.fits(limits) or (seconds := _seconds(more.blocks.first, machine)) > (1 - WORTH_BUFFERS) * best:
            break
        best, enough = seconds, buffers
    if own >= WORTH_MORE_BUFFERS * best:
        gain = f"would be {own / best:.1f} times as fast, says the profile of {machine.name}"
        yield f"the plan has {planned.plan.buffers} buffers, and lanes wait for them; --buffers {enough} {gain}"


def experts_reason(first: BlockPlan, is_talk: bool = False) -> Iterator[str]:
    """The reason that a step brings many experts for which no row asks: what is brought must be shared by enough rows, which a
    talk never has."""
    schedule, batches = first.schedule, first.block.batches
    brought = [layer for number, layer in enumerate(first.spec.layers) if schedule.traffic.moves_weights(number)]
    share = min((share for layer in brought for _, share in layer.products), default=1.0)
    together = sum(schedule.weight_batch(place) == 0 for place in range(len(batches)))  # batches of a pass over the weights
    rows = sum(batch.size for batch in batches[:together])
    if first.block.gen_len > 1 and asked_for(share, rows) < NEARLY_ALL:
        asks, least = "rows ask" if rows > 1 else "row asks", rows_asking(share)
        more = f"take {least} rows at once, which ask for {NEARLY_ALL:.0%}, or better several times as many, or"
        yield (
            f"{rows} {asks} for {asked_for(share, rows):.0%} of the experts of a layer, and a step brings these and others; "
            f"{'a talk has no other rows, so' if is_talk else more} keep all in memory"
        )


def unguessed_reason(first: BlockPlan) -> Iterator[str]:
    """The reason that no token is guessed where drafts are asked for."""
    if first.plan.draft == OFF or first.guesses_any:
        return
    if first.spec.state_layers and any(batch.lives_on for batch in first.block.batches):
        why, mending = "a talk keeps the states behind all that was said, and takes no token back", "leave it out"
    else:
        why, mending = "keys and values move, so that guesses would move more", "keep all KV in memory, or leave it out"
    yield f"--draft {first.plan.draft} guesses nothing: {why}; {mending}"


def unread_reason(first: BlockPlan) -> Iterator[str]:
    """The reason that no step keeps for later ones what it reads, where that is asked for."""
    if not first.plan.kv_options.kv_recall_reuse:
        return
    if not first.plan.policy.reuses_read:
        yield f"--kv-recall-reuse keeps nothing: --kv-recall {first.plan.policy.recall:g} reads all; give a smaller share"
    elif DISK not in first.schedule.traffic.kv.values():
        yield "--kv-recall-reuse keeps nothing: no KV is on disk, and only what is read there stays; leave it out"


def unrecorded_reason(unrecorded: Mapping[str, str]) -> Iterator[str]:
    """The reason that layers were not recorded, or not in steps with adapters."""
    refused = {layer: why for layer, why in unrecorded.items() if why != BY_ADAPTERS}
    if told := refused or unrecorded:
        layer, why = next(iter(told.items()))
        count = "one layer" if len(told) == 1 else f"{len(told)} layers"
        steps = "each step; please report it" if refused else "steps with adapters"
        yield f"{count} could not be recorded ({layer}: {why}), and Python made each call of {steps}"


def unchecked_reason(plan: Plan, site: Site) -> Iterator[str]:
    """The reason that a GPU launches call by call what it could replay, if nothing but a check is missing."""
    if site.accelerator and not plan.may_capture(site.graph_bytes) and plan.graphs == AUTO and plan.may_capture(0):
        outlived = outlived_check(site.processor.device)
        yield (
            f"graphs would replay decode steps, but {outlived or 'no check has found that they hold on this GPU'}; in a "
            f"checkout, `scripts/gpu_check OUT_FOLDER --only contract graphs` {'renews' if outlived else 'checks'} it, and "
            "--graphs on takes them unchecked"
        )


def one_worker_reason() -> str:
    """The reason in a single worker on this machine."""
    return "one worker here does what this process does without --ray, and has to start first; leave it out, or give --workers"


def small_job_reason(workers: int, start_seconds: float, run_seconds: float) -> str | None:
    """The reason that workers on this machine took longer than one process would have. That does in the time of each worker at
    least as much as one of them, and loads the model as they do, but nothing has to start before."""
    if workers < 2 or (workers - 1) * run_seconds >= start_seconds:
        return None
    took = f"Ray took {start_seconds:.1f} s to start, and {workers} workers {run_seconds:.1f} s for the requests"
    return f"{took}; without --ray one process has so few sooner"


def _seconds(planned: BlockPlan, machine: Machine) -> float:
    predicted = BlockPrediction.of(planned, machine, with_fewer_blocks(planned))
    return predicted.prefill_seconds + predicted.decode_seconds
