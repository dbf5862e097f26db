"""The KV of a block: a home for every (layer, batch) on the tier where the placement puts it, and the slots through which
those that live elsewhere pass while they are computed with.

In host memory next to the CPU an image lies head by head, as CPU attention wants it; where a device fetches it, and on disk,
token by token, so that what is held is one range from the start and a step's new tokens are one range as well.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod

import numpy
import torch
from torch import Tensor

from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.tiers import DISK, HOST
from h2o_flexgen.core.workload import Batch, Block
from h2o_flexgen.engine.rows import BatchRows
from h2o_flexgen.kv.cache import KVCache
from h2o_flexgen.kv.coding import Coding
from h2o_flexgen.kv.scores import SlotScores
from h2o_flexgen.memory.device import DeviceTier
from h2o_flexgen.memory.disk import CHUNK_BYTES, DiskRegion, numpy_of
from h2o_flexgen.memory.host import HostTier
from h2o_flexgen.memory.memories import Memories
from h2o_flexgen.memory.pack import DTYPES
from h2o_flexgen.memory.ring import Ring
from h2o_flexgen.memory.tier import aligned
from h2o_flexgen.planning.placement import image_bytes
from h2o_flexgen.policies.occupancy import Occupancy
from h2o_flexgen.policies.policy import KVPolicy
from h2o_flexgen.schedule.schedule import Schedule
from h2o_flexgen.schedule.task import Task

Index = tuple[slice, numpy.ndarray, numpy.ndarray, numpy.ndarray]
SlotAction = Callable[[DiskRegion, numpy.ndarray, int, int], None]


@dataclass
class Unit:
    """The KV of one (layer, batch), as it lies at home."""

    batch: Batch  # the rows in it
    generation: int = 0  # how often its rows were filled up
    changed: tuple[int, int] = (0, 0)  # slots that the last COMPUTE wrote
    cache: KVCache | None = None  # of the last COMPUTE
    journaled: list[Tensor] = field(default_factory=list)  # of what stands on disk behind the slots: where it belongs

    @property
    def replaced(self) -> Tensor | None:
        """The one slot of every row and head that changed, where it is not a range."""
        return None if self.cache is None else self.cache.replaced


class KVStore:
    def __init__(self, spec: ModelSpec, policy: KVPolicy, block: Block, schedule: Schedule, memories: Memories) -> None:
        self._spec = spec
        self._policy = policy
        self._memories = memories
        self._coding = Coding(spec.kv_codec, DTYPES[spec.dtype], spec.head_dim)
        self._accelerator = memories.device.accelerator
        self._units: dict[tuple[int, int], Unit] = {}
        self.prepare(block, schedule)
        self._in_memory: dict[tuple[int, int], Tensor] = {}  # homes on device or host
        self._on_disk: dict[tuple[int, int], DiskRegion] = {}
        self._notes: dict[tuple[int, int], SlotScores] = {}  # always where it is computed
        with ExitStack() as held:  # when the disk is full, for one, what was reserved so far goes back
            self._allocate(held)
            self._held = held.pop_all()

    def prepare(self, block: Block, schedule: Schedule) -> None:
        """For the next block of texts that live on: rows, capacity and slots are those of the first."""
        self._block, self._schedule = block, schedule
        for place in schedule.traffic.kv:
            batch, before = block.batches[place[1]], self._units.get(place)
            self._units[place] = Unit(batch, journaled=before.journaled if before is not None and any(batch.seen) else [])

    def _allocate(self, held: ExitStack) -> None:
        traffic, memories = self._schedule.traffic, self._memories
        for place, tier in traffic.kv.items():
            batch = self._block.batches[place[1]]
            if tier == DISK:
                self._on_disk[place] = memories.disk.alloc(self._slots_on_disk(batch) * self._row_bytes(batch.size))
                held.callback(memories.disk.free, self._on_disk[place])
            else:
                memory = memories.host if tier == HOST else memories.compute
                self._in_memory[place] = memory.alloc(self._image_bytes(batch))
                held.callback(memory.free, self._in_memory[place])
            if self._policy.note_bytes:
                self._notes[place] = self._blank_notes(held, batch)
        self._host_ring = self._ring(held, memories.host, bool(self._on_disk))
        moved = any(traffic.moves_kv(*place) for place in self._units)
        self._device_ring = self._ring(held, memories.compute, moved and self._accelerator)

    def _blank_notes(self, held: ExitStack, batch: Batch) -> SlotScores:
        shape = (batch.size, self._spec.kv_heads, self._slots(batch).capacity)
        region = self._memories.compute.alloc(prod(shape) * self._policy.note_bytes)
        held.callback(self._memories.compute.free, region)
        return SlotScores.over(region, self._policy, shape)

    def _ring(self, held: ExitStack, memory: HostTier | DeviceTier, needed: bool) -> Ring:
        """Zeroed: slots that a row does not fill are masked, but 0 * NaN of an earlier user would still be NaN."""
        ring = Ring(memory, self._schedule.buffers, max(map(self._image_bytes, self._block.batches)) if needed else 0)
        held.callback(ring.free)
        ring.zero()
        return ring

    def close(self) -> None:
        self._held.close()
        for places in (self._units, self._in_memory, self._on_disk, self._notes):
            places.clear()  # whoever still holds the store does not hold its memory

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def _slots(self, batch: Batch) -> Occupancy:
        return self._policy.slots(batch, self._block.gen_len)

    def _slots_on_disk(self, batch: Batch) -> int:
        slots = self._slots(batch)
        return slots.capacity + slots.journal_capacity

    def _image_bytes(self, batch: Batch) -> int:
        return image_bytes(self._spec, self._slots(batch))

    def _row_bytes(self, rows: int) -> int:
        """One slot of all rows, as it lies on disk: padded, so that any range of slots can be read and written directly."""
        return aligned(rows * self._spec.kv_bytes_per_slot)

    def _image(self, region: Tensor, batch: int) -> Tensor:
        """(2, rows, kv_heads, slots, width) over the bytes of a region."""
        rows, slots = self._block.batches[batch].size, self._slots(self._block.batches[batch]).capacity
        shape = (rows, self._spec.kv_heads, slots)
        return image_over(region, shape, self._coding, self._accelerator)

    # -- actions -------------------------------------------------------------------------------------------------------

    def open(self, task: Task, rows: BatchRows) -> KVCache:
        """For COMPUTE: the cache, with the rows that are still alive."""
        unit = self._units[task.layer, task.batch]
        notes = self._notes.get((task.layer, task.batch))
        cache = KVCache(self._image(self._working_region(task), task.batch), notes, self._coding)
        unit.changed, unit.cache = self._slots(rows.batch).changed(task.step), cache
        if task.step and unit.generation != rows.generation:
            cache.keep_rows(rows.places_before, self._slots(unit.batch).held(task.step))
            unit.changed, unit.cache = (0, unit.changed[1]), None  # all is to be stored
        unit.batch, unit.generation = rows.batch, rows.generation
        return cache

    def _working_region(self, task: Task) -> Tensor:
        if not self._schedule.traffic.moves_kv(task.layer, task.batch):
            return self._in_memory[task.layer, task.batch]
        return (self._device_ring or self._host_ring)[self._schedule.buffer(task.visit)]

    def load(self, task: Task) -> int:
        """Host -> device: all that is held, one range from the start."""
        unit = self._units[task.layer, task.batch]
        return self._transfer(task, 0, self._slots(unit.batch).held(task.step), to_device=True)

    def store(self, task: Task) -> int:
        """Device -> host: what the step changed."""
        unit = self._units[task.layer, task.batch]
        if unit.replaced is None:
            return self._transfer(task, *unit.changed, to_device=False)
        host, device = (self._image(region, task.batch) for region in self._both_regions(task))
        row, head = torch.arange(unit.batch.size)[:, None], torch.arange(self._spec.kv_heads)
        at_home = device.device  # of the indices: gathered there, scattered here
        values = device[:, row.to(at_home), head.to(at_home), unit.replaced].cpu()
        host[:, row, head, unit.replaced.cpu()] = values
        return values.nbytes

    def _both_regions(self, task: Task) -> tuple[Tensor, Tensor]:
        """On the host and on the device."""
        place, slot = (task.layer, task.batch), self._schedule.buffer(task.visit)
        return self._host_ring[slot] if place in self._on_disk else self._in_memory[place], self._device_ring[slot]

    def _transfer(self, task: Task, first: int, last: int, to_device: bool) -> int:
        host, device = self._both_regions(task)
        per_slot = self._block.batches[task.batch].size * self._spec.kv_bytes_per_slot
        source, target = (host, device) if to_device else (device, host)
        part = slice(first * per_slot, last * per_slot)
        target[part].copy_(source[part], non_blocking=True)
        return (last - first) * per_slot

    def read(self, task: Task) -> int:
        """Disk -> host: all that is held, and then, in their order, the changes that stand in the journal."""
        unit = self._units[task.layer, task.batch]
        moved = self._disk_slots(task, unit, 0, self._slots(unit.batch).held(task.step), self._read_slots)
        for place, slots in enumerate(unit.journaled):
            moved += self._read_journaled(task, place, slots)
        return moved

    def write(self, task: Task) -> int:
        """Host -> disk: what the step changed. Slots here and there go into the journal until it is full."""
        unit = self._units[task.layer, task.batch]
        if unit.replaced is not None and len(unit.journaled) < self._slots(self._block.batches[task.batch]).journal_capacity:
            unit.journaled.append(unit.replaced.cpu())
            return self._append_journaled(task, len(unit.journaled) - 1, unit.journaled[-1])
        unit.journaled.clear()
        return self._disk_slots(task, unit, *unit.changed, self._write_slots)

    def _read_journaled(self, task: Task, place: int, slots: Tensor) -> int:
        """One slot of every row and head, to where it belongs."""
        image, at, offset, scratch = self._journal_entry(task, place, slots)
        self._memories.disk.read_into(self._on_disk[task.layer, task.batch], offset, scratch)
        image[at] = self._slots_of(scratch, len(slots), 1)[..., 0, :]
        return len(slots) * self._spec.kv_bytes_per_slot

    def _append_journaled(self, task: Task, place: int, slots: Tensor) -> int:
        image, at, offset, scratch = self._journal_entry(task, place, slots)
        self._slots_of(scratch, len(slots), 1)[..., 0, :] = image[at]
        self._memories.disk.write_from(self._on_disk[task.layer, task.batch], offset, scratch)
        return len(slots) * self._spec.kv_bytes_per_slot

    def _journal_entry(self, task: Task, place: int, slots: Tensor) -> tuple[numpy.ndarray, Index, int, Tensor]:
        """The image and where in it the slots (rows, kv_heads) are; the entry's offset on disk, and a buffer for it."""
        image = numpy_of(self._image(self._host_ring[self._schedule.buffer(task.visit)], task.batch))
        at = (slice(None), numpy.arange(len(slots))[:, None], numpy.arange(self._spec.kv_heads), slots.numpy())
        stride = self._row_bytes(len(slots))
        capacity = self._slots(self._block.batches[task.batch]).capacity
        return image, at, (capacity + place) * stride, self._memories.disk.scratch(stride)

    def _disk_slots(self, task: Task, unit: Unit, first: int, last: int, action: SlotAction) -> int:
        """Cuts a range of slots into chunks that the disk threads work on side by side."""
        home, region = self._on_disk[task.layer, task.batch], self._host_ring[self._schedule.buffer(task.visit)]
        image = numpy_of(self._image(region, task.batch))[:, : unit.batch.size]
        chunk = max(1, CHUNK_BYTES // self._row_bytes(unit.batch.size))
        cuts = [(home, image, start, min(start + chunk, last)) for start in range(first, last, chunk)]
        self._memories.files.each(lambda cut: action(*cut), cuts)
        return (last - first) * unit.batch.size * self._spec.kv_bytes_per_slot

    def _read_slots(self, home: DiskRegion, image: numpy.ndarray, first: int, last: int) -> None:
        rows, stride = image.shape[1], self._row_bytes(image.shape[1])
        scratch = self._memories.disk.scratch((last - first) * stride)
        self._memories.disk.read_into(home, first * stride, scratch)
        numpy.copyto(image[:, :, :, first:last], self._slots_of(scratch, rows, last - first))

    def _write_slots(self, home: DiskRegion, image: numpy.ndarray, first: int, last: int) -> None:
        rows, stride = image.shape[1], self._row_bytes(image.shape[1])
        scratch = self._memories.disk.scratch((last - first) * stride)
        numpy.copyto(self._slots_of(scratch, rows, last - first), image[:, :, :, first:last])
        self._memories.disk.write_from(home, first * stride, scratch)

    def _slots_of(self, scratch: Tensor, rows: int, slots: int) -> numpy.ndarray:
        """Bytes as they lie on disk, seen as an image: (2, rows, kv_heads, slots, width)."""
        shape = (slots, 2, rows, self._spec.kv_heads, self._coding.width)
        raw = numpy_of(scratch.view(self._coding.kept_dtype)).reshape(slots, -1)[:, : prod(shape[1:])]
        image: numpy.ndarray = raw.reshape(shape).transpose(1, 2, 3, 0, 4)
        return image


def image_over(region: Tensor, shape: tuple[int, int, int], coding: Coding, accelerator: bool) -> Tensor:
    """(2, rows, kv_heads, slots, width) over the bytes of a region; `shape` is (rows, kv_heads, slots)."""
    rows, heads, slots = shape
    values = region[: 2 * prod(shape) * coding.width * coding.kept_dtype.itemsize].view(coding.kept_dtype)
    if accelerator:
        return values.view(slots, 2, rows, heads, coding.width).permute(1, 2, 3, 0, 4)
    return values.view(2, rows, heads, slots, coding.width)
