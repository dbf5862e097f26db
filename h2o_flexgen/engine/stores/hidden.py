"""The hidden states of a block between layers: kept where they are, or moved to a home in host memory or on disk and back.

States that move come through a buffer for each visit. What a layer makes of them part by part is written in the same buffer.

Where several devices compute, states without such a home are passed on: the device of a layer leaves them in a region of the
batch, from which they are copied to a region of the batch on the next device.
"""

from __future__ import annotations

from contextlib import ExitStack

import numpy
import torch
from torch import Tensor

from h2o_flexgen.core.buffer_layout import aligned, hidden_bytes, states_start
from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.site import DISK
from h2o_flexgen.core.workload import Block
from h2o_flexgen.kernels.raw_memory import numpy_of
from h2o_flexgen.memory.disk import DiskRegion
from h2o_flexgen.memory.memories import Memories, Ring
from h2o_flexgen.memory.pack import TORCH_DTYPES
from h2o_flexgen.schedule.ops import Data, Task
from h2o_flexgen.schedule.schedule import Schedule


class HiddenStore:
    def __init__(self, spec: ModelSpec, block: Block, schedule: Schedule, memories: Memories) -> None:
        self._spec = spec
        self._schedule = schedule
        self._memories = memories
        self._dtype = TORCH_DTYPES[spec.dtype]
        self._now: dict[int, Tensor] = {}  # batch -> its states in the memory that computes with them
        self._shapes: dict[int, torch.Size] = {}
        self._on_host: dict[int, Tensor] = {}
        self._on_disk: dict[int, DiskRegion] = {}
        self._left: dict[tuple[int, int], Tensor] = {}  # (layer, batch) -> where a device leaves states for the next
        self._found: dict[tuple[int, int], Tensor] = {}  # where the next device finds them
        self._views: dict[int, tuple[int, Tensor]] = {}  # the last one of each region that stays as long as this store
        self._in_buffers: set[int] = set()  # batches with states that are written in their buffer already
        sizes = {
            place: hidden_bytes(spec, batch)
            for place, batch in enumerate(block.batches)
            if schedule.traffic.moves_hidden(place)
        }
        passed = {
            (layer, place): hidden_bytes(spec, batch)
            for layer in range(schedule.traffic.layers)
            for place, batch in enumerate(block.batches)
            if schedule.traffic.passes_on(layer, place)
        }
        with ExitStack() as held:  # if a reservation fails, e.g. on a full disk, earlier ones are released
            self._allocate(held, sizes)
            self._allocate_passing(held, passed)
            self._held = held.pop_all()

    def _allocate(self, held: ExitStack, sizes: dict[int, int]) -> None:
        traffic, memories = self._schedule.traffic, self._memories
        for batch, nbytes in sizes.items():
            if traffic.hidden[batch] == DISK:
                self._on_disk[batch] = memories.disk.alloc(nbytes)
                held.callback(memories.disk.free, self._on_disk[batch])
            else:
                self._on_host[batch] = memories.host.alloc(nbytes)
                held.callback(memories.host.free, self._on_host[batch])
        buffers, largest = self._schedule.buffers_of(Data.HIDDEN), max(sizes.values(), default=0)
        self._host_rings, self._device_rings = list[Ring](), list[Ring]()
        for own in memories.of_devices:
            self._host_rings.append(Ring(memories.host, buffers, largest if self._on_disk else 0))
            held.callback(self._host_rings[-1].free)
            self._device_rings.append(Ring(own.compute, buffers, largest if traffic.accelerator else 0))
            held.callback(self._device_rings[-1].free)

    def _allocate_passing(self, held: ExitStack, sizes: dict[tuple[int, int], int]) -> None:
        for place, nbytes in sizes.items():
            for regions, layer in ((self._left, place[0]), (self._found, place[0] + 1)):
                memory = self._memories.of_devices[self._device(layer)].compute
                regions[place] = memory.alloc(nbytes)
                held.callback(memory.free, regions[place])

    def _buffer(self, task: Task) -> int:
        return self._schedule.buffer_of(Data.HIDDEN, task.visit)

    def _device(self, layer: int) -> int:
        return self._schedule.traffic.lanes.device(layer)

    def close(self) -> None:
        self._held.close()
        for kept in (self._now, self._left, self._found, self._views):
            kept.clear()

    def take(self, batch: int) -> Tensor:
        return self._now[batch]

    def may_be_overwritten(self, batch: int) -> bool:
        """Whether a layer may write its outcome over a batch's states. A buffer through which states came is free for others
        once the layer is over. The outcome still waits to be moved home then, and so must lie elsewhere."""
        return not self._schedule.traffic.moves_hidden(batch)

    def room(self, task: Task, hidden: Tensor | None, tokens: int, width: int) -> Tensor | None:
        """The place for what a layer makes part by part of a batch's states, (tokens, width): over them, since each part is
        needed no more when its outcome is there. None if it needs memory of its own."""
        shape = torch.Size((tokens, width))
        if self._schedule.traffic.moves_hidden(task.batch):
            at = self._device(task.layer)
            if not self._device_rings[at] and hidden is not None and width > hidden.shape[-1]:
                return None  # parts that wait lie where it would be written: the disk's states begin at the start
            self._in_buffers.add(task.batch)
            ring = self._device_rings[at] or self._host_rings[at]
            return self._view(ring[self._buffer(task)], shape)
        return hidden.view(shape) if hidden is not None and hidden.shape[-1] == width else None

    def put(self, task: Task, hidden: Tensor) -> None:
        """Keeps hidden states. If they go home from a device, or to another device, they are first copied to their buffer,
        unless they are there. The layer's own memory is then free when the layer is done. Otherwise it were free only after the
        copy home, and layers may be launched far ahead of that."""
        ring = self._device_rings[self._device(task.layer)]
        if task.batch in self._in_buffers:
            self._in_buffers.remove(task.batch)
        elif ring and self._schedule.traffic.moves_hidden(task.batch):
            hidden = self._view(ring[self._buffer(task)], hidden.shape).copy_(hidden)
        elif (left := self._left.get((task.layer, task.batch))) is not None:
            hidden = self._view(left, hidden.shape).copy_(hidden)
        self._now[task.batch] = hidden

    # -- actions -------------------------------------------------------------------------------------------------------

    def pass_on(self, task: Task) -> int:
        """Device -> the device of the next layer."""
        hidden = self._now[task.batch]
        found = self._view(self._found[task.layer, task.batch], hidden.shape)
        self._now[task.batch] = found.copy_(hidden, non_blocking=True)
        return hidden.nbytes

    def store(self, task: Task) -> int:
        hidden = self._now.pop(task.batch).contiguous()
        self._shapes[task.batch] = hidden.shape
        if task.batch in self._on_disk:
            self._write(task, hidden)
        else:
            self._view(self._on_host[task.batch], hidden.shape).copy_(hidden, non_blocking=True)
        return hidden.nbytes

    def _write(self, task: Task, hidden: Tensor) -> None:
        device = self._device(task.layer)
        if self._device_rings[device]:
            staged = self._view(self._host_rings[device][self._buffer(task)], hidden.shape)
            hidden = staged.copy_(hidden, non_blocking=True)
            self._memories.of_devices[device].device.finish()  # the CPU reads it now
        scratch = self._memories.disk.scratch(hidden.nbytes)
        there = scratch[: hidden.nbytes].view(self._dtype).view(hidden.shape)  # the calling thread's, for now
        numpy.copyto(numpy_of(there, writes=True), numpy_of(hidden))
        self._memories.disk.write_from(self._on_disk[task.batch], 0, scratch)

    def load(self, task: Task) -> int:
        shape, slot, device = self._shapes[task.batch], self._buffer(task), self._device(task.layer)
        if task.batch in self._on_disk:
            region = self._host_rings[device][slot]
            hidden = self._view(region, shape)
            self._memories.of_devices[device].device.finish()  # the CPU now writes where earlier copies read
            self._memories.disk.read_into(self._on_disk[task.batch], 0, region[: aligned(hidden.nbytes)])
        else:
            hidden = self._view(self._on_host[task.batch], shape)
        if self._device_rings[device]:
            there = self._view(self._device_rings[device][slot], shape, self._start(task, shape))
            hidden = there.copy_(hidden, non_blocking=True)
        self._now[task.batch] = hidden
        return hidden.nbytes

    def _start(self, task: Task, shape: torch.Size) -> int:
        """The first value in a buffer of a device, so that a layer may write what it makes of them from the start."""
        spec = self._spec.forms[-1] if self._schedule.traffic.is_of_prompts(task.step) else self._spec
        layer = spec.layers[task.layer]
        return 0 if layer.makes_logits else states_start(shape[:-1].numel(), shape[-1], layer.out_width)

    def _view(self, region: Tensor, shape: torch.Size, start: int = 0) -> Tensor:
        """Hidden states in a region of memory, from a value on; steps of as many rows have the same view."""
        known = self._views.get(id(region))
        if known is None or known[0] != start or known[1].shape != shape:
            values = region[start * self._dtype.itemsize : (start + shape.numel()) * self._dtype.itemsize]
            known = self._views[id(region)] = start, values.view(self._dtype).view(shape)
        return known[1]
