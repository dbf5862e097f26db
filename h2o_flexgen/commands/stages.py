"""What is shown of the stages before a run computes: how far they are, and that a copy of the weights is made and kept."""

from __future__ import annotations

from h2o_flexgen.planning.units import format_bytes
from h2o_flexgen.runtime.progress import Progress
from h2o_flexgen.runtime.stage import Stage


def show_stage(progress: Progress, stage: Stage, done_bytes: int, total_bytes: int) -> None:
    progress.stage(str(stage), f"{format_bytes(done_bytes)} of {format_bytes(total_bytes)}" if total_bytes else "")


class Opening:
    """Looks on while a model is opened."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._noted = False

    def stage(self, stage: Stage, done_bytes: int, total_bytes: int) -> None:
        if stage is Stage.CONVERTING and not self._noted:
            self._noted = True
            self._progress.note(_conversion(total_bytes))
        show_stage(self._progress, stage, done_bytes, total_bytes)


def _conversion(total_bytes: int) -> str:
    from h2o_flexgen.models.convert import default_cache_dir  # imports torch, which is there by now

    copy = f"a copy of {format_bytes(total_bytes)}, which is kept in {default_cache_dir()}"
    return f"the checkpoint's .bin files are converted to safetensors, once: {copy}"
