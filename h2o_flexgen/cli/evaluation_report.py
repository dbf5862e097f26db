"""What an evaluation has to say: tables, a picture, and one JSON document."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from h2o_flexgen.cli.evaluate_arguments import PROGRAM
from h2o_flexgen.cli.plan_flags import as_line
from h2o_flexgen.evaluation.cells import Cell
from h2o_flexgen.evaluation.figures import Figure
from h2o_flexgen.evaluation.grid import Setting
from h2o_flexgen.evaluation.picture import draw_quality
from h2o_flexgen.evaluation.run import Evaluation
from h2o_flexgen.evaluation.table import Results, details, tables
from h2o_flexgen.evaluation.tasks.task import Task

PACKAGES = ("h2o_flexgen", "torch", "transformers", "numpy", "rouge_score")
RESULTS, TABLE, PICTURE = "results.json", "table.md", "picture.png"


@dataclass(frozen=True)
class Report:
    model: str
    words: tuple[str, ...]  # of the command line
    machine: Mapping[str, object]
    evaluation: Evaluation
    tasks: Mapping[str, Task]

    @cached_property
    def results(self) -> tuple[Results, ...]:
        bound = self.evaluation.tasks
        return tuple(Results(name, task.shown, bound[name], self._cells(name)) for name, task in self.tasks.items())

    def _cells(self, task: str) -> dict[Setting, Cell]:
        found = ((setting, self.evaluation.find(task, setting)) for setting in self.evaluation.settings)
        return {setting: cell for setting, cell in found if cell is not None}

    def lines(self) -> Iterator[str]:
        yield f"# {self.model}: quality under each policy"
        yield ""
        yield "Behind ±: the standard error. In brackets: in relation to the full cache, on the same examples."
        yield ""
        yield from tables(self.results)

    def page(self) -> str:
        command = ["```", as_line([*PROGRAM.split(), *self.words]), "```", ""]
        heading, *rest = self.lines()
        return "\n".join([heading, "", *command, *rest[1:], *details(self.results)])

    def as_json(self, everything: bool = False) -> dict[str, object]:
        """With figures of examples of one kind, at one length, ..., or without them."""
        return {
            "model": self.model,
            "command": [*PROGRAM.split(), *self.words],
            "identity": dict(self.evaluation.model),
            "machine": dict(self.machine),
            "versions": _versions(),
            "tasks": {one.name: self._task(one, everything) for one in self.results},
        }

    def _task(self, results: Results, everything: bool) -> dict[str, object]:
        cells = [self._cell(results, setting, cell, everything) for setting, cell in results.cells.items()]
        return {"asked": dict(results.bound.identity), "notes": list(results.bound.notes), "cells": cells}

    def _cell(self, results: Results, setting: Setting, cell: Cell, everything: bool) -> dict[str, object]:
        figures = [_without_examples(figure) for figure in cell.figures if everything or not figure.by]
        relations = {
            f"{shown.name}{f', {panel}' if panel else ''}": {"ratio": found.ratio, "error": found.error}
            for panel in results.panels
            for shown in results.shown
            if (found := results.relation(cell, shown, panel)) is not None
        }
        return {**setting.as_json(), "seconds": cell.seconds, "figures": figures, "in_relation_to_full": relations}


def _without_examples(figure: Figure) -> dict[str, object]:
    return {name: value for name, value in figure.as_json().items() if name != "examples"}


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:  # an extra that is not there, or a checkout that was never installed
            continue
    return versions


def write_report(report: Report, folder: Path) -> None:
    (folder / RESULTS).write_text(json.dumps(report.as_json(everything=True), indent=1) + "\n", encoding="utf-8")
    (folder / TABLE).write_text(report.page(), encoding="utf-8")
    if find_spec("matplotlib") is None:
        print(f"no {PICTURE}: it needs matplotlib; install it, or the extra [plot]", file=sys.stderr)
        return
    draw_quality(report.results, folder / PICTURE, f"{report.model}: quality against what is kept")
