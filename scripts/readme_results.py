"""Writes the figures of the documents from the JSON files in benchmarks/results, between comments that mark their places.

README.md has a comparison and the picture of a timeline, docs/results.md one table of all comparisons, one of all mixtures and
one of all steps beside llama.cpp, docs/gpu.md one of all comparisons on a GPU, benchmarks/results/README.md the table of each
file.

    python scripts/readme_results.py            # rewrites the documents
    python scripts/readme_results.py --check    # says whether they are what the files say; exit status 1 if they are not

No figure comes into them by hand. A file is one table and must say where its figures are from (machine, command,
ceiling), or it is refused. What `benchmarks/overlap.py --output FILE` writes is taken as it is; any other file has this form:

    {
      "title": "OPT-6.7B shape, weights in host memory, the GPU held to 16 GB",
      "machine": "NVIDIA H200, 16 cores, 128 GB of memory, torch 2.11.0",
      "command": "scripts/gpu_check OUT_FOLDER",
      "ceiling": "the busiest lane alone: bytes over the bandwidth measured in the same run",
      "unit": "seconds",
      "higher_is_better": false,
      "rows": [{"name": "opt-6.7b", "measured": 20.0, "ceiling": 15.0}]
    }

A row may have "predicted" besides: it gets a column of its own. "notes", a text, may stand below the table. What
`compare.py`, `checkpoints.py`, `steps.py`, `planner.py`, `products.py`, `host.py`, `eviction.py --quality`,
`published.py --gpus`, `published_mixtures.py`, `published_data_wrangling.py`, `serving.py`, `lasting.py` and `moe.py` in
benchmarks write brings a table of its own. Besides, what `moe.py` writes is a line in the table of all mixtures, what
`compare.py` writes a column in that of all comparisons (on a GPU: lines in a table of their own), and what `steps.py` writes a
line for each number of rows in that of all steps.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS, TIMELINE, HEADLINE, MIXTURES = "results", "timeline", "headline", "mixtures"
COMPARISONS, STEPS, GPUS = "comparisons", "steps", "comparisons on a GPU"
DOCUMENTS = (
    *(ROOT / "README.md", ROOT / "docs" / "results.md", ROOT / "docs" / "gpu.md"),
    ROOT / "benchmarks" / "results" / "README.md",
)
ON_A_GPU = "compare on a gpu"  # the kind of a comparison there; this engine's lines of it are shown, with these of its columns
GPU_COLUMNS = ("rows", "tokens/s", "times accelerate", "times deepspeed", "times flexgen", "ceiling tokens/s", "of ceiling")
COMPARISON = "compare"  # the first file of this kind is the headline, with these of its columns
HEADLINE_COLUMNS = ("system", "computes", "rows", "tokens/s", "peak RSS GB", "of ceiling")
EXACTLY, BASE = "exactly, in 16 bits", "accelerate"  # the work that all systems can do, and whose rate the others are shown by
OWN, STAR, OF_STARS = "h2o_flexgen", " *", "With a star: "
LEFT_TO_THE_WHOLE_TABLE = ("skipped", "killed")
ELSEWHERE = ("published-t4", "held", "drafts")  # docs/cost-model.md has the first; a few figures: docs/results.md says them
Content = Mapping[str, object]


@dataclass(frozen=True)
class Row:
    name: str
    measured: float
    ceiling: float
    predicted: float | None = None


@dataclass(frozen=True)
class Result:
    """One file, which is one table."""

    title: str
    machine: str
    command: str
    ceiling: str
    unit: str
    rows: tuple[Row, ...] = ()
    cells: tuple[tuple[str, ...], ...] = ()  # instead of rows: a whole table, its head first
    higher_is_better: bool = False
    notes: str = ""
    timeline: str = ""
    kind: str = ""  # the benchmark that measured it
    headline: Mapping[str, str] = field(default_factory=dict)  # its line in a table of all of its kind, by column


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Writes the results in the documents from benchmarks/results/*.json.")
    parser.add_argument("--documents", type=Path, nargs="+", default=DOCUMENTS, help="each part has its place in one of them")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a document is not up to date")
    options = parser.parse_args(arguments)
    try:
        old = {document: document.read_text(encoding="utf-8") for document in options.documents}
        files = [file for file in sorted(options.results.glob("*.json")) if file.stem not in ELSEWHERE]
        new = rewritten(old, parts_of([read_result(file) for file in files]))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    behind = [document for document in old if new[document] != old[document]]
    if options.check:
        names = " and ".join(map(str, behind))
        print(f"{names}: not what the results say; run scripts/readme_results.py" if behind else "up to date")
        return int(bool(behind))
    for document in behind:
        write_whole(document, new[document])
    return 0


def write_whole(file: Path, text: str) -> None:
    """Writes through a neighbour, so that an interrupted run leaves the old file."""
    neighbour = file.with_name(f".{file.name}.{os.getpid()}")
    neighbour.write_text(text, encoding="utf-8")
    os.replace(neighbour, file)


# -- reading -----------------------------------------------------------------------------------------------------------


class File:
    """A JSON file, read with errors that name it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not JSON ({error}); run its benchmark again") from error
        if not isinstance(content, dict):
            raise ValueError(f"{path} holds no JSON object; see scripts/readme_results.py for the form")
        self.content: Content = content

    def text(self, key: str) -> str:
        value = self.content.get(key)
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{self.path} has no {key}; a figure without it does not go into a document")
        return value.strip().rstrip(".")

    def machine(self) -> str:
        """The machine in words, or as h2o_flexgen.profiling.measure describes it."""
        value = self.content.get("machine")
        if not isinstance(value, dict) or not {"cpu", "cores", "torch", "device"} <= value.keys():
            return self.text("machine")
        device = "" if value["device"] == "cpu" else f"{value['device']}, "
        return f"{device}{value['cpu']}, {value['cores']} cores, torch {value['torch']}"

    def row(self, name: str, values: object, measured: str, ceiling: str, predicted: str) -> Row:
        if not isinstance(values, dict):
            raise ValueError(f"{self.path} has the row {values!r}; see scripts/readme_results.py for the form")
        said = None if values.get(predicted) is None else self._positive(name, values, predicted)
        return Row(name, self._positive(name, values, measured), self._positive(name, values, ceiling), said)

    def _positive(self, name: str, row: Content, key: str) -> float:
        value = row.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise ValueError(f"{self.path}, row {name!r}: {key} is {value!r}; give a number above 0")
        return float(value)


