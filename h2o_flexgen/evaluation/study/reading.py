"""Reading a text layer by layer: one layer's weights are loaded, and every reader goes through it before the next layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from h2o_flexgen.core.model_spec import LayerSpec
from h2o_flexgen.core.tiers import DEVICE
from h2o_flexgen.engine.stores.weights import WeightStore
from h2o_flexgen.llm import LLM
from h2o_flexgen.memory.memories import Memories
from h2o_flexgen.models.base import Attend, Given, computed
from h2o_flexgen.schedule.table import SCHEDULES
from h2o_flexgen.schedule.task import Visit
from h2o_flexgen.schedule.traffic import Traffic

OnLayer = Callable[[int, int], None]  # called with the number of layers done, and of all
ONLY = Visit(step=0, layer=0, batch=0)  # the only visit of a model with one layer


def read_text(llm: LLM, ids: Sequence[int], readers: Sequence[Attend], on_layer: OnLayer | None = None) -> None:
    """Each reader has its own hidden states, since they depend on its attention. Logits are not computed."""
    first, *others = llm.spec.layers[:-1]
    tokens = torch.tensor([ids], device=llm.device.torch_device)
    positions = torch.arange(len(ids), device=tokens.device).unsqueeze(0)
    with _opened(llm, first) as store:
        hidden = [computed(llm.model, first, *store.look_up(ONLY, tokens), Given(positions))] * len(readers)
    for done, layer in enumerate(others, start=1):
        with _opened(llm, layer) as store:
            weights = store.views(ONLY)
            for number, attend in enumerate(readers):
                hidden[number] = computed(llm.model, layer, hidden[number], weights, Given(positions, attend))
        if on_layer is not None:
            on_layer(done, len(others))


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
