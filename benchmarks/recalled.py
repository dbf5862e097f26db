"""What a model recalls under a policy, from the results.json of `evaluate --tasks recall`, to stand beside a policy's speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.portable import portable
from h2o_flexgen.core.files import NotADocument, parse_json, read_text
from h2o_flexgen.evaluation.tasks.task import QUESTIONS
from h2o_flexgen.formats.kernel_table import EXACT

TASK, FIGURE = "recall", "accuracy"
NOT_MEASURED = "-"


@dataclass(frozen=True)
class Asked:
    """What a line of a benchmark was run under, as an evaluation names it."""

    policy: str
    kept: str
    weight_codec: str
    kv_codec: str
    head_budgets: str | None  # their checksum; None: all heads keep equally much
    probe: str | None  # its checksum; None: the policy asks none


@dataclass(frozen=True)
class Recalled:
    command: str
    questions: str  # their checksum
    cells: Mapping[Asked, Mapping[str, Any]]

    @classmethod
    def of(cls, paths: Sequence[Path], identity: Mapping[str, object]) -> Recalled:
        """Reads files of the same questions; refuses one of other weights or another dtype than those that are run."""
        each = [cls._of(path, identity) for path in paths]
        if len({one.questions for one in each}) > 1:
            raise ValueError(f"{', '.join(map(str, paths))} are about different questions; give results of the same")
        merged = {asked: cell for one in each for asked, cell in one.cells.items()}
        return cls("; ".join(one.command for one in each), each[0].questions, merged)

    @classmethod
    def _of(cls, path: Path, identity: Mapping[str, object]) -> Recalled:
        try:
            document = parse_json(read_text(path, f"quality {path}"))
            found, task, command = document["identity"], document["tasks"][TASK], document["command"]
            cells, questions = task["cells"], str(task["asked"]["examples"])
            comparable = {_asked(cell): cell for cell in cells if _is_plain(cell)}
        except (NotADocument, KeyError, TypeError) as error:
            wanted = f"evaluate --tasks {TASK} --output FOLDER"
            raise ValueError(f"{path} has no results of {TASK} ({error}); give a results.json that {wanted} wrote") from error
        for what in ("weights", "dtype"):
            if found.get(what) != (own := identity[what]):
                raise ValueError(f"{path} was measured with {what} {found.get(what)}, not {own}; evaluate this model")
        return cls(" ".join(portable(command)), questions, comparable)

    def cell(self, asked: Asked) -> list[str]:
        """The share of answers that were right, with its standard error, for each kind of question."""
        return [self._figure(asked, f"{kind} questions") for kind in QUESTIONS]

    def _figure(self, asked: Asked, panel: str) -> str:
        figures = self.cells.get(asked, {}).get("figures", ())
        for figure in figures:
            if (figure["name"], figure.get("panel")) == (FIGURE, panel) and not figure.get("by"):
                return f"{figure['value']:.2f} ± {figure['error']:.2f}"
        return NOT_MEASURED


def _is_plain(cell: Mapping[str, Any]) -> bool:
    """Whether nothing but the policy and what it keeps was asked for."""
    return cell.get("compute", EXACT) == EXACT and set(cell["options"]) <= {"kv_budget"}


def _asked(cell: Mapping[str, Any]) -> Asked:
    heads, probe = (None if cell.get(name) is None else cell[name]["checksum"] for name in ("head_budgets", "probe"))
    return Asked(cell["policy"], cell["kept"], cell["weight_codec"], cell["kv_codec"], heads, probe)
