"""The hidden states of a block between layers: kept where they are, or carried to a home in host memory or on disk and back."""

from __future__ import annotations

from contextlib import ExitStack

import numpy
import torch
from torch import Tensor

from h2o_flexgen.core.layout import aligned, hidden_bytes
from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.tiers import DISK
from h2o_flexgen.core.workload import Block
from h2o_flexgen.kernels.raw_memory import numpy_of
from h2o_flexgen.memory.disk import DiskRegion
from h2o_flexgen.memory.memories import Memories, Ring
from h2o_flexgen.memory.pack import DTYPES
from h2o_flexgen.schedule.schedule import Schedule
from h2o_flexgen.schedule.task import Task


class HiddenStore:
    def __init__(self, spec: ModelSpec, block: Block, schedule: Schedule, memories: Memories) -> None:
        self._schedule = schedule
        self._memories = memories
        self._dtype = DTYPES[spec.dtype]
        self._now: dict[int, Tensor] = {}  # batch -> its states where they are computed with
        self._shapes: dict[int, torch.Size] = {}
        self._on_host: dict[int, Tensor] = {}
        self._on_disk: dict[int, DiskRegion] = {}
        self._views: dict[int, Tensor] = {}  # the last one of each region that stays as long as this store
        sizes = {
            place: hidden_bytes(spec, batch)
            for place, batch in enumerate(block.batches)
            if schedule.traffic.moves_hidden(place)
        }
        with ExitStack() as held:  # if a reservation fails, e.g. on a full disk, earlier ones are released
            self._allocate(held, sizes)
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
        buffers, largest = self._schedule.buffers, max(sizes.values(), default=0)
        self._host_ring = Ring(memories.host, buffers, largest if self._on_disk else 0)
        held.callback(self._host_ring.free)
        self._device_ring = Ring(memories.compute, buffers, largest if traffic.accelerator else 0)
        held.callback(self._device_ring.free)

    def close(self) -> None:
        self._held.close()
        self._now.clear()
        self._views.clear()

    def take(self, batch: int) -> Tensor:
        return self._now[batch]

    def put(self, task: Task, hidden: Tensor) -> None:
        """Keeps hidden states. Those that go home from a device are first copied to their buffer: the layer's own memory is
        then free when the layer is done, not only after the copy, which the launching of layers may run far ahead of."""
        if self._device_ring and self._schedule.traffic.moves_hidden(task.batch):
            hidden = self._view(self._device_ring[self._schedule.buffer(task.visit)], hidden.shape).copy_(hidden)
        self._now[task.batch] = hidden

    # -- actions -------------------------------------------------------------------------------------------------------

    def store(self, task: Task) -> int:
        hidden = self._now.pop(task.batch).contiguous()
        self._shapes[task.batch] = hidden.shape
        if task.batch in self._on_disk:
            self._write(task, hidden)
        else:
            self._view(self._on_host[task.batch], hidden.shape).copy_(hidden, non_blocking=True)
        return hidden.nbytes

    def _write(self, task: Task, hidden: Tensor) -> None:
        if self._device_ring:
            staged = self._view(self._host_ring[self._schedule.buffer(task.visit)], hidden.shape)
            hidden = staged.copy_(hidden, non_blocking=True)
            self._memories.device.finish()  # the processor reads it now
        scratch = self._memories.disk.scratch(hidden.nbytes)
        there = scratch[: hidden.nbytes].view(self._dtype).view(hidden.shape)  # the calling thread's, for now
        numpy.copyto(numpy_of(there, writes=True), numpy_of(hidden))
        self._memories.disk.write_from(self._on_disk[task.batch], 0, scratch)

    def load(self, task: Task) -> int:
        shape, slot = self._shapes[task.batch], self._schedule.buffer(task.visit)
        if task.batch in self._on_disk:
            hidden = self._view(self._host_ring[slot], shape)
            self._memories.device.finish()  # the processor writes now where earlier copies read
            self._memories.disk.read_into(self._on_disk[task.batch], 0, self._host_ring[slot][: aligned(hidden.nbytes)])
        else:
            hidden = self._view(self._on_host[task.batch], shape)
        if self._device_ring:
            hidden = self._view(self._device_ring[slot], shape).copy_(hidden, non_blocking=True)
        self._now[task.batch] = hidden
        return hidden.nbytes

    def _view(self, region: Tensor, shape: torch.Size) -> Tensor:
        """Hidden states in a region of memory; steps of as many rows have the same view."""
        known = self._views.get(id(region))
        if known is None or known.shape != shape:
            known = self._views[id(region)] = region[: shape.numel() * self._dtype.itemsize].view(self._dtype).view(shape)
        return known
