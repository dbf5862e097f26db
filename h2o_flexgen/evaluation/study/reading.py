"""Reading a text layer by layer: the weights of one layer at a time, and every reader through it before the next one comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from h2o_flexgen.llm import LLM
from h2o_flexgen.memory.memories import Memories
from h2o_flexgen.models.base import Attend, Model, Weights, block, embed_rows
from h2o_flexgen.planning.plan import DISK
from h2o_flexgen.planning.schedule import SCHEDULES, Moves, Op, Visit
from h2o_flexgen.runtime.weights import WeightStore

OnLayer = Callable[[int, int], None]  # layers that are done, and all of them


def read_text(llm: LLM, ids: Sequence[int], readers: Sequence[Attend], on_layer: OnLayer | None = None) -> None:
    """Each reader has hidden states of its own, which come of its attention. Logits are not made."""
    memories = Memories(llm.device, llm.offload_folder, llm.plan.pin_weight)
    try:
        store = WeightStore(llm.spec, dict.fromkeys(llm.spec.tensors, DISK), llm.source, memories)
        _through_layers(llm, store, memories, ids, readers, on_layer or _nobody)
    finally:
        memories.close()


def _nobody(done: int, total: int) -> None: ...


def _through_layers(
    llm: LLM, store: WeightStore, memories: Memories, ids: Sequence[int], readers: Sequence[Attend], on_layer: OnLayer
) -> None:
    layers, device = len(llm.spec.layers), memories.device
    every_layer = frozenset(range(layers))
    moves = Moves(steps=1, layers=layers, batches=1, slots=1, accelerator=device.accelerator, weights_on_disk=every_layer)
    schedule = SCHEDULES["zigzag"](moves)
    store.prepare(schedule)
    hidden: list[Tensor] = []
    for task in schedule.tasks():
        if llm.spec.layers[task.layer].kind == "head":
            break
        if task.op is Op.READ_W:
            store.read(task)
        elif task.op is Op.LOAD_W:
            store.load(task)
            device.settle()  # what it was read to is read to again for the next layer
        elif task.op is Op.COMPUTE and not task.layer:
            hidden = [_embedded(llm, store, task.visit, ids)] * len(readers)
        elif task.op is Op.COMPUTE:
            weights, kind = store.views(task.visit), llm.spec.layers[task.layer].kind
            for number, attend in enumerate(readers):
                hidden[number] = _layer(llm.model, kind, hidden[number], weights, attend)
            device.settle()
            on_layer(task.layer, layers - 2)


def _embedded(llm: LLM, store: WeightStore, visit: Visit, ids: Sequence[int]) -> Tensor:
    layer, device = llm.spec.layers[visit.layer], llm.device.torch_device
    tokens = torch.tensor([ids], device=device)
    positions = torch.arange(len(ids), device=device).unsqueeze(0)
    weights = store.views(visit)
    if layer.table is None or layer.packed_table is None:
        return llm.model.embed(tokens, positions, weights)
    return embed_rows(llm.model, store.look_up(visit, tokens), positions, weights, layer.table)


def _layer(model: Model, kind: str, hidden: Tensor, weights: Weights, attend: Attend) -> Tensor:
    if kind == "mlp":
        return model.mlp(hidden, weights)
    return block(model, hidden, weights, attend) if kind == "block" else model.attention(hidden, weights, attend)
