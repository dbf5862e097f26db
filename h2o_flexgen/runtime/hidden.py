"""The hidden states of a block between layers: kept where they are, or carried to a home in host memory or on disk and back."""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from h2o_flexgen.memory.disk import DiskRegion, numpy_of
from h2o_flexgen.memory.pack import DTYPES
from h2o_flexgen.memory.tier import aligned
from h2o_flexgen.planning.model_spec import ModelSpec
from h2o_flexgen.planning.plan import DISK
from h2o_flexgen.planning.schedule import Schedule, Task
from h2o_flexgen.planning.workload import Batch, Block
from h2o_flexgen.runtime.weights import Memories


class HiddenStore:
    def __init__(self, spec: ModelSpec, block: Block, schedule: Schedule, memories: Memories) -> None:
        self._schedule = schedule
        self._memories = memories
        self._disk = memories.disk
        self._dtype = DTYPES[spec.dtype]
        self._now: dict[int, Tensor] = {}  # batch -> where it is computed with
        self._shapes: dict[int, torch.Size] = {}
        self._homes: dict[int, Tensor | DiskRegion] = {}
        self._host_ring: list[Tensor] = []
        self._device_ring: list[Tensor] = []
        sizes = {place: _bytes(spec, batch) for place, batch in enumerate(block.batches) if schedule.moves.moves_hidden(place)}
        try:
            self._allocate(sizes)
        except BaseException:  # a full disk, for one: what was reserved so far goes back
            self.close()
            raise

    def _allocate(self, sizes: dict[int, int]) -> None:
        for batch, nbytes in sizes.items():
            self._homes[batch] = (self._disk if self._on_disk(batch) else self._memories.host).alloc(nbytes)
        slots, largest = self._schedule.slots if sizes else 0, max(sizes.values(), default=0)
        if any(map(self._on_disk, sizes)):
            self._host_ring = [self._memories.host.alloc(largest) for _ in range(slots)]
        if self._memories.device.accelerator:
            self._device_ring = [self._memories.compute.alloc(largest) for _ in range(slots)]

    def close(self) -> None:
        for batch, home in self._homes.items():
            (self._disk if self._on_disk(batch) else self._memories.host).free(home)  # type: ignore[arg-type]
        for region in self._host_ring:
            self._memories.host.free(region)
        for region in self._device_ring:
            self._memories.compute.free(region)
        self._homes.clear()
        self._now.clear()

    def take(self, batch: int) -> Tensor:
        return self._now[batch]

    def put(self, batch: int, hidden: Tensor) -> None:
        self._now[batch] = hidden

    # -- actions -------------------------------------------------------------------------------------------------------

    def store(self, task: Task) -> int:
        hidden = self._now.pop(task.batch).contiguous()
        self._shapes[task.batch] = hidden.shape
        home = self._homes[task.batch]
        if isinstance(home, Tensor):
            self._view(home, hidden.shape).copy_(hidden, non_blocking=True)
            self._memories.device.keep(hidden)
            return hidden.nbytes
        if self._device_ring:
            staged = self._view(self._host_ring[self._schedule.slot(*task[1:4])], hidden.shape)
            staged.copy_(hidden)  # waits: the disk reads host memory
            hidden = staged
        scratch = self._disk.scratch(hidden.nbytes)
        numpy.copyto(numpy_of(self._view(scratch, hidden.shape)), numpy_of(hidden))
        self._disk.write_from(home, 0, scratch)
        return hidden.nbytes

    def load(self, task: Task) -> int:
        shape, home, slot = self._shapes[task.batch], self._homes[task.batch], self._schedule.slot(*task[1:4])
        region = home
        if isinstance(region, DiskRegion):
            region = self._host_ring[slot]
            self._disk.read_into(self._homes[task.batch], 0, region[: aligned(self._view(region, shape).nbytes)])  # type: ignore[arg-type]
        hidden = self._view(region, shape)
        if self._device_ring:
            hidden = self._view(self._device_ring[slot], shape).copy_(hidden, non_blocking=True)
        self._now[task.batch] = hidden
        return hidden.nbytes

    def _view(self, region: Tensor, shape: torch.Size) -> Tensor:
        return region[: shape.numel() * self._dtype.itemsize].view(self._dtype).view(shape)

    def _on_disk(self, batch: int) -> bool:
        return self._schedule.moves.hidden[batch] == DISK


def _bytes(spec: ModelSpec, batch: Batch) -> int:
    return batch.size * batch.prompt_len * spec.widest * spec.itemsize
