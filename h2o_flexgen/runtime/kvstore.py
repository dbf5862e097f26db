"""The KV of a block: a home for every (layer, batch) on the tier where the placement puts it, and the slots through which
those that live elsewhere pass while they are computed with.

In host memory next to the CPU an image lies head by head, as CPU attention wants it; where a device fetches it, and on disk,
token by token, so that what is held is one range from the start and a step's new tokens are one range as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy
from torch import Tensor

from h2o_flexgen.kv.cache import KVCache
from h2o_flexgen.kv.policy import KVPolicy
from h2o_flexgen.memory.device import DeviceTier
from h2o_flexgen.memory.disk import CHUNK_BYTES, DiskRegion, DiskTier, numpy_of
from h2o_flexgen.memory.host import HostTier
from h2o_flexgen.memory.pack import DTYPES
from h2o_flexgen.memory.tier import aligned
from h2o_flexgen.planning.model_spec import ModelSpec
from h2o_flexgen.planning.plan import DISK, HOST
from h2o_flexgen.planning.schedule import Schedule, Task
from h2o_flexgen.planning.workload import Batch, Block
from h2o_flexgen.runtime.rows import BatchRows
from h2o_flexgen.runtime.weights import Memories

SlotAction = Callable[["Unit", numpy.ndarray, int, int], None]


@dataclass
class Unit:
    """The KV of one (layer, batch), as it lies at home."""

    tier: str
    home: Tensor | DiskRegion
    batch: Batch  # the rows in it
    generation: int = 0  # how often its rows were filled up
    changed: tuple[int, int] = (0, 0)  # slots that the last COMPUTE wrote


class KVStore:
    def __init__(self, spec: ModelSpec, policy: KVPolicy, block: Block, schedule: Schedule, memories: Memories) -> None:
        self._spec = spec
        self._policy = policy
        self._block = block
        self._schedule = schedule
        self._memories = memories
        self._disk = memories.disk
        self._dtype = DTYPES[spec.dtype]
        self._accelerator = memories.device.accelerator
        self._units: dict[tuple[int, int], Unit] = {}
        self._host_ring: list[Tensor] = []
        self._device_ring: list[Tensor] = []
        try:
            self._allocate()
        except BaseException:  # a full disk, for one: what was reserved so far goes back
            self.close()
            raise

    def _allocate(self) -> None:
        moves = self._schedule.moves
        for place, tier in moves.kv.items():
            batch = self._block.batches[place[1]]
            self._units[place] = Unit(tier, self._home(tier, batch), batch)
        self._host_ring = self._ring(self._memories.host, DISK in moves.kv.values())
        moved = any(moves.moves_kv(*place) for place in self._units)
        self._device_ring = self._ring(self._memories.compute, moved and self._accelerator)

    def close(self) -> None:
        for unit in self._units.values():
            self._memory_of(unit.tier).free(unit.home)  # type: ignore[arg-type]
        for region in self._host_ring:
            self._memories.host.free(region)
        for region in self._device_ring:
            self._memories.compute.free(region)
        self._units.clear()

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def capacity(self, batch: int) -> int:
        return self._policy.capacity(self._block.batches[batch], self._block.gen_len)

    def _image_bytes(self, batch: Batch) -> int:
        return self._policy.capacity(batch, self._block.gen_len) * batch.size * self._spec.kv_bytes_per_slot

    def _row_bytes(self, batch: Batch) -> int:
        """One slot of all rows, as it lies on disk: padded, so that any range of slots can be read and written directly."""
        return aligned(batch.size * self._spec.kv_bytes_per_slot)

    def _home(self, tier: str, batch: Batch) -> Tensor | DiskRegion:
        nbytes = self._image_bytes(batch)
        if tier == DISK:
            nbytes = self._policy.capacity(batch, self._block.gen_len) * self._row_bytes(batch)
        return self._memory_of(tier).alloc(nbytes)

    def _memory_of(self, tier: str) -> DiskTier | HostTier | DeviceTier:
        if tier == DISK:
            return self._disk
        return self._memories.host if tier == HOST else self._memories.compute

    def _ring(self, memory: HostTier | DeviceTier, needed: bool) -> list[Tensor]:
        """Zeroed: slots that a row does not fill are masked, but 0 * NaN of an earlier user would still be NaN."""
        nbytes = max(self._image_bytes(batch) for batch in self._block.batches)
        return [memory.alloc(nbytes).zero_() for _ in range(self._schedule.slots)] if needed else []

    def _image(self, region: Tensor, batch: int) -> Tensor:
        """(2, rows, kv_heads, slots, head_dim) over the bytes of a region."""
        rows, slots = self._block.batches[batch].size, self.capacity(batch)
        heads, dim = self._spec.kv_heads, self._spec.head_dim
        values = region[: 2 * rows * heads * slots * dim * self._dtype.itemsize].view(self._dtype)
        if self._accelerator:
            return values.view(slots, 2, rows, heads, dim).permute(1, 2, 3, 0, 4)
        return values.view(2, rows, heads, slots, dim)

    # -- actions -------------------------------------------------------------------------------------------------------

    def open(self, task: Task, rows: BatchRows) -> KVCache:
        """For COMPUTE: the cache, with the rows that are still alive."""
        unit = self._units[task.layer, task.batch]
        cache = KVCache(self._image(self._working_region(task, unit), task.batch))
        unit.changed = self._policy.changed(rows.batch, task.step)
        if task.step and unit.generation != rows.generation:
            cache.keep_rows(rows.kept, self._policy.held(unit.batch, task.step))
            unit.changed = (0, unit.changed[1])
        unit.batch, unit.generation = rows.batch, rows.generation
        return cache

    def _working_region(self, task: Task, unit: Unit) -> Tensor:
        if not self._schedule.moves.moves_kv(task.layer, task.batch):
            assert isinstance(unit.home, Tensor)
            return unit.home
        return (self._device_ring or self._host_ring)[self._schedule.slot(*task[1:4])]

    def load(self, task: Task) -> int:
        """Host -> device: all that is held, one range from the start."""
        unit = self._units[task.layer, task.batch]
        return self._transfer(task, unit, 0, self._policy.held(unit.batch, task.step), to_device=True)

    def store(self, task: Task) -> int:
        """Device -> host: what the step changed."""
        unit = self._units[task.layer, task.batch]
        return self._transfer(task, unit, *unit.changed, to_device=False)

    def _transfer(self, task: Task, unit: Unit, first: int, last: int, to_device: bool) -> int:
        slot = self._schedule.slot(*task[1:4])
        host, device = self._host_ring[slot] if unit.tier == DISK else unit.home, self._device_ring[slot]
        assert isinstance(host, Tensor)
        per_slot = self._block.batches[task.batch].size * self._spec.kv_bytes_per_slot
        source, target = (host, device) if to_device else (device, host)
        part = slice(first * per_slot, last * per_slot)
        target[part].copy_(source[part], non_blocking=True)
        return (last - first) * per_slot

    def read(self, task: Task) -> int:
        """Disk -> host: all that is held."""
        unit = self._units[task.layer, task.batch]
        return self._disk_slots(task, unit, 0, self._policy.held(unit.batch, task.step), self._read_slots)

    def write(self, task: Task) -> int:
        """Host -> disk: what the step changed."""
        unit = self._units[task.layer, task.batch]
        return self._disk_slots(task, unit, *unit.changed, self._write_slots)

    def _disk_slots(self, task: Task, unit: Unit, first: int, last: int, action: SlotAction) -> int:
        """Cuts a range of slots into chunks that the disk threads work on side by side."""
        assert isinstance(unit.home, DiskRegion)
        image = numpy_of(self._image(self._host_ring[self._schedule.slot(*task[1:4])], task.batch))
        chunk = max(1, CHUNK_BYTES // self._row_bytes(unit.batch))
        cuts = [(unit, image, start, min(start + chunk, last)) for start in range(first, last, chunk)]
        self._memories.files.each(lambda cut: action(*cut), cuts)
        return (last - first) * unit.batch.size * self._spec.kv_bytes_per_slot

    def _read_slots(self, unit: Unit, image: numpy.ndarray, first: int, last: int) -> None:
        stride = self._row_bytes(unit.batch)
        scratch = self._disk.scratch((last - first) * stride)
        self._disk.read_into(unit.home, first * stride, scratch)  # type: ignore[arg-type]
        numpy.copyto(image[:, : unit.batch.size, :, first:last], self._slots_of(scratch, unit.batch, last - first))

    def _write_slots(self, unit: Unit, image: numpy.ndarray, first: int, last: int) -> None:
        stride = self._row_bytes(unit.batch)
        scratch = self._disk.scratch((last - first) * stride)
        numpy.copyto(self._slots_of(scratch, unit.batch, last - first), image[:, : unit.batch.size, :, first:last])
        self._disk.write_from(unit.home, first * stride, scratch)  # type: ignore[arg-type]

    def _slots_of(self, scratch: Tensor, batch: Batch, slots: int) -> numpy.ndarray:
        """Bytes as they lie on disk, seen as an image: (2, rows, kv_heads, slots, head_dim)."""
        shape = (slots, 2, batch.size, self._spec.kv_heads, self._spec.head_dim)
        values = batch.size * self._spec.kv_bytes_per_slot // self._spec.itemsize
        raw = numpy_of(scratch.view(self._dtype)).reshape(slots, -1)[:, :values]
        image: numpy.ndarray = raw.reshape(shape).transpose(1, 2, 3, 0, 4)
        return image
