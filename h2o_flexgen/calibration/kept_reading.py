"""KeptReading: how far texts were read, in a file, so that a calibration that was interrupted goes on there. Pace: how long a
calibration will take, told by its first texts in its first layer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from h2o_flexgen.calibration.text_reading import ReadModel, ReadSoFar
from h2o_flexgen.core.files import write_bytes

LAYERS, TEXTS = "layers", "texts"


@dataclass(frozen=True)
class KeptReading:
    file: Path
    texts: str  # identifies what is read, and as what it is computed

    def found(self, count: int) -> tuple[ReadSoFar, list[list[Tensor]]] | None:
        """How far an earlier reading of these texts came, and the scores that it made of each. None: it is not there, or of
        others, or cannot be read."""
        try:
            with safe_open(self.file, framework="pt") as kept:
                said = kept.metadata() or {}
                if said.get(TEXTS) != self.texts:
                    return None
                hidden = [kept.get_tensor(f"hidden.{number}") for number in range(count)]
                scores = [[*kept.get_tensor(f"scores.{number}")] for number in range(count)]
                return ReadSoFar(json.loads(said[LAYERS]), 0, hidden), scores
        except (OSError, SafetensorError, KeyError, ValueError):
            return None

    def keep(self, layers: int, hidden: Sequence[Tensor], scores: Sequence[Sequence[Tensor]]) -> None:
        """Keeps it once all texts have been through so many layers."""
        found = [torch.stack([*of_text]) for of_text in scores if of_text]
        named = {f"hidden.{number}": one.cpu().contiguous() for number, one in enumerate(hidden)}
        named |= {f"scores.{number}": one for number, one in enumerate(found)}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(self.file, save(named, metadata={TEXTS: self.texts, LAYERS: json.dumps(layers)}))

    def remove(self) -> None:
        self.file.unlink(missing_ok=True)


class TakesTooLong(Exception):
    """A calibration was given up at its beginning, since it would take too long."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"it takes about {seconds:.0f} s")
        self.seconds = seconds


@dataclass
class Pace:
    """Tells once how long the rest of a calibration takes, and gives it up where that is too long."""

    most_seconds: float
    tell: Callable[[float], None]
    now: Callable[[], float] = time.perf_counter
    _began: float | None = None
    _loaded: float = 0.0
    _warm: float = 0.0
    _is_told: bool = False

    def begin(self) -> None:
        """Tokens are looked up, and no layer is loaded yet."""
        self._began = self.now()

    def note(self, at: ReadSoFar, model: ReadModel) -> None:
        if self._is_told or self._began is None:
            return
        if at.texts == 0:
            self._loaded = self.now()
            return
        if at.texts == 1 and len(at.hidden) > 1:
            self._warm = self.now()  # the first text may wait for kernels to be compiled, once
            return
        self._is_told = True
        each_text = self.now() - (self._warm if at.texts > 1 else self._loaded)
        seconds = (self._loaded - self._began) + len(at.hidden) * each_text
        rest = sum(layer.nbytes for layer in model.layers[at.layers :]) / max(1, model.layers[at.layers].nbytes)
        if seconds * rest > self.most_seconds:
            raise TakesTooLong(seconds * rest)
        self.tell(seconds * rest)
