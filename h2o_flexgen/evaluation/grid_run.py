"""Evaluation: measures the cells of a grid that are missing. The model is opened once for each setting, for all tasks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.evaluation.cells import Cell, Cells
from h2o_flexgen.evaluation.grid import Setting
from h2o_flexgen.evaluation.tasks.task import Bound
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.policies.by_position import Full

if TYPE_CHECKING:
    from h2o_flexgen.evaluation.tasks.full_cache import FullCache
    from h2o_flexgen.llm import LLM

Open = Callable[[Plan], "LLM"]
References = dict[str, "FullCache"]


class ProgressListener(Protocol):
    """Shows progress."""

    def begin(self, doing: str) -> None:
        """Names what is measured next."""

    def advance(self, tokens: int) -> None:
        """Counts tokens that were run."""


@dataclass(frozen=True)
class Evaluation:
    model: Mapping[str, object]  # its identity
    settings: tuple[Setting, ...]
    tasks: Mapping[str, Bound]
    plan: Plan  # its policy and codecs are those of the setting
    cells: Cells

    def check(self, spec: ModelSpec) -> None:
        """Refuses impossible settings of a model before anything is loaded."""
        for setting in self.settings:
            for bound in self.tasks.values():
                setting.check(self.plan, spec, bound.sizes)

    def identity(self, task: str, setting: Setting) -> dict[str, object]:
        asked = dict(self.tasks[task].identity)
        return {"model": dict(self.model), "task": task, "asked": asked, "setting": setting.identity()}

    def find(self, task: str, setting: Setting) -> Cell | None:
        return self.cells.find(self.identity(task, setting))

    @property
    def num_cells(self) -> int:
        return len(self.settings) * len(self.tasks)

    def missing(self, setting: Setting) -> list[str]:
        return [task for task in self.tasks if self.find(task, setting) is None]

    @property
    def num_missing(self) -> int:
        return sum(len(self.missing(setting)) for setting in self.settings)

    @property
    def num_tokens(self) -> int:
        """Tokens still to run, those of the references included."""
        cells = sum(self.tasks[task].num_tokens for setting in self.settings for task in self.missing(setting))
        return cells + sum(self.tasks[task].num_tokens for task in self._to_refer)

    @property
    def _to_refer(self) -> list[str]:
        """Tasks with missing cells that are compared with the full cache."""
        wanted = {task for setting in self.settings for task in self.missing(setting)}
        return [task for task, bound in self.tasks.items() if bound.needs_reference and task in wanted]

    def run(self, open_llm: Open, folder: Path, listener: ProgressListener) -> None:
        """`folder` holds the references while they are needed."""
        with ExitStack() as stack:
            references: References = {}
            for setting in self._in_order():
                tasks = self.missing(setting) if setting in self.settings else []
                referred = self._to_refer if setting.is_reference else []
                if not tasks and not referred:
                    continue
                listener.begin(f"opening {setting.label}, {setting.amount.label}")
                with open_llm(setting.plan(self.plan)) as llm:
                    for task in referred:
                        listener.begin(f"{task}: what the full cache says")
                        references[task] = self.tasks[task].refer(llm, folder, listener.advance)
                        stack.enter_context(closing(references[task]))
                    self._measure(llm, setting, tasks, references, listener)

    def _in_order(self) -> Sequence[Setting]:
        """The setting that others are compared with comes first, even if the grid does not ask for it."""
        reference = next((one for one in self.settings if one.is_reference), None)
        if reference is None and self.settings and self._to_refer:
            reference = Setting(Full.name, self.settings[0].full.amount)
        others = [one for one in self.settings if one != reference]
        return others if reference is None else [reference, *others]

    def _measure(
        self, llm: LLM, setting: Setting, tasks: Sequence[str], references: References, listener: ProgressListener
    ) -> None:
        for task in tasks:
            listener.begin(f"{task}: {setting.label}, {setting.amount.label}")
            begun = time.perf_counter()
            figures = self.tasks[task].measure(llm, listener.advance, references.get(task))
            self.cells.add(Cell(self.identity(task, setting), figures, round(time.perf_counter() - begun, 3)))
