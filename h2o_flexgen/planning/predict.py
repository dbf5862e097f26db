"""Prediction: how long a workload takes under a plan on a machine, how busy each lane is, and what each tier holds.

A block is simulated task by task: its prompts and a few of its decode steps. Seconds of steps change slowly with the KV, so the
steps between are on a line. Every sampled step is simulated twice in a row, and the second counts, because it begins as any
other. Of many blocks with prompts of different lengths, a few represent all in the same way.

Of a model with thousands of layers, some blocks are simulated for all.

Where rows come and go, one block may have tens of thousands of passes, and no two are alike. So it is cut into stretches. In
each a few passes in a row are simulated task by task, which tells how much longer passes take than the busiest lane works in
them; how long that works is added up over many passes of the stretch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil
from random import Random
from typing import NamedTuple

from h2o_flexgen.core.site import TIERS, Site
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.pricing import SHARED_DISK, SHARED_MEMORY, Pricing
from h2o_flexgen.planning.seating import Seating
from h2o_flexgen.planning.workload_plan import WorkloadPlan
from h2o_flexgen.schedule.ops import Key, Op, Task
from h2o_flexgen.schedule.schedule import Schedule
from h2o_flexgen.schedule.simulate import simulate
from h2o_flexgen.schedule.trace import Trace


def simulated(pricing: Pricing, steps: Sequence[int]) -> Trace:
    schedule = of_so_many_steps(pricing.schedule, len(steps))
    tasks, priced = schedule.tasks(), _Priced(pricing, steps)
    return simulate(tasks, priced.seconds, schedule.ahead, lanes=schedule.traffic.lanes, latency=priced.latency)


def of_so_many_steps(schedule: Schedule, steps: int) -> Schedule:
    return replace(schedule, traffic=replace(schedule.traffic, steps=steps))


def step_seconds(trace: Trace, schedule: Schedule) -> list[float]:
    """Seconds of each step, from one head to the next, whatever the order of the schedule."""
    spent: dict[int, float] = {}
    clock, head = 0.0, schedule.traffic.layers - 1
    for span in sorted(trace.spans, key=lambda span: span.end):
        if span.key.op is Op.COMPUTE and span.key.layer == head:
            spent[span.key.step] = spent.get(span.key.step, 0.0) + span.end - clock
            clock = span.end
    return [spent[step] for step in sorted(spent)]


class _Priced:
    """The seconds and the latency of a task in a step that represents another one."""

    def __init__(self, pricing: Pricing, steps: Sequence[int]) -> None:
        self._pricing, self._steps = pricing, steps
        self._stretches = {step: pricing.stretches(step) for step in set(steps)}

    def seconds(self, task: Task) -> float:
        op, at, layer, batch, _ = task
        step = self._steps[at]
        return self._stretches[step][op] * self._pricing.seconds(Key(op, step, layer, batch))

    def latency(self, task: Task) -> float:
        return self._stretches[self._steps[task.step]][task.op] * self._pricing.latency(task.op)


ALL_PASSES = 40  # a block of no more passes is simulated whole
STRETCHES, IN_A_ROW = 8, 4  # stretches of a longer one after its first passes, and the passes that are simulated in each
TYPICAL_PARTS, TYPICAL_OF = 3, 9  # parts of a block that have typical passes, and how many of each such a one is chosen from
WEIGHED, WEIGHED_ROWS = 192, 40_000  # most passes for which lanes are added up; and most rows in all of these


class Stretch(NamedTuple):
    passes: range
    simulated: range  # some of them, in a row


@dataclass
class RunningPrediction:
    """Seconds of a running block."""

    trace: Trace  # the simulated passes
    prefill_seconds: float = 0.0  # of passes that read prompts
    decode_seconds: float = 0.0  # of all others
    decode_passes: float = 0.0
    lane_seconds: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, planned: BlockPlan, machine: Machine) -> RunningPrediction:
        pricing = Pricing(planned, machine)
        each = stretches(pricing.cost.passes)
        steps = list(_steps(each))
        trace = simulated(pricing, steps)
        seconds = dict(zip(steps[:-1], step_seconds(trace, planned.schedule)))
        found, rows = cls(trace), planned.block.num_rows
        for stretch in each:
            found._add(stretch, pricing, seconds, min(WEIGHED, max(ALL_PASSES, WEIGHED_ROWS // rows)) // len(each))
        return found

    def _add(self, stretch: Stretch, pricing: Pricing, seconds: Mapping[int, float], weighed: int) -> None:
        """Adds a stretch. Passes that read prompts are weighed separately, as they are of another kind."""
        bounds = {number: pricing.bounds(number) for number in {*stretch.simulated, *_some(stretch.passes, weighed)}}
        least = sum(max(bounds[number].values()) for number in stretch.simulated)
        longer = _ratio(sum(seconds[number] for number in stretch.simulated), least)
        reading = pricing.cost.seating.reading
        for reads in (True, False):
            passes = [number for number in stretch.passes if (number in reading) == reads]
            known = [bounds[number] for number in bounds if (number in reading) == reads]
            if not passes:
                continue
            self._add_alike(reads, len(passes), longer, known or list(bounds.values()))

    def _add_alike(self, reads: bool, passes: int, longer: float, known: Sequence[Mapping[str, float]]) -> None:
        share = passes / len(known)
        seconds = share * longer * sum(max(one.values()) for one in known)
        if reads:
            self.prefill_seconds += seconds
        else:
            self.decode_seconds += seconds
            self.decode_passes += passes
        for one in known:
            for lane in one.keys() - {SHARED_DISK, SHARED_MEMORY}:
                self.lane_seconds[lane] += share * one[lane]  # type: ignore[assignment]


def stretches(passes: int) -> list[Stretch]:
    """The stretches of a block of so many passes. The first passes are their own: all seats are taken in them."""
    if passes <= ALL_PASSES:
        return [Stretch(range(passes), range(passes))]
    cuts = [IN_A_ROW + place * (passes - IN_A_ROW) // STRETCHES for place in range(STRETCHES + 1)]
    found = [Stretch(range(IN_A_ROW), range(IN_A_ROW))]
    for start, end in pairwise(cuts):
        first = (start + end - IN_A_ROW) // 2
        found.append(Stretch(range(start, end), range(first, first + IN_A_ROW)))
    return found


def typical_passes(seating: Seating) -> dict[int, float]:
    """Some passes that represent all, and how many each represents: the first, and of each part of the block one that reads
    prompts and one that does not, with a middling number of tokens."""
    found = {0: 1.0}
    cuts = [1 + place * (seating.passes - 1) // TYPICAL_PARTS for place in range(TYPICAL_PARTS + 1)]
    for start, end in pairwise(cuts):
        for reads in (True, False):
            passes = [number for number in range(start, end) if (number in seating.reading) == reads]
            if passes:
                some = sorted(passes[:: -(-len(passes) // TYPICAL_OF)], key=seating.tokens_at)
                found[some[len(some) // 2]] = float(len(passes))
    return found


def _steps(each: Sequence[Stretch]) -> Iterator[int]:
    """The passes to simulate. Before each series of them comes the pass before, so that the first begins as any other.
    After the last comes its own repetition, so that it ends as any other."""
    for stretch in each:
        yield from range(max(0, stretch.simulated.start - 1), stretch.simulated.stop)
    yield each[-1].simulated[-1]


def _some(passes: range, count: int) -> Iterator[int]:
    """So many of the passes: one out of each of equal parts, but at no fixed distance, since rows may come at one."""
    random = Random(len(passes))
    if len(passes) <= count:
        yield from passes
        return
    for place in range(count):
        yield random.choice(passes[place * len(passes) // count : (place + 1) * len(passes) // count])


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
        one = BlockPrediction.of(block, machine, with_fewer_blocks(block))
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
    def of(cls, planned: BlockPlan, machine: Machine, part: BlockPlan | None = None) -> BlockPrediction:
        """`part`: the same with fewer blocks of the model, which are simulated for all. That tells how much longer steps take
        than what bounds them."""
        if planned.block.is_running:
            return _of_running(planned, machine, part)
        pricing, gen_len = Pricing(planned, machine, averaged=True), planned.block.gen_len
        of_part = pricing if part is None else Pricing(part, machine, averaged=True)
        samples = sampled_steps(planned)
        exact = samples == list(range(1, gen_len))
        # one step more after the last, which has nothing to store and so is unlike the others
        steps = [0, *samples] if exact else [0, *(step for sample in samples for step in (sample, sample)), samples[-1]]
        trace = simulated(of_part, steps)
        seconds = step_seconds(trace, of_part.schedule)
        found = [seconds[0], *(seconds[1:] if exact else seconds[2:-1:2])]
        prefill, *sampled = (one * _times_as_long(pricing, of_part, step) for step, one in zip([0, *samples], found))
        lanes = [pricing.lane_seconds(step) for step in samples]
        prompts = pricing.lane_seconds(0)
        busy = {
            lane: prompts.get(lane, 0.0) + sum_of_steps(samples, [one.get(lane, 0.0) for one in lanes])
            for lane in dict.fromkeys(lane for one in (prompts, *lanes) for lane in one)
        }
        return cls(prefill, sum_of_steps(samples, sampled), gen_len - 1, busy, trace)


def _of_running(planned: BlockPlan, machine: Machine, part: BlockPlan | None) -> BlockPrediction:
    found = RunningPrediction.of(part or planned, machine)
    longer = 1.0
    if part is not None:
        pricing = Pricing(planned, machine)
        of_part = Pricing(part, machine, known_seating=pricing.cost.seating)
        typical = typical_passes(pricing.cost.seating).items()
        whole, own = (sum(count * each.least_seconds(step) for step, count in typical) for each in (pricing, of_part))
        longer = _ratio(whole, own)
    lanes = {lane: longer * seconds for lane, seconds in found.lane_seconds.items()}
    seconds = longer * found.prefill_seconds, longer * found.decode_seconds
    return BlockPrediction(*seconds, found.decode_passes, lanes, found.trace)


MOST_VISITS, SIMULATED_VISITS = 8192, 1024  # of a step that is simulated as it is, and of one for which some blocks are


def with_fewer_blocks(planned: BlockPlan) -> BlockPlan | None:
    """The same with some of the model's blocks, of each kind its share; None where it has few layers. With slices of experts
    a model has thousands, and a step that passes hundreds of them is like one that passes all."""
    spec, traffic = planned.spec, planned.schedule.traffic
    visits = traffic.layers * traffic.batches
    if visits <= MOST_VISITS or traffic.lanes.devices > 1:
        return None
    kinds = planned.kv.alike_blocks(spec.block_numbers)
    kept = [number for alike in kinds for number in _spread_out(alike, ceil(len(alike) * SIMULATED_VISITS / visits))]
    if len(kept) == spec.num_blocks:
        return None
    held = planned.kv.only(spec.only_blocks(*sorted(kept)), lambda layer: spec.layers[layer].block in kept)
    site = Site(traffic.accelerator, adapters=planned.adapters)
    return BlockPlan.of(held.spec, planned.plan, planned.block, site, levels=held.levels)


def _spread_out(numbers: Sequence[int], count: int) -> Iterator[int]:
    return (numbers[place * len(numbers) // count] for place in range(count))


def _times_as_long(whole: Pricing, part: Pricing, step: int) -> float:
    """How many times as long as for a part of the model a step takes for all of it."""
    return 1.0 if part is whole else _ratio(whole.least_seconds(step), part.least_seconds(step))


def _ratio(one: float, other: float) -> float:
    """How many times as long one takes as the other; 1 where that takes no time, for then nothing of its kind does."""
    return one / other if other else 1.0


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
