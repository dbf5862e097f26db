"""Reading texts layer by layer: one layer's weights are loaded, and every reader goes through it before the next layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.core.model_spec import LayerSpec
from h2o_flexgen.core.site import DEVICE
from h2o_flexgen.engine.stores.weights import WeightStore
from h2o_flexgen.llm import LLM
from h2o_flexgen.memory.memories import Memories
from h2o_flexgen.models.base import Given, computed
from h2o_flexgen.models.new_tokens import Attend
from h2o_flexgen.schedule.ops import Visit
from h2o_flexgen.schedule.table import SCHEDULES
from h2o_flexgen.schedule.traffic import Traffic

OnLayer = Callable[[int, int], None]  # called with the number of layers done, and of all
ONLY = Visit(step=0, layer=0, batch=0)  # the only visit of a model with one layer


class TextReading(NamedTuple):
    """One reader's way through one text."""

    ids: Sequence[int]
    attend: Attend


def read_texts(llm: LLM, readings: Sequence[TextReading], on_layer: OnLayer | None = None) -> None:
    """Each reading has its own hidden states, since they depend on its attention. Logits are not computed."""
    if llm.spec.attention_cap is not None:
        raise ValueError(
            f"the scores of attention of {llm.spec.name} have a cap, {llm.spec.attention_cap:g}, which studies and "
            "calibrations do not compute; take a model without one"
        )
    first, *others = llm.spec.layers[:-1]
    with _opened(llm, first) as store:
        hidden = [_begun(llm, first, store, reading.ids) for reading in readings]
    for done, layer in enumerate(others, start=1):
        with _opened(llm, layer) as store:
            weights = store.views(ONLY)
            for number, (ids, attend) in enumerate(readings):
                given = Given(_positions(llm, ids), attend)
                hidden[number] = computed(llm.model, layer, hidden[number], weights, given)
        if on_layer is not None:
            on_layer(done, len(others))


def _begun(llm: LLM, first: LayerSpec, store: WeightStore, ids: Sequence[int]) -> Tensor:
    tokens = torch.tensor([ids], device=llm.device.torch_device)
    return computed(llm.model, first, *store.look_up(ONLY, tokens), Given(_positions(llm, ids)))


def _positions(llm: LLM, ids: Sequence[int]) -> Tensor:
    return torch.arange(len(ids), device=llm.device.torch_device).unsqueeze(0)


@contextmanager
def _opened(llm: LLM, layer: LayerSpec) -> Iterator[WeightStore]:
    """Opens the layer as a model of its own, with all its weights on the device, and closes it afterwards."""
    spec = replace(llm.spec, layers=(layer,))
    memories = Memories(llm.device, llm.offload_folder, llm.plan.pin_weight)
    try:
        store = WeightStore(spec, dict.fromkeys(spec.tensors, DEVICE), llm.source, memories)
        store.prepare(SCHEDULES["zigzag"](Traffic(steps=1, layers=1, batches=1)))
        yield store
    finally:
        memories.close()
