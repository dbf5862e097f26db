"""Adapters of rows: LoRA that single rows have beside the weights of the model. The rows beside them have others, or none.

They are known by names to those that ask, and by numbers to rows: 0 is none. A list of them only grows, so a number stays.
LowRankStore has their thin matrices in the memory of a device that computes with them. They are loaded once, and stay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from h2o_flexgen.checkpoints.adapters import NOT_FOR_ROWS, Adapter, LowRank, adapter_for
from h2o_flexgen.checkpoints.stored_architecture import TensorNames, bare_name
from h2o_flexgen.core.buffer_layout import aligned
from h2o_flexgen.core.files import local_path
from h2o_flexgen.core.hints import did_you_mean, shown
from h2o_flexgen.core.model_spec import LayerSpec, ModelSpec
from h2o_flexgen.core.prefix_groups import MOST_ADAPTERS, OWN_TOKENS
from h2o_flexgen.core.site import AdapterRoom
from h2o_flexgen.formats.kernel_sizes import FLOAT_BYTES
from h2o_flexgen.kernels.matrix import ADAPTED_AT_ONCE, AdaptedMatrix, AdaptedRows, LowRankMatrices
from h2o_flexgen.memory.memories import Memories
from h2o_flexgen.models.base import Weights

COPIES = 4  # of rows and of what is made of them, in fp32: what goes in, what is there, what is added, and both together
EXPERTS = ".experts."


@dataclass(frozen=True)
class RowAdapter:
    """An adapter under the name by which it is asked for."""

    name: str
    adapter: Adapter
    changes: Mapping[str, LowRank]  # by the names of the model's tensors
    working_bytes: int  # that are held while what it adds is made

    @classmethod
    def of(cls, name: str, adapter: Adapter, spec: ModelSpec, names: TensorNames) -> RowAdapter:
        """What is no adapter of this model is refused, and what can only be merged."""
        known = {bare_name(names.usual(tensor)): tensor for tensor in spec.tensors}
        able, changes = _able(spec), dict[str, LowRank]()
        for module, part in adapter.parts().items():
            usual = adapter.usual(module, names)
            tensor = known.get(bare_name(usual))
            if tensor is None and usual.endswith((*names.of_heads,)):
                raise adapter.refused(f"changes {module}, which is computed in parts", adapter.merging)
            if tensor is None:
                raise adapter.refused(f"changes {module}, and {spec.name} has no such matrix: it is of another model")
            if tensor not in able:
                raise adapter.refused(NOT_FOR_ROWS.format(module), adapter.merging)
            shape, found = spec.tensors[tensor].shape, (part.b.shape[0], part.a.shape[1])
            if shape != found:
                raise adapter.refused(f"is of another model: {tensor} has the shape {shape}, and what is to be added {found}")
            changes[tensor] = part
        widest = max((sum(spec.tensors[tensor].shape) for tensor in changes), default=0)
        return cls(name, adapter, changes, ADAPTED_AT_ONCE * FLOAT_BYTES * COPIES * widest)

    @cached_property
    def held(self) -> Mapping[str, int]:
        """Bytes of its matrices where they rest, in fp32, beside each tensor that it changes."""
        return {
            name: sum(aligned(FLOAT_BYTES * prod(half.shape)) for half in (part.a, part.b))
            for name, part in self.changes.items()
        }


def _able(spec: ModelSpec) -> frozenset[str]:
    """The matrices that may have adapters beside them: those of linear layers of blocks, which all tokens pass."""
    found = set[str]()
    for layer in spec.layers:
        shares, tensors = dict(layer.products), dict(layer.tensors)
        whole = (own for own, share in shares.items() if share == 1 and EXPERTS not in f".{own}")
        found |= {tensors[own].name for own in whole if layer.block is not None and not tensors[own].is_never_packed}
    return frozenset(found)


class RowAdapters:
    """All that rows of a model may have."""

    def __init__(self) -> None:
        self._each: list[RowAdapter] = []

    def __iter__(self) -> Iterator[RowAdapter]:
        return iter(self._each)

    def __len__(self) -> int:
        return len(self._each)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(one.name for one in self._each)

    @property
    def identities(self) -> tuple[str, ...]:
        """What identifies each of them, by number less one."""
        return tuple(one.adapter.identity for one in self._each)

    @property
    def room(self) -> AdapterRoom:
        """What they take: their matrices, and what is held while one of them is multiplied with."""
        beside = Counter[str]()
        for one in self._each:
            beside.update(one.held)
        working = max((one.working_bytes for one in self._each), default=0)
        return AdapterRoom(tuple(beside.items()), working, len(self._each))

    def number(self, name: str | None) -> int:
        """The number of the adapter with this name; 0 for none."""
        if name is None:
            return 0
        if name not in self.names:
            known = f"known are {', '.join(self.names)}" if self._each else "there are none; give some: --lora NAME=PATH"
            raise ValueError(
                f"lora_name is {shown(name)}, which is no adapter here{did_you_mean(name, self.names) or f'; {known}'}"
            )
        return self.names.index(name) + 1

    def add(self, name: str, folder: str | Path, spec: ModelSpec, names: TensorNames, model: Path | None = None) -> None:
        """Takes one more. The same folder under a known name is no new one. `model`: its folder or file."""
        place = local_path(folder)
        known = next((one for one in self._each if one.name == name), None)
        if known is not None:
            if known.adapter.folder.resolve() != place.resolve():
                raise ValueError(f"adapter {shown(name)} is {known.adapter.folder}, not {place}; give another name")
            return
        if len(self._each) == MOST_ADAPTERS:
            raise ValueError(f"adapter {shown(name)} is one too many; {MOST_ADAPTERS} can be held")
        if spec.vocab > OWN_TOKENS:
            raise ValueError(f"{spec.name} has {spec.vocab} tokens, and adapters of requests need {OWN_TOKENS} at most")
        self._each.append(RowAdapter.of(name, adapter_for(place, model, name), spec, names))


# -- their matrices on a device --------------------------------------------------------------------------------------------


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
