"""Prediction: how long a workload takes under a plan on a machine, how busy each lane is, and what each tier holds.

A block is simulated task by task: its prompts and a few of its decode steps. Seconds of steps change slowly with the KV, so the
steps between are on a line. Every sampled step is simulated twice in a row, and the second counts, because it begins as any
other. Of many blocks with prompts of different lengths, a few represent all in the same way. Where rows come and go, the one
block is predicted by `predict_running`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from h2o_flexgen.core.site import TIERS
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.predict_running import RunningPrediction
from h2o_flexgen.planning.pricing import Pricing
from h2o_flexgen.planning.some_steps import simulated, step_seconds
from h2o_flexgen.planning.workload_plan import WorkloadPlan
from h2o_flexgen.schedule.trace import Trace

ALL_STEPS = 6  # every step of a decode this short is simulated
ALL_BLOCKS, SAMPLED_BLOCKS = 16, 12  # this many blocks that differ are all simulated; of more, only the second number


@dataclass(frozen=True)
class Prediction:
    num_prompts: int
    generated_tokens: int
    prefill_seconds: float  # where rows come and go, of all passes that read prompts
    decode_seconds: float
    step_seconds: float  # mean of a decode step; where rows come and go, of a pass that reads no prompt
    block_seconds: float  # from the first prompt to the last token of the block that takes longest
    lane_seconds: Mapping[str, float]  # seconds that each lane works, in all blocks
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


def predict(planned: WorkloadPlan, machine: Machine) -> Prediction:
    """Predicts blocks that run one after the other."""
    alike = planned.blocks.alike
    prefill = decode = steps = longest = 0.0
    lanes: dict[str, float] = {}
    for block, times in sampled_blocks(alike):
        one = BlockPrediction.of(block, machine)
        prefill += times * one.prefill_seconds
        decode += times * one.decode_seconds
        steps += times * one.decode_steps
        longest = max(longest, one.prefill_seconds + one.decode_seconds)
        for lane, seconds in one.lane_seconds.items():
            lanes[lane] = lanes.get(lane, 0.0) + times * seconds
    peaks = {tier: planned.footprint.total(tier) for tier in TIERS}
    counts = planned.workload.num_prompts, planned.workload.num_tokens
    return Prediction(*counts, prefill, decode, decode / steps if steps else 0.0, longest, lanes, peaks)


def sampled_blocks(counted: Sequence[tuple[BlockPlan, int]]) -> Iterator[tuple[BlockPlan, float]]:
    """The blocks that are simulated, and how often each counts, chosen from the distinct blocks and their numbers. A block
    between two samples counts as a part of either, in proportion to its tokens. The last has fewer rows than the others, so it
    and the one before represent no third one."""
    if len(counted) <= ALL_BLOCKS:
        yield from ((block, float(count)) for block, count in counted)
        return
    last = len(counted) - 1
    places = [place * (last - 1) // (SAMPLED_BLOCKS - 2) for place in range(SAMPLED_BLOCKS - 1)]
    times = dict.fromkeys([*places, last], 0.0)
    tokens = [sum(sum(batch.lengths) for batch in block.block.batches) for block, _ in counted]
    for before, behind in pairwise(times):
        for place in range(before, behind):
            share = (tokens[before] - tokens[place]) / (tokens[before] - tokens[behind])
            times[before] += (1 - share) * counted[place][1]
            times[behind] += share * counted[place][1]
    times[last] += counted[last][1]
    yield from ((counted[place][0], often) for place, often in times.items())


@dataclass(frozen=True)
class BlockPrediction:
    prefill_seconds: float
    decode_seconds: float
    decode_steps: float
    lane_seconds: Mapping[str, float]
    trace: Trace  # the simulated steps

    @classmethod
    def of(cls, planned: BlockPlan, machine: Machine) -> BlockPrediction:
        if planned.block.is_running:
            found = RunningPrediction.of(planned, machine)
            return cls(found.prefill_seconds, found.decode_seconds, found.decode_passes, found.lane_seconds, found.trace)
        pricing, gen_len = Pricing(planned, machine, averaged=True), planned.block.gen_len
        samples = sampled_steps(planned)
        exact = samples == list(range(1, gen_len))
        # one step more after the last, which has nothing to store and so is unlike the others
        steps = [0, *samples] if exact else [0, *(step for sample in samples for step in (sample, sample)), samples[-1]]
        trace = simulated(pricing, steps)
        seconds = step_seconds(trace, planned.schedule)
        sampled = seconds[1:] if exact else seconds[2:-1:2]
        lanes = [pricing.lane_seconds(step) for step in samples]
        prompts = pricing.lane_seconds(0)
        busy = {
            lane: prompts.get(lane, 0.0) + sum_of_steps(samples, [one.get(lane, 0.0) for one in lanes])
            for lane in dict.fromkeys(lane for one in (prompts, *lanes) for lane in one)
        }
        return cls(seconds[0], sum_of_steps(samples, sampled), gen_len - 1, busy, trace)


def sampled_steps(planned: BlockPlan) -> list[int]:
    """The decode steps that are simulated: the first and the last; those in which the KV of rows stops growing at a level, and
    the ones before, because evictions begin at once; and the middle of the longest stretch between these, since lanes may take
    turns in being the busiest there."""
    last = planned.block.gen_len - 1
    if last <= ALL_STEPS:
        return list(range(1, last + 1))
    full = [[occupancy.first_evicting_step for occupancy in level] for level in planned.kv.occupancies]
    around = (step for level in full for first in (min(level), max(level)) for step in (first - 1, first))
    samples = sorted({1, last, *(step for step in around if 1 < step < last)})
    before, behind = max(pairwise(samples), key=lambda pair: pair[1] - pair[0])
    return sorted({*samples, (before + behind) // 2})


def sum_of_steps(samples: Sequence[int], seconds: Sequence[float]) -> float:
    """The sum of all steps from the first sample to the last; steps between samples are on a line."""
    if not samples:
        return 0.0
    total = seconds[0]
    for (step, one), (later, other) in pairwise(zip(samples, seconds)):
        count = later - step
        total += count * one + (other - one) * (count + 1) / 2
    return total
