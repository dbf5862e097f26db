"""Prediction of a running block: its passes over the weights as they follow from which row has a seat in which pass.

A block may have tens of thousands of passes, and no two are alike. So it is cut into stretches. In each a few passes in a row
are simulated task by task, which tells how much longer passes take than the busiest lane works in them; how long that works is
added up over many passes of the stretch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import NamedTuple

from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.pricing import SHARED_DISK, SHARED_MEMORY, Pricing
from h2o_flexgen.planning.seating import Seating
from h2o_flexgen.planning.some_steps import simulated, step_seconds
from h2o_flexgen.schedule.trace import Trace

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
        longer = sum(seconds[number] for number in stretch.simulated) / sum(
            max(bounds[number].values()) for number in stretch.simulated
        )
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
