"""The weights of a run: those that stay where they are computed with, those in host memory that a device fetches, and those that
are read from the files they lie in. Reads and loads go into rings of slots, in slices that the schedule asks for."""

from __future__ import annotations

from functools import cached_property
from typing import Iterable, Mapping, Protocol

import torch
from torch import Tensor

from h2o_flexgen.memory.device import Device, DeviceTier
from h2o_flexgen.memory.disk import DiskTier, Files, Piece
from h2o_flexgen.memory.host import HostTier
from h2o_flexgen.memory.pack import DTYPES, Layout, Pack, Range, slices
from h2o_flexgen.models.checkpoint import StoredTensor, WeightSource
from h2o_flexgen.planning.model_spec import LayerSpec, ModelSpec, TensorSpec
from h2o_flexgen.planning.plan import DEVICE, DISK, HOST
from h2o_flexgen.planning.schedule import Schedule, Task


class Memories(Protocol):
    """What the stores of a run need of the machine."""

    device: Device
    host: HostTier
    compute: HostTier | DeviceTier  # where things are computed with: the host's memory when there is no accelerator
    files: Files
    disk: DiskTier


class WeightStore:
    def __init__(self, spec: ModelSpec, tiers: Mapping[str, str], source: WeightSource, memories: Memories) -> None:
        self._spec = spec
        self._tiers = tiers
        self._memories = memories
        self._dtype = DTYPES[spec.dtype]
        accelerator = memories.device.accelerator
        self._stays_in = (DEVICE,) if accelerator else (DEVICE, HOST)
        self._stored = source.locate(self._on(DISK))
        self._resident = self._fill(source, self._on(*self._stays_in), memories.compute)
        self._host = self._fill(source, self._on(HOST) if accelerator else [], memories.host)
        self._host_ring: list[Tensor] = []
        self._device_ring: list[Tensor] = []

    # -- once ----------------------------------------------------------------------------------------------------------

    def _on(self, *tiers: str) -> list[TensorSpec]:
        return [tensor for tensor in self._spec.tensors.values() if self._tiers[tensor.name] in tiers]

    def _layout(self, tensors: Iterable[TensorSpec]) -> Layout:
        return Layout.pack({tensor.name: (tensor.shape, self._dtype) for tensor in tensors})

    def _fill(self, source: WeightSource, tensors: list[TensorSpec], memory: HostTier | DeviceTier) -> Pack:
        """Makes or reads the tensors into one arena, holding no more than the arena and, for a device, one tensor on the way."""
        layout = self._layout(tensors)
        pack = Pack(memory.alloc(layout.nbytes) if tensors else torch.empty(0, dtype=torch.uint8), layout)
        stored: dict[str, StoredTensor] = {}
        for tensor in tensors:
            out = pack.view(tensor.name)
            here = out if out.device.type == "cpu" else torch.empty(tensor.shape, dtype=self._dtype)
            if not source.fill(tensor, here):
                stored = stored or source.locate(tensors)
                self._memories.files.read([_piece(stored[tensor.name], here.view(-1))])
            if here is not out:
                out.copy_(here)
        return pack

    # -- for a block ---------------------------------------------------------------------------------------------------

    def prepare(self, schedule: Schedule) -> None:
        """Makes the rings that this schedule turns over."""
        self._schedule = schedule
        self._pieces: dict[tuple[int, int, int], list[Piece]] = {}
        host_bytes = max(layout.nbytes for layout in self._disk_layouts)
        device_bytes = max(layout.nbytes for layout in self._moved_layouts) if self._memories.device.accelerator else 0
        self._host_ring = self._ring(self._host_ring, self._memories.host, host_bytes)
        self._device_ring = self._ring(self._device_ring, self._memories.compute, device_bytes)

    def _ring(self, ring: list[Tensor], memory: HostTier | DeviceTier, nbytes: int) -> list[Tensor]:
        missing = self._schedule.weight_slots - len(ring) if nbytes else 0
        return ring + [memory.alloc(nbytes) for _ in range(missing)]

    @cached_property
    def _disk_layouts(self) -> list[Layout]:
        return [self._layout(self._of(layer, DISK)) for layer in self._spec.layers]

    @cached_property
    def _moved_layouts(self) -> list[Layout]:
        return [self._layout(self._of(layer, HOST, DISK)) for layer in self._spec.layers]

    def _of(self, layer: LayerSpec, *tiers: str) -> list[TensorSpec]:
        return [tensor for _, tensor in layer.tensors if self._tiers[tensor.name] in tiers]

    def _slice(self, layer: int, part: int, *tiers: str) -> list[Range]:
        sizes = {tensor.name: (tensor.numel, tensor.itemsize) for tensor in self._of(self._spec.layers[layer], *tiers)}
        return slices(sizes, self._schedule.slices)[part]

    # -- actions -------------------------------------------------------------------------------------------------------

    def read(self, task: Task) -> int:
        slot, part = self._schedule.weight_slot(*task[1:4]), self._part(task)
        key = (task.layer, part, slot)
        if key not in self._pieces:
            pack = Pack(self._host_ring[slot], self._disk_layouts[task.layer])
            self._pieces[key] = [
                _piece(self._stored[part.name], pack.range(part), part.start) for part in self._slice(task.layer, part, DISK)
            ]
        return self._memories.files.read(self._pieces[key])

    def load(self, task: Task) -> int:
        """Host -> device: what rests in host memory and what the read of the same slice has brought there."""
        slot, part = self._schedule.weight_slot(*task[1:4]), self._part(task)
        target = Pack(self._device_ring[slot], self._moved_layouts[task.layer])
        moved = 0
        for tier in (HOST, DISK):
            read = Pack(self._host_ring[slot], self._disk_layouts[task.layer]) if tier == DISK and self._host_ring else None
            for cut in self._slice(task.layer, part, tier):
                source = (read or self._host).range(cut)
                target.range(cut).copy_(source, non_blocking=True)
                moved += source.nbytes
        return moved

    def _part(self, task: Task) -> int:
        return task.batch if self._schedule.cuts_layers else 0

    def views(self, step: int, layer: int, batch: int) -> dict[str, Tensor]:
        """The layer's weights by local name, where they are computed with."""
        accelerator = self._memories.device.accelerator
        ring = self._device_ring if accelerator else self._host_ring
        layout = (self._moved_layouts if accelerator else self._disk_layouts)[layer]
        moved = Pack(ring[self._schedule.weight_slot(step, layer, batch)], layout) if layout.entries else self._resident
        return {
            local: (self._resident if self._tiers[tensor.name] in self._stays_in else moved).view(tensor.name)
            for local, tensor in self._spec.layers[layer].tensors
        }


def _piece(stored: StoredTensor, out: Tensor, start: int = 0) -> Piece:
    dtype = DTYPES[stored.dtype]
    return Piece(stored.file, stored.offset + start * dtype.itemsize, out, dtype)
