"""Where the seconds went: the time of each operation in prefill and in decode, from the trace of a run without overlap."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from h2o_flexgen.cli.page import page_width, table
from h2o_flexgen.schedule.ops import Op
from h2o_flexgen.schedule.trace import Trace

PHASES = ("prefill", "decode")


def breakdown_seconds(trace: Trace) -> dict[str, dict[str, float]]:
    """operation -> phase -> seconds."""
    seconds: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(PHASES, 0.0))
    for span in trace.spans:
        seconds[str(span.key.op)][PHASES[span.key.step > 0]] += span.end - span.start
    return {str(op): seconds[str(op)] for op in Op if str(op) in seconds}


def breakdown_lines(trace: Trace) -> Sequence[str]:
    rows = [["operation", *(f"{phase} s" for phase in PHASES)]]
    for op, phases in breakdown_seconds(trace).items():
        rows.append([op, *(f"{phases[phase]:.3f}" for phase in PHASES)])
    return table(rows, page_width())
