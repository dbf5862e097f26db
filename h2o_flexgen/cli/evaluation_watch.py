"""EvaluationWatch: looks on while cells are measured, and feeds the progress line."""

from __future__ import annotations

from h2o_flexgen.cli.stages import Opening
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.engine.stage import Stage


class EvaluationWatch:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._opening = Opening(progress)
        self._doing, self._done = "", 0

    def begin(self, doing: str) -> None:
        self._doing = doing
        self._progress.stage(doing)
        self.advance(0)

    def advance(self, tokens: int) -> None:
        self._done += tokens
        self._progress.update("tokens", self._done)

    def stage(self, stage: Stage, done_bytes: int, total_bytes: int) -> None:
        """Shows the stages of opening a model that take long, which are those with bytes. A damaged copy
        leaves a line. During all others the progress of the evaluation is shown."""
        if total_bytes or stage is Stage.MENDING:
            self._opening.stage(stage, done_bytes, total_bytes)
        else:
            self.begin(self._doing)
