"""Reading texts layer by layer: one layer's weights are loaded, and every reader goes through it before the next layer.

How far texts were read may be kept in a file (`KeptReading`), so that a calibration that was interrupted goes on there. `Pace`
tells how long a calibration will take, by its first texts in the first layer of each kind.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from h2o_flexgen.checkpoints.checkpoint import WeightSource
from h2o_flexgen.core.files import write_bytes
from h2o_flexgen.core.model_spec import LayerSpec, ModelSpec
from h2o_flexgen.core.site import DEVICE
from h2o_flexgen.engine.stores.weights import WeightStore
from h2o_flexgen.memory.device import Device
from h2o_flexgen.memory.memories import Memories
from h2o_flexgen.models.base import Given, Model, computed
from h2o_flexgen.models.new_tokens import Attend, NewTokens, RowStates
from h2o_flexgen.planning.footprint import MemoryLimits
from h2o_flexgen.schedule import SCHEDULES
from h2o_flexgen.schedule.ops import Visit
from h2o_flexgen.schedule.traffic import Traffic

OnLayer = Callable[[int, int], None]  # called with the number of layers done, and of all
ONLY = Visit(step=0, layer=0, batch=0)  # the only visit of a model with one layer


@dataclass(frozen=True)
class ReadModel:
    """What texts are read with: an open model of which no weights need be loaded."""

    name: str
    model: Model  # its layers as functions
    source: WeightSource
    device: Device
    limits: MemoryLimits
    offload_folder: Path
    pin_weight: bool

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @property
    def layers(self) -> Sequence[LayerSpec]:
        """Those behind the first, which looks tokens up, and before the head, which is not computed."""
        return self.spec.layers[1:-1]


class TextReading(NamedTuple):
    """One reader's way through one text."""

    ids: Sequence[int]
    attend: Attend


class ReadSoFar(NamedTuple):
    """How far all readings are."""

    layers: int  # that all texts have been through
    texts: int  # that have been through the next layer; 0: its weights were loaded
    hidden: list[Tensor]  # of each reading: it depends on its attention


def read_texts(model: ReadModel, readings: Sequence[TextReading], on_layer: OnLayer | None = None) -> None:
    """Every text is read to the end. Logits are not computed."""
    with closing(reading_of(model, readings, looked_up(model, readings))) as reading:
        for at in reading:
            if at.texts == len(readings) and on_layer is not None:
                on_layer(at.layers + 1, len(model.layers))


def looked_up(model: ReadModel, readings: Sequence[TextReading]) -> ReadSoFar:
    """The beginning: all texts are before the first layer."""
    _refuse(model.spec)
    return ReadSoFar(0, 0, [*_hidden_of_tokens(model, readings)])


def reading_of(model: ReadModel, readings: Sequence[TextReading], begun: ReadSoFar) -> Generator[ReadSoFar, None, None]:
    """Reads on from where `begun` ends, after whole layers: how far it is, when a layer's weights are loaded and behind each
    text in it."""
    _refuse(model.spec)
    hidden = begun.hidden
    for done, layer in enumerate(model.layers):
        if done < begun.layers:
            continue
        with _opened(model, layer) as store:
            weights = store.views(ONLY)
            yield ReadSoFar(done, 0, hidden)
            for number, (ids, attend) in enumerate(readings):
                given = Given(_positions(model, ids), attend, states=states_of(layer, model.device.torch_device))
                hidden[number] = computed(model.model, layer, hidden[number], weights, given)
                yield ReadSoFar(done, number + 1, hidden)


def _refuse(spec: ModelSpec) -> None:
    if spec.attention_cap is not None:
        raise ValueError(
            f"the scores of attention of {spec.name} have a cap, {spec.attention_cap:g}, which studies and "
            "calibrations do not compute; take a model without one"
        )


def states_of(layer: LayerSpec, device: torch.device) -> RowStates:
    """The states of a text before its first token, as prompts pass them. Nothing needs them once it has been read."""
    return RowStates({one.name: torch.zeros(1, *one.shape, device=device) for one in layer.states if one.notes is None})


def _hidden_of_tokens(model: ReadModel, readings: Sequence[TextReading]) -> Iterator[Tensor]:
    first = model.spec.layers[0]
    with _opened(model, first) as store:
        for ids, _ in readings:
            tokens = torch.tensor([ids], device=model.device.torch_device)
            yield computed(model.model, first, *store.look_up(ONLY, tokens), Given(_positions(model, ids)))


def _positions(model: ReadModel, ids: Sequence[int]) -> Tensor:
    return torch.arange(len(ids), device=model.device.torch_device).unsqueeze(0)


@contextmanager
def _opened(model: ReadModel, layer: LayerSpec) -> Iterator[WeightStore]:
    """Opens the layer as a model of its own, with all its weights on the device, and closes it afterwards."""
    spec = replace(model.spec, layers=(layer,))
    memories = Memories(model.device, model.offload_folder, model.pin_weight)
    try:
        store = WeightStore(spec, dict.fromkeys(spec.tensors, DEVICE), model.source, memories)
        store.prepare(SCHEDULES["zigzag"](Traffic(steps=1, layers=1, batches=1)))
        yield store
    finally:
        memories.close()


def turned(tokens: NewTokens) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (1, heads, tokens, dim), rotated to their positions in the text."""
    q, k = tokens.q, tokens.k
    positions = torch.arange(q.shape[1], device=q.device).unsqueeze(0)
    q = q if tokens.of_queries is None else tokens.of_queries(q, positions)
    q = q if tokens.query_lengths is None else q * tokens.query_lengths.turn(positions, q.dtype).cos[..., :1]
    q = q if tokens.query_norm is None else tokens.query_norm(q)
    k = k if tokens.rotation is None else tokens.rotation(k, positions)
    q, k, v = (each.transpose(1, 2).contiguous() for each in (q, k, tokens.v))
    return q, k, v


# -- a reading that is kept, and its pace ------------------------------------------------------------------------------

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
