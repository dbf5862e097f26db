"""What was measured for a model here and is kept in the user's cache: where its file lies, by the model's identity."""

from __future__ import annotations

from pathlib import Path

from h2o_flexgen.checkpoints.derived import fingerprint, model_name
from h2o_flexgen.checkpoints.gguf_format import is_gguf
from h2o_flexgen.checkpoints.model_places import cached_folder, local_place
from h2o_flexgen.core.environment import cache_folder

CALIBRATE = "python -m h2o_flexgen.calibrate"  # the command that measures
HEAD_BUDGETS = "head_budgets"  # a kind, and its folder in the cache
CONFIG, WEIGHTS = "config.json", (".safetensors", ".bin")


def kept_file(model: str, kind: str) -> Path | None:
    """The place for a measurement of the model, which may be empty. None: no files here would identify the model."""
    place = local_place(model)
    if not place.exists():
        place = cached_folder(model) or place
    files = _files(place)
    return cache_folder(kind) / f"{model_name(place)}-{fingerprint(files)}.json" if files else None


def _files(place: Path) -> list[Path]:
    if place.is_dir():
        return sorted(file for file in place.iterdir() if file.name == CONFIG or file.suffix in WEIGHTS)
    return [place] if is_gguf(place) and place.is_file() else []