def read_result(path: Path) -> Result:
    file = File(path)
    return READERS.get(str(file.content.get("benchmark", "")), _plain)(file)


def _plain(file: File) -> Result:
    rows, higher = file.content.get("rows"), file.content.get("higher_is_better", False)
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{file.path} has no rows; see scripts/readme_results.py for the form")
    if not isinstance(higher, bool):
        raise ValueError(f"{file.path}: higher_is_better is {higher!r}; give true or false")
    return Result(
        title=file.text("title"),
        machine=file.machine(),
        command=file.text("command"),
        ceiling=file.text("ceiling"),
        unit=file.text("unit"),
        rows=tuple(file.row(_name(file, row), row, "measured", "ceiling", "predicted") for row in rows),
        higher_is_better=higher,
        notes=str(file.content.get("notes", "")),
    )


def _name(file: File, row: object) -> str:
    if not isinstance(row, dict) or not isinstance(row.get("name"), str):
        raise ValueError(f"{file.path} has the row {row!r}; every row needs a name")
    return str(row["name"])


def _overlap(file: File) -> Result:
    """The result of benchmarks/overlap.py: a row for each schedule."""
    schedules, shape = file.content.get("schedules"), file.content.get("workload")
    if not isinstance(schedules, dict) or not schedules or not isinstance(shape, dict):
        raise ValueError(f"{file.path} has no schedules or no workload; run benchmarks/overlap.py again")
    command, machine, ceiling = file.text("command"), file.machine(), file.text("ceiling")
    rows = tuple(
        file.row(name, row, "step_seconds", "bound_seconds", "predicted_step_seconds") for name, row in schedules.items()
    )
    percent = " ".join(f"{share:g}" for share in shape["percent"])
    return Result(
        title=f"One decode step of {shape['num_gpu_batches']} x {shape['gpu_batch_size']} rows, {file.text('model')} shapes in "
        f"{shape['dtype']}, `--percent {percent}`, {shape['prompt_len']} + {shape['gen_len']} tokens",
        machine=machine,
        command=command,
        ceiling=ceiling,
        unit="seconds",
        rows=rows,
        notes=_memory(file.content.get("budget_host_bytes"), schedules),
        timeline=_timeline(schedules),
    )


