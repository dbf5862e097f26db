"""What is predicted of a run, beside what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from h2o_flexgen.cli.report.entry import Entry, document_of, entry, noted
from h2o_flexgen.cli.report.plan_report import NAMES
from h2o_flexgen.cli.terminal import page_width, table
from h2o_flexgen.core.site import HOST, TIERS
from h2o_flexgen.core.units import format_bytes
from h2o_flexgen.engine.stats import Stats
from h2o_flexgen.planning.memory_limits import MemoryLimits
from h2o_flexgen.planning.predict import Prediction


@dataclass(frozen=True)
class Predicted:
    """Seconds, lanes, and what each tier holds; in JSON under the names of a run's own figures."""

    prediction: Prediction
    machine: str  # the machine that the prediction is for
    limits: MemoryLimits

    @property
    def peak_bytes(self) -> dict[str, int]:
        """Peak bytes per tier, with what the process holds by itself."""
        base = {tier: self.limits.host_base if tier == HOST else 0 for tier in TIERS}
        return {tier: nbytes + base[tier] for tier, nbytes in self.prediction.peak_bytes.items()}

    def entries(self) -> Iterator[Entry]:
        """The line shown before the run, and the values of its document."""
        one = self.prediction
        yield noted(machine=self.machine)
        yield entry(
            "predicted",
            f"prefill {one.prefill_seconds:.3g} s, {one.step_seconds:.3g} s a step, "
            f"{one.tokens_per_second:.3g} tokens/s; {one.busiest_lane} is busiest",
            prefill_seconds=round(one.prefill_seconds, 6),
            decode_seconds=round(one.decode_seconds, 6),
            total_seconds=round(one.total_seconds, 6),
            tokens_per_second=round(one.tokens_per_second, 3),
            step_seconds_mean=round(one.step_seconds, 6),
        )
        yield noted(busy_seconds={lane: round(seconds, 6) for lane, seconds in one.lane_seconds.items()})
        yield noted(peak_bytes=self.peak_bytes)

    def as_json(self) -> dict[str, object]:
        return document_of(self.entries())

    def beside(self, stats: Stats) -> list[str]:
        """A table of what was predicted and what was measured."""
        one, steps = self.prediction, len(stats.step_seconds)
        rows = [["", "predicted", "measured", "predicted / measured"]]
        rows.append(_seconds("prefill", one.prefill_seconds, stats.prefill_seconds))
        if steps:
            rows.append(_seconds("a decode step, mean", one.step_seconds, stats.decode_seconds / steps))
        rows.append(_seconds("all", one.total_seconds, stats.total_seconds))
        for lane in dict.fromkeys([*one.lane_seconds, *stats.busy_seconds]):
            rows.append(_seconds(f"{lane}, busy", one.lane_seconds.get(lane, 0.0), stats.busy_seconds.get(lane, 0.0)))
        for tier, nbytes in self.peak_bytes.items():
            held = stats.peak_bytes[tier]
            if nbytes or held:
                rows.append([f"peak on {NAMES[tier]}", format_bytes(nbytes), format_bytes(held), _ratio(nbytes, held)])
        return table(rows, page_width())


def _seconds(name: str, predicted: float, measured: float) -> list[str]:
    return [name, f"{predicted:.3g} s", f"{measured:.3g} s", _ratio(predicted, measured)]


def _ratio(predicted: float, measured: float) -> str:
    return f"{predicted / measured:.2f}" if measured else ""
