"""LowRankStore: the thin matrices of the adapters that rows have, in the memory of a device that computes with them. They are
loaded once, and stay."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from h2o_flexgen.core.buffer_layout import aligned
from h2o_flexgen.core.model_spec import LayerSpec, ModelSpec
from h2o_flexgen.engine.row_adapters import RowAdapter, RowAdapters
from h2o_flexgen.kernels.adapted_matrix import AdaptedMatrix, AdaptedRows, LowRankMatrices
from h2o_flexgen.memory.memories import Memories
from h2o_flexgen.models.base import Weights


class LowRankStore:
    def __init__(self, adapters: RowAdapters, spec: ModelSpec, memories: Memories) -> None:
        """`spec`: of the layers that this device computes."""
        self._adapters, self._spec, self._memories = adapters, spec, memories
        self._held: dict[str, dict[int, LowRankMatrices]] = {}  # by the names of tensors, and by the numbers of adapters
        self._loaded = 0

    def load(self) -> None:
        """Loads those that have come since the last call."""
        for number, adapter in enumerate(self._adapters, start=1):
            if number > self._loaded:
                self._load(number, adapter)
                self._loaded = number

    def _load(self, number: int, adapter: RowAdapter) -> None:
        own = {name: part for name, part in adapter.changes.items() if name in self._spec.tensors}
        if not own:
            return
        room = self._memories.compute.alloc(sum(adapter.held[name] for name in own))
        for name, part in own.items():
            (a, b), room = _placed(part.read(), room)
            self._held.setdefault(name, {})[number] = LowRankMatrices(a, b, part.factor)

    def beside(self, layer: LayerSpec, weights: Weights, rows: AdaptedRows) -> Weights:
        """The weights of a layer for these rows."""
        present, changed = {*rows.numbers}, dict[str, AdaptedMatrix]()
        for own, tensor in layer.tensors:
            there = {number: each for number, each in self._held.get(tensor.name, {}).items() if number in present}
            if there:
                changed[own] = AdaptedMatrix(weights[own], rows, there)
        return {**weights, **changed} if changed else weights


def _placed(halves: Sequence[Tensor], room: Tensor) -> tuple[Sequence[Tensor], Tensor]:
    """Copies matrices to the beginning of a region. -> them there, and the rest of it"""
    there = []
    for half in halves:
        there.append(room[: half.nbytes].view(torch.float32).view(half.shape).copy_(half))
        room = room[aligned(half.nbytes) :]
    return there, room
