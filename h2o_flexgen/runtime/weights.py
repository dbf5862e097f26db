"""The weights of a run: those that stay where they are computed with, those in host memory that a device fetches, and those
that are read from the files they lie in. Reads and loads go into rings of slots, in slices that the schedule asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from h2o_flexgen.memory.device import Device, DeviceTier
from h2o_flexgen.memory.disk import DiskTier, Files, Piece
from h2o_flexgen.memory.host import HostTier
from h2o_flexgen.memory.pack import DTYPES, Entry, Layout, Pack, Range, slices
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

    @property
    def files(self) -> tuple[Path, ...]:
        """Those that are read from in every step."""
        return tuple(dict.fromkeys(stored.file for stored in self._stored.values()))

    # -- once ----------------------------------------------------------------------------------------------------------

    def _on(self, *tiers: str) -> list[TensorSpec]:
        return [tensor for tensor in self._spec.tensors.values() if self._tiers[tensor.name] in tiers]

    def _layout(self, tensors: Iterable[TensorSpec]) -> Layout:
        return Layout.pack({tensor.name: Entry(0, tensor.shape, self._dtype, tensor.codec) for tensor in tensors})

    def _fill(self, source: WeightSource, tensors: list[TensorSpec], memory: HostTier | DeviceTier) -> Pack:
        """Makes or reads the tensors into one arena; besides it, only one tensor on its way to a device is ever held."""
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
        """Makes the rings that this schedule turns over. Pieces, copies and views into them are made once and kept."""
        self._schedule = schedule
        self._pieces: dict[Place, list[Piece]] = {}
        self._copies: dict[Place, list[tuple[Tensor, Tensor]]] = {}
        self._views: dict[tuple[int, int], dict[str, Tensor]] = {}
        accelerator = self._memories.device.accelerator
        moved = self._moved_layouts if accelerator else []
        self._host_ring = self._ring(self._host_ring, self._memories.host, self._disk_layouts)
        self._device_ring = self._ring(self._device_ring, self._memories.compute, moved)

    def _ring(self, ring: list[Tensor], memory: HostTier | DeviceTier, layouts: list[Layout]) -> list[Tensor]:
        nbytes = max((layout.nbytes for layout in layouts), default=0)
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

    def _slice(self, place: Place, tier: str) -> list[Range]:
        tensors = self._of(self._spec.layers[place.layer], tier)
        sizes = {tensor.name: (tensor.numel, tensor.itemsize) for tensor in tensors}
        return slices(sizes, self._schedule.slices)[place.part]

    # -- actions -------------------------------------------------------------------------------------------------------

    def read(self, task: Task) -> int:
        """Disk -> host."""
        place = self._place(task)
        if place not in self._pieces:
            target = self._read_pack(place)
            self._pieces[place] = [
                _piece(self._stored[cut.name], target.range(cut), cut.start) for cut in self._slice(place, DISK)
            ]
        return self._memories.files.read(self._pieces[place])

    def load(self, task: Task) -> int:
        """Host -> device: what rests in host memory, and what the read of the same slice has brought there."""
        place = self._place(task)
        if place not in self._copies:
            target = Pack(self._device_ring[place.slot], self._moved_layouts[place.layer])
            resting = [(target.range(cut), self._host.range(cut)) for cut in self._slice(place, HOST)]
            read = [(target.range(cut), self._read_pack(place).range(cut)) for cut in self._slice(place, DISK)]
            self._copies[place] = resting + read
        for device, host in self._copies[place]:
            device.copy_(host, non_blocking=True)
        return sum(host.nbytes for _, host in self._copies[place])

    def _place(self, task: Task) -> Place:
        part = task.batch if self._schedule.cuts_layers else 0
        return Place(task.layer, part, self._schedule.weight_slot(task.step, task.layer, task.batch))

    def _read_pack(self, place: Place) -> Pack:
        return Pack(self._host_ring[place.slot], self._disk_layouts[place.layer])

    def views(self, step: int, layer: int, batch: int) -> dict[str, Tensor]:
        """The layer's weights by local name, where they are computed with."""
        slot = self._schedule.weight_slot(step, layer, batch)
        if (layer, slot) not in self._views:
            accelerator = self._memories.device.accelerator
            ring, layouts = (self._device_ring, self._moved_layouts) if accelerator else (self._host_ring, self._disk_layouts)
            moved = Pack(ring[slot], layouts[layer]) if layouts[layer].entries else self._resident
            self._views[layer, slot] = {
                local: (self._resident if self._tiers[tensor.name] in self._stays_in else moved).view(tensor.name)
                for local, tensor in self._spec.layers[layer].tensors
            }
        return self._views[layer, slot]


class Place(NamedTuple):
    """A slice of a layer in a slot of a ring."""

    layer: int
    part: int
    slot: int


def _piece(stored: StoredTensor, out: Tensor, start: int = 0) -> Piece:
    dtype = DTYPES[stored.dtype]
    return Piece(stored.file, stored.offset + start * dtype.itemsize, out, dtype)
