"""Reading texts layer by layer: one layer's weights are loaded, and every reader goes through it before the next layer."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.checkpoints.checkpoint import WeightSource
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
