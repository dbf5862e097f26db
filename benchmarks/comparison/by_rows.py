"""A comparison with given numbers of rows: prompts and steps apart, each beside the machine's limit and the first system."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from benchmarks.comparison.report import Entry, Report
from benchmarks.instructions import processor_slug


@dataclass(frozen=True)
class ReportByRows(Report):
    """An entry for each system and number of rows."""

    kind: ClassVar[str] = "compare by rows"
    columns: ClassVar[tuple[str, ...]] = (
        *("system", "version", "computes"),
        *("rows", "prompts tokens/s", "of limit", "times slower", "steps tokens/s", "of limit", "times slower", "peak RSS GB"),
    )
    ceiling: ClassVar[str] = (
        "weights of as many bits over the rate of reading memory, or operations over the rate of matrix products or the peak "
        "of arithmetic (of 8-bit integers where factors are rounded to int8), all measured; attention and KV are not counted"
    )

    @property
    def name(self) -> str:
        return f"rows-{self.model.rpartition('/')[2]}-{self.load}-{processor_slug()}".lower().replace("+", "-")

    @property
    def title(self) -> str:
        computed = self.before.machine.get("instructions", "")
        return f"{self.model} shapes by rows, {self.load} tokens ({computed})"

    def cells(self, entry: Entry) -> tuple[str, ...]:
        first = next((one for one in self.entries if one.name == self.reference and one.best.rows == entry.best.rows), None)
        cells = [entry.name + ("" if entry.best.is_whole else " *"), entry.version, entry.computes, str(entry.best.rows)]
        for name, limit in (("prompt_tokens_per_s", entry.prompt_limit), ("step_tokens_per_s", entry.step_limit)):
            own, beside = getattr(entry.best, name), None if first is None else getattr(first.best, name)
            cells += [f"{own:.3g}", f"{own / limit:.0%}", "-" if beside is None else f"{beside / own:.2f}"]
        return (*cells, f"{entry.best.peak_bytes / 1e9:.2f}")
