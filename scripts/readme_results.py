"""Writes the results in README.md from benchmarks/results/*.json, between two comments that mark their place.

    python scripts/readme_results.py            # rewrites README.md
    python scripts/readme_results.py --check    # says whether README.md is what the files say; exit status 1 if it is not

No figure comes into the README by hand. A file is one table and must say where its figures are from, or it is refused:

    {
      "title": "OPT-1.3B shape in bfloat16, all weights on disk: one decode step",
      "machine": "2 cores of an AMD EPYC (Zen 5), 24 GB, one virtio disk, torch 2.13.0",
      "command": "python benchmarks/overlap.py",
      "ceiling": "the busiest lane alone: bytes over the disk bandwidth measured in the same run",
      "unit": "seconds",
      "higher_is_better": false,
      "rows": [{"name": "zigzag", "measured": 1.31, "ceiling": 1.22}]
    }

A row may have "simulated" besides: it gets a column of its own. "notes", a text, may stand below the table. Other keys are the
benchmark's own and are left alone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
START = "<!-- results: written by scripts/readme_results.py -->"
END = "<!-- results: end -->"
TEXTS = ("title", "machine", "command", "ceiling", "unit")


@dataclass(frozen=True)
class Row:
    name: str
    measured: float
    ceiling: float
    simulated: float | None = None


@dataclass(frozen=True)
class Result:
    """One file, one table."""

    title: str
    machine: str
    command: str
    ceiling: str
    unit: str
    rows: tuple[Row, ...]
    higher_is_better: bool = False
    notes: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Writes the results in README.md from benchmarks/results/*.json.")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the README is not up to date")
    options = parser.parse_args(arguments)
    try:
        old = options.readme.read_text(encoding="utf-8")
        new = replace_part(old, render([read_result(file) for file in sorted(options.results.glob("*.json"))]))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    if options.check:
        print("up to date" if new == old else f"{options.readme} is not what the results say; run scripts/readme_results.py")
        return int(new != old)
    write_whole(options.readme, new)
    return 0


def write_whole(file: Path, text: str) -> None:
    """By way of a neighbour: an interrupted run leaves the old file."""
    neighbour = file.with_name(f".{file.name}.{os.getpid()}")
    neighbour.write_text(text, encoding="utf-8")
    os.replace(neighbour, file)


# -- reading -----------------------------------------------------------------------------------------------------------


def read_result(file: Path) -> Result:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}); run its benchmark again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no JSON object; see scripts/readme_results.py for the form")
    texts = {key: _text(file, content, key) for key in TEXTS}
    higher = content.get("higher_is_better", False)
    if not isinstance(higher, bool):
        raise ValueError(f"{file}: higher_is_better is {higher!r}; give true or false")
    rows = content.get("rows")
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{file} has no rows; see scripts/readme_results.py for the form")
    found = tuple(_read_row(file, row) for row in rows)
    return Result(**texts, rows=found, higher_is_better=higher, notes=str(content.get("notes", "")))


def _text(file: Path, content: Mapping[str, object], key: str) -> str:
    value = content.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{file} has no {key}; a figure without it does not go into the README")
    return value.strip().rstrip(".")


def _read_row(file: Path, row: object) -> Row:
    if not isinstance(row, dict) or not isinstance(row.get("name"), str):
        raise ValueError(f"{file} has the row {row!r}; every row needs a name")
    measured, ceiling = _positive(file, row, "measured"), _positive(file, row, "ceiling")
    return Row(row["name"], measured, ceiling, _positive(file, row, "simulated") if "simulated" in row else None)


def _positive(file: Path, row: Mapping[str, object], key: str) -> float:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ValueError(f"{file}, row {row['name']!r}: {key} is {value!r}; give a number above 0")
    return float(value)


# -- writing -----------------------------------------------------------------------------------------------------------


def render(results: Sequence[Result]) -> str:
    return "\n".join(map(_table, results)) if results else "Nothing has been measured yet.\n"


def _table(result: Result) -> str:
    simulated = any(row.simulated is not None for row in result.rows)
    head = ["", f"measured ({result.unit})", f"ceiling ({result.unit})", "share of the ceiling"]
    head += [f"simulated ({result.unit})"] * simulated
    lines = [f"**{result.title}**", "", _line(head), _line(["---", *["---:"] * (len(head) - 1)])]
    lines += [_line(_cells(row, result.higher_is_better, simulated)) for row in result.rows]
    lines += ["", f"Machine: {result.machine}. Ceiling: {result.ceiling}. Command: `{result.command}`"]
    lines += ["", result.notes] if result.notes else []
    return "\n".join(lines) + "\n"


def _cells(row: Row, higher_is_better: bool, with_simulated: bool) -> list[str]:
    share = row.measured / row.ceiling if higher_is_better else row.ceiling / row.measured
    cells = [row.name, _number(row.measured), _number(row.ceiling), f"{share:.0%}"]
    if with_simulated:
        cells.append("" if row.simulated is None else _number(row.simulated))
    return cells


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _number(value: float) -> str:
    """Three significant digits, and no exponent where people expect none."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:#.3g}".rstrip(".")


def replace_part(readme: str, part: str) -> str:
    before, start, rest = readme.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"the README has no place for results; it needs the lines {START!r} and {END!r}")
    return f"{before}{START}\n\n{part}\n{END}{after}"


if __name__ == "__main__":
    sys.exit(main())
