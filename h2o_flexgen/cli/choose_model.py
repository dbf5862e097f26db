"""Chooses the model that a command runs: a hub name, a local folder, FlexGen's --path with the model in it, random weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from h2o_flexgen.cli.flags import DUMMY_PATH
from h2o_flexgen.demo import demo_folder

SAFETENSORS = "*.safetensors"


@dataclass(frozen=True)
class ChosenModel:
    name: str  # as a person says it: for reports
    source: str  # hub name or folder, as LLM takes it
    dummy_weights: bool

    def without_weights(self) -> ChosenModel:
        """For a look at the plan: headers of local safetensors are read, but nothing is downloaded or converted for it."""
        has_headers = self.folder.is_dir() and any(self.folder.glob(SAFETENSORS))
        return self if has_headers else replace(self, dummy_weights=True)

    @property
    def folder(self) -> Path:
        """Where it lies, if it is no name on the hub."""
        return demo_folder(self.source) or Path(self.source).expanduser()


def choose_model(model: str | None, path: str | None, dummy_weights: bool) -> ChosenModel:
    dummy_weights = dummy_weights or path == DUMMY_PATH
    if path is None or dummy_weights:
        name = model or path or ""
        return ChosenModel(name, name, dummy_weights)
    folder = _folder_in(Path(path).expanduser(), model)
    return ChosenModel(model or folder.name, str(folder), dummy_weights)


def _folder_in(path: Path, model: str | None) -> Path:
    """`<path>/<name>`, also without the owner's name, or `<path>` itself."""
    inside = [path / model, path / model.rpartition("/")[2]] if model else []
    for folder in (*inside, path):
        if (folder / "config.json").is_file():
            return folder
    places = " or ".join(str(folder) for folder in dict.fromkeys((*inside, path)))
    raise ValueError(f"--path {path} has no checkpoint: there is no config.json in {places}")
