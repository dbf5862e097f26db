"""The work of the evaluate command: measures the cells of a grid, or studies attention; reports in tables, pictures, and one
JSON document."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from h2o_flexgen.calibration.text_reading import OnLayer
from h2o_flexgen.cli.evaluate_request import EvaluateRequest, OfFacts, Quality, Study
from h2o_flexgen.cli.report.arithmetic import StoredWeights
from h2o_flexgen.cli.terminal import say, say_document
from h2o_flexgen.cli.watch import EvaluationWatch, open_llm
from h2o_flexgen.core.files import write_text
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.evaluation.answer_settings import model_identity
from h2o_flexgen.evaluation.cells import Cell, Cells, Figure
from h2o_flexgen.evaluation.grid import Evaluation, Setting
from h2o_flexgen.evaluation.results import Results, details, draw_quality, panels_of, tables
from h2o_flexgen.evaluation.study.facts import FactsStudy, study_facts
from h2o_flexgen.evaluation.study.heavy_hitters import HeavyHitterStudy, study
from h2o_flexgen.evaluation.study.study_pictures import draw, draw_facts
from h2o_flexgen.evaluation.tasks.task import EvaluationTask, window_of
from h2o_flexgen.llm import LLM
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.profiling.measure import describe_machine
from h2o_flexgen.session.open_request import OpenRequest
from h2o_flexgen.text.given_texts import windows

PACKAGES = ("h2o_flexgen", "torch", "transformers", "numpy", "rouge_score")
RESULTS, TABLE, PICTURE = "results.json", "table.md", "picture.png"
STUDY_RESULT, STUDY_TABLES, FACTS_PICTURE = "study.json", "study.txt", "facts.png"


def work(request: EvaluateRequest) -> None:
    if isinstance(request.work, Study | OfFacts):
        _study(request, request.work)
    else:
        _measure(request, request.work)


def _measure(request: EvaluateRequest, asked: Quality) -> None:
    evaluation, stored, machine, offload_folder = _bound(request, asked)
    if asked.fresh:  # not earlier: a refused command deletes no cells
        evaluation.cells.forget()
    _announce(evaluation, stored, request.output)
    _fill(request, evaluation, offload_folder)
    report = EvaluationReport(request.model.name, request.command, stored, machine, evaluation, asked.tasks)
    say(report.lines())
    if request.output is not None:
        write_report(report, request.output)
    say_document(report.as_json())


def _bound(request: EvaluateRequest, asked: Quality) -> tuple[Evaluation, StoredWeights | None, dict[str, object], Path]:
    """The tasks in the model's tokens, which needs no weights; impossible settings are refused."""
    with open_llm(request.model, request.site, request.plan) as llm:
        bound = {name: task.bind(llm) for name, task in asked.tasks.items()}
        cells = Cells(request.output)
        settings = asked.grid.settings(lambda codec: llm.loaded.spec_under(replace(request.plan, weight_codec=codec)))
        evaluation = Evaluation(model_identity(llm), settings, bound, request.plan, cells)
        evaluation.check(llm.spec)
        return evaluation, StoredWeights.of(llm.loaded.opened), describe_machine(llm.device), llm.loaded.offload_folder


def _announce(evaluation: Evaluation, stored: StoredWeights | None, output: Path | None) -> None:
    if stored is not None:
        print(f"found {stored.entry().words[0]}", file=sys.stderr)
    there, total = evaluation.num_cells - evaluation.num_missing, evaluation.num_cells
    words = ["1 cell" if total == 1 else f"{total} cells"]
    if there:
        words.append(f"{there} {'is' if there == 1 else 'are'} in {output} already")
    print("; ".join(words), file=sys.stderr)
    for name, task in evaluation.tasks.items():
        for note in task.notes:
            print(f"{name}: {note}", file=sys.stderr)


def _fill(request: EvaluateRequest, evaluation: Evaluation, folder: Path) -> None:
    with Progress(evaluation.num_tokens, "evaluate", late=True) as progress:
        watch = EvaluationWatch(progress)

        def opened(plan: Plan) -> LLM:
            return LLM.of(OpenRequest(request.model, request.site, plan), watch.stage)

        try:
            evaluation.run(opened, folder, watch)
        except KeyboardInterrupt:
            done = evaluation.num_cells - evaluation.num_missing
            if request.output is not None and done:
                progress.note(
                    f"{done} of {evaluation.num_cells} cells in {request.output}; the same command goes on from there"
                )
            raise


# -- a study ---------------------------------------------------------------------------------------------------------------


def _study(request: EvaluateRequest, asked: Study | OfFacts) -> None:
    """One study of attention, and pictures of it."""
    name, output = request.model.name, request.output
    with open_llm(request.model, request.site, request.plan) as llm, Progress(0, f"study of {name}", late=True) as progress:

        def on_layer(done: int, layers: int) -> None:
            progress.expect(layers)
            progress.update("layers", done)

        found = _found(llm, asked, on_layer)
        if output is not None:
            write_text(output / STUDY_RESULT, json.dumps(found.as_json(), indent=1) + "\n")
            write_text(output / STUDY_TABLES, "\n".join(found.lines()) + "\n")
        if output is not None and find_spec("matplotlib") is not None:
            progress.stage("pictures")
            _draw_study(found, output)
    if output is not None and find_spec("matplotlib") is None:
        print("no pictures: they need matplotlib; install it, or the extra [plot]", file=sys.stderr)
    say(found.lines())
    say_document(found.as_json())


def _found(llm: LLM, asked: Study | OfFacts, on_layer: OnLayer) -> HeavyHitterStudy | FactsStudy:
    if isinstance(asked, OfFacts):
        return study_facts(llm, asked.facts, asked.policies, asked.budget, heads=asked.heads, on_layer=on_layer)
    ids = windows(asked.texts, llm.tokenizer, window_of(asked.window, llm), 1).ids[0]
    return study(llm, ids, asked.policies, asked.budget, on_layer=on_layer)


def _draw_study(found: HeavyHitterStudy | FactsStudy, folder: Path) -> None:
    if isinstance(found, FactsStudy):
        draw_facts(found, folder / FACTS_PICTURE)
    else:
        draw(found, folder)


# -- the report ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EvaluationReport:
    """The report of an evaluation: tables, a picture, and one JSON document."""

    model: str
    command: tuple[str, ...]
    stored: StoredWeights | None  # what was found in the checkpoint
    machine: Mapping[str, object]
    evaluation: Evaluation
    tasks: Mapping[str, EvaluationTask]

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
        command = ["```", shlex.join(self.command), "```", ""]
        heading, *rest = self.lines()
        return "\n".join([heading, "", *command, *rest[1:], *details(self.results)])

    def as_json(self, everything: bool = False) -> dict[str, object]:
        """The cell as JSON, with or without the figures of examples of one kind, of one length, ..."""
        return {
            "model": self.model,
            "command": list(self.command),
            "identity": dict(self.evaluation.model),
            "stored": self.stored.entry().values["stored"] if self.stored else None,
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
        except PackageNotFoundError:  # an extra that is missing, or a checkout that was never installed
            continue
    return versions


def write_report(report: EvaluationReport, folder: Path) -> None:
    write_text(folder / RESULTS, json.dumps(report.as_json(everything=True), indent=1) + "\n")
    write_text(folder / TABLE, report.page())
    if find_spec("matplotlib") is None:
        print(f"no {PICTURE}: it needs matplotlib; install it, or the extra [plot]", file=sys.stderr)
        return
    draw_quality(panels_of(report.results), folder / PICTURE, f"{report.model}: quality against what is kept")
