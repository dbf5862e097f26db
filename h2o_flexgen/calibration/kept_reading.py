"""KeptReading: how far texts were read, in a file, so that a calibration that was interrupted goes on there. Pace: how long a
calibration will take, told by its first texts in the first layer of each kind."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from h2o_flexgen.calibration.text_reading import ReadModel, ReadSoFar
from h2o_flexgen.core.files import write_bytes
from h2o_flexgen.core.model_spec import LayerSpec

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


class LayerTime(NamedTuple):
    """What a layer of some kind has taken, with all texts."""

    nbytes: int
    seconds: float


@dataclass
class Pace:
    """Tells once how long the rest of a calibration takes, and gives it up where that is too long. Its first layer says so of
    all others, byte by byte. The first layer of another kind, with attention or a scan, mends what was foretold of its kind."""

    most_seconds: float
    tell: Callable[[float], None]
    now: Callable[[], float] = time.perf_counter
    _began: float | None = None
    _layer_began: float = 0.0
    _loaded: float = 0.0
    _warm: float = 0.0
    _known: dict[Hashable, LayerTime] = field(default_factory=dict)

    def begin(self) -> None:
        """Tokens are looked up, and no layer is loaded yet."""
        self._began = self._layer_began = self.now()

    def note(self, at: ReadSoFar, model: ReadModel) -> None:
        if self._began is None:
            return
        if model.layers[at.layers].computes not in self._known:
            self._time(at, model, self._began)
        if at.texts == len(at.hidden):
            self._layer_began = self.now()

    def _time(self, at: ReadSoFar, model: ReadModel, began: float) -> None:
        if at.texts == 0:
            self._loaded = self.now()
            return
        if at.texts == 1 and len(at.hidden) > 1:
            self._warm = self.now()  # the first text may wait for kernels to be compiled, once
            return
        layer, is_first = model.layers[at.layers], not self._known
        each_text = self.now() - (self._warm if at.texts > 1 else self._loaded)
        seconds = (self._loaded - self._layer_began) + len(at.hidden) * each_text
        self._known[layer.computes] = LayerTime(layer.nbytes, seconds)
        in_all = self._layer_began - began + sum(map(self._foretold, model.layers[at.layers :]))
        if in_all > self.most_seconds:
            raise TakesTooLong(in_all)
        if is_first:
            self.tell(in_all)

    def _foretold(self, layer: LayerSpec) -> float:
        of_kind = self._known.get(layer.computes)
        timed = self._known.values() if of_kind is None else (of_kind,)
        return sum(one.seconds for one in timed) * layer.nbytes / max(1, sum(one.nbytes for one in timed))
