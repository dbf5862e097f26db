"""What was promised of memory and was not kept: a line for each tier on which a run held more than its limit."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from h2o_flexgen.cli.report.plan_report import NAMES
from h2o_flexgen.core.units import format_bytes
from h2o_flexgen.engine.stats import Peaks

MEMORY = "memory"  # the first word of each line


def say_broken(peaks: Peaks) -> None:
    """Says on stderr where a limit was exceeded. The exit status stays: what was computed is whole and right."""
    for line in broken_lines(peaks):
        print(f"{MEMORY}: {line}", file=sys.stderr, flush=True)


def broken_lines(peaks: Peaks) -> Iterator[str]:
    """Peaks are exact, as the system and the allocators count them: a byte more than the limit is too much."""
    for tier, over in peaks.over_budget_bytes.items():
        if over:
            peak = peaks.peak_bytes[tier]
            held = f"{format_bytes(peak)} of {NAMES[tier]} memory were held, and the limit was {format_bytes(peak - over)}"
            yield (
                f"{held}: {format_bytes(over)} more than promised. What was computed is right; "
                f"to hold less, give a limit that is smaller by as much, or a smaller batch"
            )