def _memory(budget: object, schedules: Mapping[str, Content]) -> str:
    peaks = {name: row["peak_host_bytes"] for name, row in schedules.items() if "peak_host_bytes" in row}
    if not peaks or budget is None:
        return ""
    held = ", ".join(f"{name} {float(str(peak)) / 1e9:.2f} GB" for name, peak in peaks.items())
    return f"Memory held at most: {held}; the limit is {float(str(budget)) / 1e9:.2f} GB."


def _timeline(schedules: Mapping[str, Content]) -> str:
    """The timeline of the first schedule's last run."""
    runs = next(iter(schedules.values())).get("runs")
    return str(runs[-1].get("timeline", "")) if isinstance(runs, list) and runs else ""


def _table_of_its_own(file: File) -> Result:
    """The result of a benchmark whose rows have columns of their own."""
    head, cells = file.content.get("columns"), file.content.get("cells")
    if not isinstance(head, list) or not isinstance(cells, list) or any(len(row) != len(head) for row in cells):
        raise ValueError(f"{file.path} has no columns or no cells that fill them; run its benchmark again")
    return Result(
        title=file.text("title"),
        machine=f"{file.machine()}; {file.text('date')}, commit {file.text('commit')}",
        command=file.text("command"),
        ceiling=file.text("ceiling"),
        unit=file.text("unit"),
        cells=tuple(tuple(map(str, row)) for row in [head, *cells]),
        notes=str(file.content.get("notes", "")),
        kind=file.text("benchmark"),
    )


def _with_headline(file: File) -> Result:
    headline = file.content.get("headline")
    if not isinstance(headline, dict) or not all(isinstance(text, str) for text in headline.values()):
        raise ValueError(f"{file.path} has no headline, texts by column; run its benchmark again")
    return replace(_table_of_its_own(file), headline=headline)


READERS: Mapping[str, Callable[[File], Result]] = {
    "overlap": _overlap,
    "compare": _table_of_its_own,
    "compare by rows": _table_of_its_own,
    ON_A_GPU: _table_of_its_own,
    "products": _table_of_its_own,
    "checkpoints": _table_of_its_own,
    STEPS: _table_of_its_own,
    "planner": _table_of_its_own,
    "host": _table_of_its_own,
    "published on gpus": _table_of_its_own,
    "published mixtures": _table_of_its_own,
    "published data wrangling": _table_of_its_own,
    "eviction and quality": _table_of_its_own,
    "serving": _table_of_its_own,
    "lasting": _table_of_its_own,
    "moe": _with_headline,
}


# -- writing -----------------------------------------------------------------------------------------------------------


