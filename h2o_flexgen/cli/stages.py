"""What is shown of the stages before a run computes: how far they are, that a copy of the weights is made and kept, and that
one was damaged."""

from __future__ import annotations

from pathlib import Path

from h2o_flexgen.core.units import format_bytes
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.engine.stage import Stage, damaged_copy, how_far

COPIES = {  # what is done to make them, and where in the cache they are kept
    Stage.CONVERTING: ("the checkpoint's .bin files are converted to safetensors", "converted"),
    Stage.PACKING: ("the checkpoint's matrices are packed", "packed"),
}


def show_stage(progress: Progress, stage: Stage, done_bytes: int, total_bytes: int) -> None:
    if stage is Stage.MENDING:
        progress.note(damaged_copy(_cache()))
    progress.stage(str(stage), how_far(done_bytes, total_bytes))


class Opening:
    """Looks on while a model is opened."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._noted: set[Stage] = set()

    def stage(self, stage: Stage, done_bytes: int, total_bytes: int) -> None:
        if stage in COPIES and stage not in self._noted:
            self._noted.add(stage)
            self._progress.note(_copy(stage, total_bytes))
        show_stage(self._progress, stage, done_bytes, total_bytes)


def _copy(stage: Stage, total_bytes: int) -> str:
    what, kind = COPIES[stage]
    return f"{what}, once: a copy of {format_bytes(total_bytes)}, which is kept in {_cache(kind)}"


def _cache(kind: str = "") -> Path:
    from h2o_flexgen.models.derived import cache_folder  # imports torch, which is there by now

    return cache_folder(kind)
