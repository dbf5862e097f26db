"""The lanes of a run beside their bounds: what each moved, how busy it was, and the least time that this machine needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.schedule.ops import COMPUTE_LANE

if TYPE_CHECKING:
    from h2o_flexgen.engine.stats import Stats


@dataclass(frozen=True)
class LaneReport:
    moved_bytes: int
    predicted_bytes: int  # of a run in which no row finishes early
    busy_share: float  # of the seconds from the first task to the last
    bound_seconds: float | None  # bytes over measured bandwidth, flops over measured rate; None where not measured


def lane_reports(
    stats: Stats, predicted: Mapping[str, int], flops: Mapping[int, float], seconds: float, machine: Machine | None, dtype: str
) -> dict[str, LaneReport]:
    """`flops`: by the rows of the product that they were done in, because the rate depends on these."""
    reports = {}
    for lane in dict.fromkeys((*predicted, *stats.moved_bytes)):
        moved = stats.moved_bytes.get(lane, 0)
        bound = None if machine is None else _bound(lane, moved, flops, machine, dtype)
        busy = min(1.0, stats.busy_seconds.get(lane, 0.0) / seconds) if seconds else 0.0
        reports[lane] = LaneReport(moved, predicted.get(lane, 0), round(busy, 4), None if bound is None else round(bound, 6))
    return reports


def _bound(lane: str, moved: int, flops: Mapping[int, float], machine: Machine, dtype: str) -> float:
    return compute_bound(flops, machine, dtype) if lane == COMPUTE_LANE else moved / machine.bandwidth(lane)


def compute_bound(flops: Mapping[int, float], machine: Machine, dtype: str) -> float:
    return sum(done / machine.flop_rate(dtype, rows) for rows, done in flops.items())
