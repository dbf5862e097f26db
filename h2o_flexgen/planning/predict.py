"""Prediction: how long a workload takes under a plan on a machine, how busy each lane is, and what each tier holds.

A block is simulated task by task, its prompts and a few of its decode steps: their seconds change slowly, with the KV, so that
what lies between is on a line. Every sampled step is simulated twice in a row, and the second counts: it begins as any other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from h2o_flexgen.planning.footprint import Footprint, footprint
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.plan import TIERS
from h2o_flexgen.planning.planned import PlannedBlock
from h2o_flexgen.planning.pricing import Pricing
from h2o_flexgen.planning.schedule import COMPUTE_LANE, SCHEDULES, Key, Op, Schedule, Task
from h2o_flexgen.planning.simulate import simulate
from h2o_flexgen.planning.trace import Trace

ALL_STEPS = 6  # of a decode this short every step is simulated
PERIODIC = (Op.READ_KV, Op.WRITE_KV)  # a journal makes them longer from step to step, until it starts anew


@dataclass(frozen=True)
class Prediction:
    num_prompts: int
    generated_tokens: int
    prefill_seconds: float
    decode_seconds: float
    step_seconds: float  # of a decode step: the mean
    lane_seconds: Mapping[str, float]  # that each lane works, of all blocks
    peak_bytes: Mapping[str, int]  # per tier, beside what the process holds by itself

    @property
    def total_seconds(self) -> float:
        return self.prefill_seconds + self.decode_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.generated_tokens / self.total_seconds

    @property
    def busiest_lane(self) -> str:
        return max(self.lane_seconds, key=lambda lane: self.lane_seconds[lane])


def predict(
    blocks: Iterable[PlannedBlock], machine: Machine, kernel_threads: int = 0, writes_weights: bool = False
) -> Prediction:
    """Of blocks that run one after the other."""
    alike: dict[object, list[PlannedBlock]] = defaultdict(list)
    for block in blocks:
        alike[block.shape].append(block)
    prompts = tokens = steps = 0
    prefill = decode = 0.0
    lanes: dict[str, float] = {}
    held = Footprint({})
    for same in alike.values():
        one, count = BlockPrediction.of(same[0], machine), len(same)
        prompts += count * same[0].block.num_rows
        tokens += count * same[0].block.num_rows * same[0].block.gen_len
        steps += count * (same[0].block.gen_len - 1)
        prefill += count * one.prefill_seconds
        decode += count * one.decode_seconds
        for lane, seconds in one.lane_seconds.items():
            lanes[lane] = lanes.get(lane, 0.0) + count * seconds
        held |= footprint(same[0], writes_weights, kernel_threads)
    peaks = {tier: held.total(tier) for tier in TIERS}
    return Prediction(prompts, tokens, prefill, decode, decode / steps if steps else 0.0, lanes, peaks)


@dataclass(frozen=True)
class BlockPrediction:
    prefill_seconds: float
    decode_seconds: float
    lane_seconds: Mapping[str, float]
    trace: Trace  # of the steps that were simulated

    @classmethod
    def of(cls, planned: PlannedBlock, machine: Machine) -> BlockPrediction:
        pricing, gen_len = Pricing(planned, machine), planned.block.gen_len
        samples = sampled_steps(planned)
        exact = samples == list(range(1, gen_len))
        # one step more behind the last: it has nothing to store, and so is not like the others
        steps = [0, *samples] if exact else [0, *(step for sample in samples for step in (sample, sample)), samples[-1]]
        schedule = planned.schedule if exact else _of_so_many_steps(planned.schedule, len(steps))
        trace = simulate(schedule.tasks(), _seconds_of(pricing, steps), schedule.ahead)
        seconds = step_seconds(trace, schedule)
        sampled = seconds[1:] if exact else seconds[2:-1:2]
        lanes = [mean_lane_seconds(pricing, step) for step in samples]
        prompts = pricing.lane_seconds(0)
        busy = {
            lane: prompts.get(lane, 0.0) + sum_of_steps(samples, [one.get(lane, 0.0) for one in lanes])
            for lane in dict.fromkeys(lane for one in (prompts, *lanes) for lane in one)
        }
        return cls(seconds[0], sum_of_steps(samples, sampled), busy, trace)


def sampled_steps(planned: PlannedBlock) -> list[int]:
    """The decode steps that are simulated: the first and the last, those in which the KV of rows stops growing, and the one in
    the middle of the longest stretch between these: lanes may take turns in being the busiest there."""
    last = planned.block.gen_len - 1
    if last <= ALL_STEPS:
        return list(range(1, last + 1))
    full = [slots.first_evicting_step for slots in planned.slots]
    samples = sorted({1, last, *(step for step in (min(full), max(full)) if 1 < step < last)})
    before, behind = max(pairwise(samples), key=lambda pair: pair[1] - pair[0])
    return sorted({*samples, (before + behind) // 2})


def sum_of_steps(samples: Sequence[int], seconds: Sequence[float]) -> float:
    """Of all steps from the first sample to the last, those between samples on a line."""
    if not samples:
        return 0.0
    total = seconds[0]
    for (step, one), (later, other) in pairwise(zip(samples, seconds)):
        count = later - step
        total += count * one + (other - one) * (count + 1) / 2
    return total


def step_seconds(trace: Trace, schedule: Schedule) -> list[float]:
    """Of each step: the time since the head before is for the step of this one, in whatever order a schedule visits."""
    spent, clock = [0.0] * schedule.moves.steps, 0.0
    head = schedule.moves.layers - 1
    for span in sorted(trace.spans, key=lambda span: span.end):
        if span.lane == COMPUTE_LANE and span.key.layer == head:
            spent[span.key.step] += span.end - clock
            clock = span.end
    return spent


def _of_so_many_steps(schedule: Schedule, steps: int) -> Schedule:
    return SCHEDULES[schedule.name](replace(schedule.moves, steps=steps))


class _seconds_of:
    """The seconds of a task whose step stands for another one."""

    def __init__(self, pricing: Pricing, steps: Sequence[int]) -> None:
        self._pricing, self._steps = pricing, steps
        self._stretches = {step: pricing.stretches(step) for step in set(steps)}

    def __call__(self, task: Task) -> float:
        op, at, layer, batch, _ = task
        step = self._steps[at]
        return self._stretches[step][op] * _mean_seconds(self._pricing, Key(op, step, layer, batch))


def _mean_seconds(pricing: Pricing, task: Key) -> float:
    """Over the steps that a journal lasts, where there is one."""
    window = pricing.planned.slots[task.batch].journal_capacity if task.op in PERIODIC else 0
    if not window or not task.step:
        return pricing.seconds(task)
    first = max(1, task.step - window // 2)
    steps = range(first, min(pricing.planned.block.gen_len - 1, first + window) + 1)
    return sum(pricing.seconds(task._replace(step=step)) for step in steps) / len(steps)


def mean_lane_seconds(pricing: Pricing, step: int) -> dict[str, float]:
    window = max((slots.journal_capacity for slots in pricing.planned.slots), default=0)
    first = max(1, step - window // 2)
    steps = range(first, min(pricing.planned.block.gen_len - 1, first + window) + 1)
    each = [pricing.lane_seconds(one) for one in steps]
    return {lane: sum(one.get(lane, 0.0) for one in each) / len(each) for lane in {lane for one in each for lane in one}}
