"""Reading a text layer by layer: the weights of one layer at a time, and every reader through it before the next one comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from h2o_flexgen.core.model_spec import LayerSpec
from h2o_flexgen.core.tiers import DEVICE
from h2o_flexgen.engine.stores.weights import WeightStore
from h2o_flexgen.llm import LLM
from h2o_flexgen.memory.memories import Memories
from h2o_flexgen.models.base import Attend, Model, Weights, block, embed_rows
from h2o_flexgen.schedule.table import SCHEDULES
from h2o_flexgen.schedule.task import Visit
from h2o_flexgen.schedule.traffic import Traffic

OnLayer = Callable[[int, int], None]  # layers that are done, and all of them
ONLY = Visit(step=0, layer=0, batch=0)  # of a model that is one layer


def read_text(llm: LLM, ids: Sequence[int], readers: Sequence[Attend], on_layer: OnLayer | None = None) -> None:
    """Each reader has hidden states of its own, which come of its attention. Logits are not made."""
    first, *others = llm.spec.layers[:-1]
    with _opened(llm, first) as store:
        hidden = [_embedded(llm, first, store, ids)] * len(readers)
    for done, layer in enumerate(others, start=1):
        with _opened(llm, layer) as store:
            weights = store.views(ONLY)
            for number, attend in enumerate(readers):
                hidden[number] = _through(llm.model, layer, hidden[number], weights, attend)
        if on_layer is not None:
            on_layer(done, len(others))


@contextmanager
def _opened(llm: LLM, layer: LayerSpec) -> Iterator[WeightStore]:
    """The layer as a model of its own, whose weights all stay where they are computed with; afterwards they are let go."""
    spec = replace(llm.spec, layers=(layer,))
    memories = Memories(llm.device, llm.offload_folder, pin_host=False)
    try:
        store = WeightStore(spec, dict.fromkeys(spec.tensors, DEVICE), llm.source, memories)
        store.prepare(SCHEDULES["zigzag"](Traffic(steps=1, layers=1, batches=1)))
        yield store
    finally:
        memories.close()


def _embedded(llm: LLM, layer: LayerSpec, store: WeightStore, ids: Sequence[int]) -> Tensor:
    device = llm.device.torch_device
    tokens = torch.tensor([ids], device=device)
    positions = torch.arange(len(ids), device=device).unsqueeze(0)
    weights = store.views(ONLY)
    if layer.table is None or layer.packed_table is None:
        return llm.model.embed(tokens, positions, weights)
    return embed_rows(llm.model, store.look_up(ONLY, tokens), positions, weights, layer.table)


def _through(model: Model, layer: LayerSpec, hidden: Tensor, weights: Weights, attend: Attend) -> Tensor:
    if layer.kind == "mlp":
        return model.mlp(hidden, weights)
    return block(model, hidden, weights, attend) if layer.kind == "block" else model.attention(hidden, weights, attend)