def parts_of(results: Sequence[Result]) -> dict[str, str]:
    """The text of each part that has results."""
    parts = {RESULTS: "\n".join(map(_table, results)) if results else "Nothing has been measured yet.\n"}
    if (drawn := next((result for result in results if result.timeline), None)) is not None:
        parts[TIMELINE] = f"```\n{drawn.timeline}\n```\n\n{drawn.title}; `{drawn.command}`.\n"
    if (first := next((result for result in results if result.kind == COMPARISON), None)) is not None:
        parts[HEADLINE] = _headline(first)
        parts[COMPARISONS] = _comparisons([result for result in results if result.kind == COMPARISON])
    if compared := [result for result in results if result.kind == ON_A_GPU]:
        parts[GPUS] = _on_gpus(compared)
    if headlines := [result.headline for result in results if result.headline]:
        parts[MIXTURES] = "\n".join(_lines([[*headlines[0]], *([*one.values()] for one in headlines)])) + "\n"
    if measured := [result for result in results if result.kind == STEPS]:
        parts[STEPS] = _steps(measured)
    return parts


def _steps(results: Sequence[Result]) -> str:
    """A line for each file and number of rows: the steps of each system in tokens/s, beside llama.cpp and the limit."""
    systems = list(dict.fromkeys(row[1] for result in results for row in result.cells[1:]))
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for result in results:
        file, instructions = result.title.partition(", ")[0], result.title.partition("(")[2]
        for rows, system, *_, rate, share, times in result.cells[1:]:
            lines.setdefault((f"{file} ({instructions}", rows), {})[system] = f"{rate} ({times} x, {share})"
    cells = [[*line, *(found.get(system, "") for system in systems)] for line, found in lines.items()]
    return "\n".join(_lines([["file and instructions", "rows", *systems], *cells])) + "\n"


def _headline(result: Result) -> str:
    """Two tables of a comparison: systems that do the same work, and then what doing less work adds."""
    head, *rows = result.cells
    column = {name: place for place, name in enumerate(head)}
    same = [row for row in rows if row[column["computes"]] == EXACTLY] if "computes" in column else rows
    less = [row for row in rows if row not in same]
    shown = [place for name, place in column.items() if name in HEADLINE_COLUMNS]
    names, rate = _names(rows, column.get("version")), column.get("tokens/s")
    base = next((float(row[rate]) for row in rows if rate is not None and names[row[0]] == BASE), None)

    def lines(title: str, chosen: Sequence[Sequence[str]]) -> list[str]:
        cells = [[names[row[0]], *(row[place] for place in shown[1:])] for row in chosen]
        top = [head[place] for place in shown]
        if base is not None and rate is not None:
            top.append(f"times {BASE}")
            cells = [[*line, f"{float(row[rate]) / base:.1f}"] for line, row in zip(cells, chosen, strict=True)]
        return [title, "", *_lines([top, *cells]), ""]

    text = [f"**{result.title}**", ""]
    text += lines("The same work:", same)
    text += lines("With less work: this engine's own means, fewer bits and a smaller KV cache:", less) if less else []
    text += [f"Machine: {result.machine}. Ceiling: {result.ceiling}. Command: `{result.command}`"]
    notes = result.notes.removeprefix(OF_STARS) if all(row[0].endswith(STAR) for row in rows) else result.notes
    told = [note for note in notes.split(". ") if note and not any(word in note for word in LEFT_TO_THE_WHOLE_TABLE)]
    text += ["", ". ".join(told).rstrip(".") + "."] if told else []
    return "\n".join(text) + "\n"


def _comparisons(results: Sequence[Result]) -> str:
    """A line for each system, those of the same work first: its tokens/s in every comparison, beside those of the base."""
    lines: dict[tuple[str, str], dict[int, list[str]]] = {}
    for place, result in enumerate(results):
        head, *rows = result.cells
        column = {name: number for number, name in enumerate(head)}
        names = _names(rows, column.get("version"))
        base = next((float(row[column["tokens/s"]]) for row in rows if names[row[0]] == BASE), None)
        for row in rows:
            rate = row[column["tokens/s"]]
            computes = row[column["computes"]] if "computes" in column else ""
            times = "" if base is None else f"{float(rate) / base:.1f}"
            lines.setdefault((names[row[0]], computes), {})[place] = [rate, times]
    top = ["system", "computes"]
    for result in results:
        top += [f"{result.title.split()[0]} {result.title.rpartition(', ')[2]}: tokens/s", f"times {BASE}"]
    same_work_first = sorted(lines.items(), key=lambda line: line[0][1] != EXACTLY)
    cells = []
    for system, found in same_work_first:
        cells.append([*system, *(cell for place in range(len(results)) for cell in found.get(place, ["", ""]))])
    return "\n".join(_lines([top, *cells])) + "\n"


