"""What was predicted of a run beside what was measured: seconds, what each lane did, and what each tier held."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from h2o_flexgen.cli.page import page_width, table
from h2o_flexgen.cli.plan_report import NAMES
from h2o_flexgen.core.tiers import HOST, TIERS
from h2o_flexgen.core.units import format_bytes
from h2o_flexgen.planning.budgets import Budgets
from h2o_flexgen.planning.predict import Prediction

if TYPE_CHECKING:
    from h2o_flexgen.engine.stats import Stats


@dataclass(frozen=True)
class Predicted:
    prediction: Prediction
    machine: str  # that it is a prediction for
    budgets: Budgets

    @property
    def peak_bytes(self) -> dict[str, int]:
        """With what the process holds by itself."""
        base = {tier: self.budgets.host_base if tier == HOST else 0 for tier in TIERS}
        return {tier: nbytes + base[tier] for tier, nbytes in self.prediction.peak_bytes.items()}

    def as_json(self) -> dict[str, object]:
        """Under the names that a run's own figures have."""
        one = self.prediction
        return {
            "machine": self.machine,
            "prefill_seconds": round(one.prefill_seconds, 6),
            "decode_seconds": round(one.decode_seconds, 6),
            "total_seconds": round(one.total_seconds, 6),
            "tokens_per_second": round(one.tokens_per_second, 3),
            "step_seconds_mean": round(one.step_seconds, 6),
            "busy_seconds": {lane: round(seconds, 6) for lane, seconds in one.lane_seconds.items()},
            "peak_bytes": self.peak_bytes,
        }

    def line(self) -> str:
        """Before the run."""
        one = self.prediction
        return (
            f"predicted prefill {one.prefill_seconds:.3g} s, {one.step_seconds:.3g} s a step, "
            f"{one.tokens_per_second:.3g} tokens/s; {one.busiest_lane} is busiest"
        )

    def lines(self, stats: Stats) -> Iterator[str]:
        """Beside what a run has left."""
        rows = [["", "predicted", "measured", "predicted / measured"]]
        one, steps = self.prediction, len(stats.step_seconds)
        rows.append(_seconds("prefill", one.prefill_seconds, stats.prefill_seconds))
        if steps:
            rows.append(_seconds("a decode step, mean", one.step_seconds, stats.decode_seconds / steps))
        rows.append(_seconds("all", one.total_seconds, stats.total_seconds))
        for lane in dict.fromkeys([*one.lane_seconds, *stats.busy_seconds]):
            rows.append(_seconds(f"{lane}, busy", one.lane_seconds.get(lane, 0.0), stats.busy_seconds.get(lane, 0.0)))
        for tier, nbytes in self.peak_bytes.items():
            if nbytes or stats.peak_bytes[tier]:
                ratio = _ratio(nbytes, stats.peak_bytes[tier])
                rows.append([f"peak on {NAMES[tier]}", format_bytes(nbytes), format_bytes(stats.peak_bytes[tier]), ratio])
        yield from table(rows, page_width())


def _seconds(name: str, predicted: float, measured: float) -> list[str]:
    return [name, f"{predicted:.3g} s", f"{measured:.3g} s", _ratio(predicted, measured)]


def _ratio(predicted: float, measured: float) -> str:
    return f"{predicted / measured:.2f}" if measured else ""
