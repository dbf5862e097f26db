"""A comparison on a GPU that is made smaller, beside Accelerate, DeepSpeed and FlexGen, and what link and memory allow."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from benchmarks.comparison.by_rows import ReportByRows
from benchmarks.comparison.report import Entry, Report

BESIDE = ("accelerate", "deepspeed", "flexgen")  # systems; of those that take part in several ways, the best counts
EXACTLY = "exactly"
OF_LINK = (
    "the longest of three times: weights of as many bits that the GPU has no room for come over its link; all of them are read "
    "from its memory; all products are made. All rates are measured, and KV is not counted. Link busy: what this engine's plan "
    "moves to the GPU in a step, KV too, over the link's rate"
)


@dataclass(frozen=True)
class ReportOnGpu(Report):
    kind: ClassVar[str] = "compare on a gpu"
    columns: ClassVar[tuple[str, ...]] = (
        *("system", "version", "computes"),
        *("rows", "prefill s", "step s", "tokens/s", "peak GPU GB", "link busy"),
        *(f"times {name}" for name in BESIDE),
        *("ceiling tokens/s", "of ceiling"),
    )
    ceiling: ClassVar[str] = OF_LINK

    @property
    def name(self) -> str:
        return f"{gpu_slug(self)}-{super().name}"

    @property
    def title(self) -> str:
        return f"{super().title}, {gpu_words(self)}"

    def cells(self, entry: Entry) -> tuple[str, ...]:
        best = entry.best
        return (
            entry.name + ("" if best.is_whole else " *"),
            entry.version,
            entry.computes,
            str(best.rows),
            f"{best.prefill_seconds:.1f}",
            f"{best.step_seconds:.2f}",
            f"{best.tokens_per_s:.3g}",
            f"{best.peak_device_bytes / 1e9:.2f}",
            link_busy(self, entry),
            *(self.times(entry, name) for name in BESIDE),
            f"{entry.ceiling:.3g}",
            f"{entry.share:.0%}",
        )

    def times(self, entry: Entry, system: str) -> str:
        """How many times the rate of another system's best way that computes exactly."""
        rates = [
            one.best.tokens_per_s
            for one in self.entries
            if one.name.partition(",")[0] == system and one.computes.startswith(EXACTLY)
        ]
        return f"{entry.best.tokens_per_s / max(rates):.2f}" if rates else "-"


@dataclass(frozen=True)
class ReportByRowsOnGpu(ReportByRows):
    columns: ClassVar[tuple[str, ...]] = (*ReportByRows.columns, "peak GPU GB", "link busy")
    ceiling: ClassVar[str] = OF_LINK

    @property
    def name(self) -> str:
        return f"rows-{gpu_slug(self)}-{self.model.rpartition('/')[2]}-{self.load}".lower().replace("+", "-")

    @property
    def title(self) -> str:
        return f"{self.model} shapes by rows, {self.load} tokens, {gpu_words(self)}"

    def cells(self, entry: Entry) -> tuple[str, ...]:
        return (*super().cells(entry), f"{entry.best.peak_device_bytes / 1e9:.2f}", link_busy(self, entry))


def gpu_words(report: Report) -> str:
    held = "" if report.device_bytes is None else f" held to {report.device_bytes / 1e9:g} GB"
    return f"{report.before.machine['device']}{held}"


def gpu_slug(report: Report) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", gpu_words(report).lower().replace(" held to", "").replace(" gb", "gb"))


def link_busy(report: Report, entry: Entry) -> str:
    """The share of a step in which the link has something to do, at the least."""
    moved, rate = entry.best.link_bytes_per_step, report.before.at_best(report.after).link_per_s
    return f"{moved / rate / entry.best.step_seconds:.0%}" if moved and rate else "-"