def _on_gpus(results: Sequence[Result]) -> str:
    """A line for each way in which this engine took part, by comparison; all systems stand in the table of each file."""
    cells = []
    for result in results:
        head, *rows = result.cells
        column = {name: place for place, name in enumerate(head)}
        names = _names(rows, column["version"])
        own = [row for row in rows if names[row[0]].startswith(OWN)]
        cells += [[result.title, names[row[0]], *(row[column[name]] for name in GPU_COLUMNS)] for row in own]
    return "\n".join(_lines([["comparison", "way", *GPU_COLUMNS], *cells])) + "\n"


def _names(rows: Sequence[Sequence[str]], version: int | None) -> dict[str, str]:
    """The systems' names without stars, which all rows of a headline have or none; variants of this engine bear its name."""
    plain = {row[0]: row[0].removesuffix(STAR) for row in rows}
    own = {row[version] for row in rows if plain[row[0]] == OWN} if version is not None else set()
    variants = {row[0] for row in rows if version is not None and row[version] in own and plain[row[0]] != OWN}
    return {name: f"{OWN}, {text}" if name in variants else text for name, text in plain.items()}


def rewritten(documents: Mapping[Path, str], parts: Mapping[str, str]) -> dict[Path, str]:
    """Every document with its parts filled in; each part has one place."""
    new = dict(documents)
    for part, text in parts.items():
        document = next((one for one, old in documents.items() if marks(part)[0] in old), None)
        if document is None:
            raise ValueError(f"no document has a place for the {part}; one needs the lines {' and '.join(marks(part))}")
        new[document] = replace_part(new[document], part, text)
    return new


def _table(result: Result) -> str:
    lines = [f"**{result.title}**", "", *_lines(result.cells or _measured_cells(result))]
    lines += ["", f"Machine: {result.machine}. Ceiling: {result.ceiling}. Command: `{result.command}`"]
    lines += ["", result.notes] if result.notes else []
    return "\n".join(lines) + "\n"


def _measured_cells(result: Result) -> list[list[str]]:
    predicted = any(row.predicted is not None for row in result.rows)
    head = ["", f"measured ({result.unit})", f"ceiling ({result.unit})", "share of the ceiling"]
    head += [f"predicted ({result.unit})"] * predicted
    return [head, *(_cells(row, result.higher_is_better, predicted) for row in result.rows)]


def _cells(row: Row, higher_is_better: bool, with_predicted: bool) -> list[str]:
    share = row.measured / row.ceiling if higher_is_better else row.ceiling / row.measured
    cells = [row.name, _number(row.measured), _number(row.ceiling), f"{share:.0%}"]
    if with_predicted:
        cells.append("" if row.predicted is None else _number(row.predicted))
    return cells


def _lines(table: Sequence[Sequence[str]]) -> list[str]:
    """A table, its head first."""
    head, *rows = table
    return [_line(head), _line(["---", *["---:"] * (len(head) - 1)]), *map(_line, rows)]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _number(value: float) -> str:
    """Three significant digits, without an exponent where people expect none."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:#.3g}".rstrip(".")


def marks(part: str) -> tuple[str, str]:
    return f"<!-- {part}: written by scripts/readme_results.py -->", f"<!-- {part}: end -->"


def replace_part(document: str, part: str, text: str) -> str:
    start, end = marks(part)
    before, _, rest = document.partition(start)
    _, found_end, after = rest.partition(end)
    if not found_end:
        raise ValueError(f"the place for the {part} has no end; it needs the line {end}")
    return f"{before}{start}\n\n{text}\n{end}{after}"


if __name__ == "__main__":
    sys.exit(main())
