"""What a model still knows of a text under a policy, as `evaluate --tasks recall` measured it: its results.json, which lies as
recall.json beside the model. Every run that evicts says so, and says where nothing was measured."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h2o_flexgen.checkpoints.model_places import surely_beside
from h2o_flexgen.core.files import NotADocument, parse_json, read_document_text
from h2o_flexgen.formats.kernel_table import EXACT
from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.policies.full import Full
from h2o_flexgen.policies.kv_options import DEFAULT_KEPT

FILE = "recall.json"
TASK, FIGURE, QUESTIONS = "recall", "accuracy", ("visible questions", "hidden questions")
LENGTHS = re.compile(r"texts of ([\d, ]+) tokens")
BUDGET = "kv_budget"
AS_STORED = (PLAIN, PLAIN, EXACT)  # of KV, of weights, and products


@dataclass(frozen=True)
class Survival:
    """The shares of what a model answers with all kept that it still answers, where the question stands in the prompt and where
    it comes later."""

    budget: float  # that was measured, the largest up to the plan's
    visible: float
    hidden: float
    questions: int
    tokens: str = ""  # of the texts that they are about


def survival_under(plan: Plan, model: str) -> Survival | None:
    """What survives under a plan at least; None if nothing was measured."""
    file = surely_beside(model, FILE)
    return None if file is None else _found(plan, file)


def _found(plan: Plan, file: Path) -> Survival | None:
    text = read_document_text(file, f"measured recall {file}")
    try:
        task = parse_json(text)["tasks"][TASK]
        full = _answered(next(_whole(task["cells"])))
        budget, cell = max(_alike(plan, task["cells"]), key=lambda one: one[0], default=(0.0, None))
        if cell is None:
            return None
        visible, hidden = (own / of_full for own, of_full in zip(_answered(cell), full, strict=True))
        return Survival(budget, visible, hidden, int(task["asked"]["count"]), _tokens(task.get("notes", ())))
    except (NotADocument, KeyError, TypeError, ValueError, AttributeError, StopIteration, ZeroDivisionError) as error:
        advice = "remove it or measure anew"
        raise ValueError(f"{file} is no results.json of evaluate --tasks {TASK} ({error}); {advice}") from error


def _tokens(notes: Iterable[str]) -> str:
    """The lengths of the texts, of which the notes alone speak."""
    found = LENGTHS.search("\n".join(notes))
    return found[1] if found else ""


def _answered(cell: Mapping[str, Any]) -> list[float]:
    """The shares of questions that were answered rightly."""
    all_questions = (figure for figure in cell["figures"] if figure["name"] == FIGURE and not figure.get("by"))
    whole = {figure["panel"]: figure["value"] for figure in all_questions}
    return [float(whole[panel]) for panel in QUESTIONS]


def _whole(cells: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Cells in which nothing is lost, and all steps read everything."""
    return (cell for cell in cells if cell["policy"] == Full.name and not cell["options"] and _stored(cell) == AS_STORED)


def _stored(cell: Mapping[str, Any]) -> tuple[str, str, str]:
    return cell["kv_codec"], cell["weight_codec"], cell["compute"]


def _alike(plan: Plan, cells: Iterable[Mapping[str, Any]]) -> Iterator[tuple[float, Mapping[str, Any]]]:
    """The cells that differ from the plan in what is kept alone, and in that by keeping no more; with their budgets."""
    options = plan.kv_options
    if not options.is_share_of_text:
        return
    others = {name: getattr(options, name) for name in options.given if name != BUDGET}
    asked = plan.kv_policy, (plan.kv_codec, plan.weight_codec, plan.compute), _sum(plan.head_budgets), _sum(plan.probe), others
    for cell in cells:
        budget = cell["options"].get(BUDGET, 1.0)
        rest = {name: value for name, value in cell["options"].items() if name != BUDGET}
        heads, probe = (one and one["checksum"] for one in (cell["head_budgets"], cell["probe"]))
        if (cell["policy"], _stored(cell), heads, probe, rest) == asked and budget <= (options.kv_budget or DEFAULT_KEPT):
            yield budget, cell


def _sum(read: Any) -> str | None:
    return None if read is None else str(read.checksum)
