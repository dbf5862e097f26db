"""The KV of a block, of one level of KV heads: a home for every (layer, batch) on the tier where the placement puts it, and the
buffers through which KV from other tiers passes while it is computed with.

Where the CPU attends in host memory, an image lies head by head, as CPU attention needs it. Where a device fetches it, and on
disk, it lies token by token, so that held slots are one range from the start and a step's new tokens are one range as well.

Where the host attends beside a device, images are in the CPU's form, and scores lie in host memory too. A device then works
with prompts alone: what is kept of them goes to the host row by row, all slots of each, so that empty slots are zero there. It
goes part by part while the next part is computed (`host_attention_exchange`). Where rows join others or texts go on, it goes at
once. An index of keys, by which steps choose what they attend, lies beside an image as scores do, and goes where these go: a
device makes that of the prompts that it reads.

Where a device fetches what steps choose, an image lies row by row (`kv_rows`): at home, or in a buffer of the host on its way
from the disk (`kv_pages`) and back. The numbers of what was chosen come behind it there, as the host reads by them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from h2o_flexgen.core.buffer_layout import KVLayout
from h2o_flexgen.core.site import DISK, HOST
from h2o_flexgen.engine.executor import MovedInParts
from h2o_flexgen.engine.rows import BatchRows, RowRange
from h2o_flexgen.engine.stores.host_attention_exchange import PartOfPrompts, PartsOnTheWay
from h2o_flexgen.engine.stores.kv_pages import KVPages, TokensRead
from h2o_flexgen.engine.stores.kv_rows import KVRows, PlacesOnDevice
from h2o_flexgen.engine.stores.layer_judges import Judges
from h2o_flexgen.kernels.evict import ChangedSlots
from h2o_flexgen.kernels.operations import gather_slots
from h2o_flexgen.kernels.raw_memory import numpy_of
from h2o_flexgen.kv.cache import KVCache
from h2o_flexgen.kv.key_index import ChosenSlots, KeyIndex
from h2o_flexgen.kv.slots import Coding, SlotScores, image_over
from h2o_flexgen.memory.device import DeviceTier
from h2o_flexgen.memory.disk import DiskRegion
from h2o_flexgen.memory.host import HostTier
from h2o_flexgen.memory.memories import Memories, Ring
from h2o_flexgen.planning.block_plan import BlockPlan, KVRooms
from h2o_flexgen.policies.recall import ALL
from h2o_flexgen.schedule.ops import Data, Task

Index = tuple[slice, numpy.ndarray, numpy.ndarray, numpy.ndarray]
SlotAction = Callable[[DiskRegion, KVLayout, numpy.ndarray, int, int], None]


class SlotNotes(NamedTuple):
    """What is noted of the slots of one (layer, batch) beside keys and values."""

    scores: SlotScores | None = None
    key_index: KeyIndex | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        codes = None if self.key_index is None else self.key_index.codes
        return (*(() if self.scores is None else self.scores.tensors), *(() if codes is None else (codes,)))

    def part(self, rows: slice) -> SlotNotes:
        return SlotNotes(self.scores and self.scores.part(rows), self.key_index and self.key_index.part(rows))


NOTHING_NOTED = SlotNotes()


@dataclass
class Unit:
    """The KV of one (layer, batch), as it lies at home."""

    rows: int = 0  # in it
    held: int = 0  # slots in use, in the row that has most
    began_with: Sequence[int] = ()  # slots in use in each row when the block began
    generation: int = 0  # how often its rows were filled up
    changed: tuple[int, int] = (0, 0)  # slots that the last COMPUTE wrote
    ranges: Sequence[RowRange] = ()  # the same, row by row, where steps choose what they bring
    choice: ChosenSlots | None = None  # there, of the slots that the next COMPUTE attends
    cache: KVCache | None = None  # cache of the last COMPUTE
    joined: dict[int, slice] = field(default_factory=dict)  # by step: rows with prompts read in it, until the host has them
    parts: PartsOnTheWay | None = None  # those prompts, where they go part by part
    journaled: list[Tensor] = field(default_factory=list)  # the slots of the journal's entries, which follow the slots on disk
    at_home: Tensor | None = None  # in host memory: the changed slots of the last store

    @property
    def replaced(self) -> Tensor | None:
        """The one slot of every row and head that changed, where these slots are not one range."""
        return None if self.cache is None else self.cache.replaced


class KVStore:
    """Serves the heads of one level. Layers without heads of this level have no place in it."""

    def __init__(self, planned: BlockPlan, level: int, memories: Memories, judges: Judges) -> None:
        """`judges`: of the heads of this level."""
        spec = planned.spec
        self._judges = judges
        self._level = level
        self._only_reads = planned.block.only_reads
        self._policy = planned.levels[level].policy
        self._memories = memories
        self._cap = spec.attention_cap
        self._coding = Coding.of(planned.kv.specs[level])
        self._accelerator = memories.device.accelerator
        self._units: dict[tuple[int, int], Unit] = {}
        self._pages: dict[tuple[int, int], KVPages] = {}  # on disk, where steps choose what they read
        self._rows: dict[tuple[int, int], KVRows] = {}  # in host memory, where steps choose what a device fetches
        self._on_way: dict[KVLayout, list[KVRows]] = {}  # alike, in the buffers that KV from the disk passes
        self.prepare(planned)
        self._note_bytes = self._policy.score_bytes if self._only_reads else planned.kv.note_bytes(level)
        self._rooms = KVRooms.of(planned, self._layouts, self._note_bytes)
        self._in_memory: dict[tuple[int, int], Tensor] = {}  # homes on device or host
        self._on_disk: dict[tuple[int, int], DiskRegion] = {}
        self._notes: dict[tuple[int, int], SlotNotes] = {}  # always where decode steps attend
        with ExitStack() as held:  # if a reservation fails, e.g. on a full disk, earlier ones are released
            self._allocate(held)
            self._held = held.pop_all()

    def prepare(self, planned: BlockPlan) -> None:
        """Prepares the next block of a conversation: rows, capacity and slots are those of the first."""
        self._schedule = planned.schedule
        self._caches: dict[tuple[int, int, int], KVCache] = {}  # by the region that they lie in, layer and batch
        self._changed_of: dict[tuple[KVLayout, int], ChangedSlots] = {}  # by the layout and the rows in it
        layouts = {place: planned.kv.layouts(*place)[self._level] for place in self._schedule.traffic.kv}
        self._layouts = {place: layout for place, layout in layouts.items() if layout is not None}
        beside = ((place, own) for place, own in self._layouts.items() if self._schedule.traffic.is_beside(*place))
        self._places = {place: planned.prompt_places(place, own) for place, own in beside}
        self.spared_bytes = 0  # of tokens that several heads have chosen, or that steps before have read
        for pages in self._pages.values():
            pages.begin()
        for rows in self._rows.values():
            rows.begin()
        for place in self._layouts:
            batch, before = planned.block.batches[place[1]], self._units.get(place)
            goes_on = before is not None and any(batch.seen)
            held = planned.kv.occupancies[self._level][place[1]].counts(0)
            journaled = before.journaled if goes_on and before else []
            self._units[place] = Unit(batch.size, max(held), held, journaled=journaled)

    def _allocate(self, held: ExitStack) -> None:
        memories, rooms = self._memories, self._rooms
        if self._only_reads:
            self._allocate_one_home(held)
        else:
            self._allocate_homes(held)
        self._host_ring = self._ring(held, memories.host, rooms.on_host)
        self._on_way.update(self._rows_on_way())
        self._device_ring = self._ring(held, memories.compute, rooms.on_device)
        self._note_ring = Ring(memories.compute, self._schedule.buffers_of(Data.KV), rooms.noted)
        held.callback(self._note_ring.free)
        self._staging = memories.host.alloc(rooms.staged) if rooms.staged else None
        if self._staging is not None:
            held.callback(memories.host.free, self._staging)

    def _allocate_homes(self, held: ExitStack) -> None:
        traffic, memories = self._schedule.traffic, self._memories
        on_device = {batch: PlacesOnDevice(memories.device) for _, batch in self._layouts}
        for place, layout in self._layouts.items():
            tier = traffic.kv[place]
            if tier == DISK:
                self._on_disk[place] = memories.disk.alloc(layout.disk_bytes)
                held.callback(memories.disk.free, self._on_disk[place])
                if layout.by_row:
                    memories.disk.start_gathering()
                    self._pages[place] = KVPages(self._on_disk[place], layout, memories.disk, self._tokens_read(held, layout))
            else:
                memory = memories.host if tier == HOST else memories.compute
                self._in_memory[place] = home = memory.alloc(layout.image_bytes)
                held.callback(memory.free, home)
                if layout.by_row and traffic.brings_chosen(*place):
                    self._rows[place] = KVRows(home, layout, self._coding, memories.device, on_device[place[1]])
            region = self._notes_region(held, layout, traffic.is_beside(*place)) if self._note_bytes else None
            self._notes[place] = self._noted_in(region, layout.shape)

    def _rows_on_way(self) -> Iterator[tuple[KVLayout, list[KVRows]]]:
        if not self._accelerator:
            return
        device = self._memories.device
        regions, places = [self._host_ring[buffer] for buffer in range(len(self._host_ring))], PlacesOnDevice(device)
        for layout in {self._layouts[place] for place in self._pages}:
            yield layout, [KVRows(region, layout, self._coding, device, places) for region in regions]

    def _tokens_read(self, held: ExitStack, layout: KVLayout) -> TokensRead | None:
        """Room for tokens that stay in memory between the steps that read them."""
        if not (most := self._policy.reused_tokens(layout)):
            return None
        region = self._memories.host.alloc(layout.reused_bytes(most))
        held.callback(self._memories.host.free, region)
        return TokensRead(region, layout, most, self._coding)

    def _noted_in(self, region: Tensor | None, shape: tuple[int, int, int]) -> SlotNotes:
        """The notes in a region: what the policy notes of slots (rows, kv_heads, slots), and an index behind it."""
        policy, of_scores = self._policy, prod(shape) * self._policy.score_bytes
        scores = SlotScores.over(region, policy, shape) if region is not None and of_scores else None
        if policy.recall == ALL or self._only_reads:
            return SlotNotes(scores)
        has_codes = region is not None and self._note_bytes > policy.score_bytes
        codes = region[of_scores:] if region is not None and has_codes else None
        return SlotNotes(scores, KeyIndex.over(codes, policy, self._coding, shape))

    def _allocate_one_home(self, held: ExitStack) -> None:
        """One home for all layers and batches: each of them is over before the next one begins."""
        memory, per_slot = self._memories.compute, self._policy.score_bytes
        if not self._layouts:
            return
        home = memory.alloc(max(layout.image_bytes for layout in self._layouts.values()))
        held.callback(memory.free, home)
        self._in_memory.update(dict.fromkeys(self._layouts, home))
        if per_slot:
            largest = max(self._layouts.values(), key=lambda layout: layout.score_bytes(per_slot))
            region = self._notes_region(held, largest, on_host=False)
            for place, layout in self._layouts.items():
                self._notes[place] = self._noted_in(region, layout.shape)

    def _notes_region(self, held: ExitStack, layout: KVLayout, on_host: bool) -> Tensor:
        memory = self._memories.host if on_host else self._memories.compute
        region = memory.alloc(layout.score_bytes(self._note_bytes))
        held.callback(memory.free, region)
        return region

    def _ring(self, held: ExitStack, memory: HostTier | DeviceTier, nbytes: int) -> Ring:
        """A ring of zeroed buffers: unfilled slots are masked, but 0 times a NaN left by an earlier user is still NaN."""
        ring = Ring(memory, self._schedule.buffers_of(Data.KV), nbytes)
        held.callback(ring.free)
        ring.zero()
        return ring

    def close(self) -> None:
        self._held.close()
        held = self._units, self._caches, self._in_memory, self._on_disk, self._pages, self._rows, self._on_way, self._notes
        for kept in held:
            kept.clear()  # so that a reference to the store keeps no memory alive

    def _layout(self, task: Task) -> KVLayout:
        return self._layouts[task.layer, task.batch]

    def _buffer(self, task: Task) -> int:
        """The number of the buffer through which the KV of its visit passes, in each ring."""
        return self._schedule.buffer_of(Data.KV, task.visit)

    def _image(self, region: Tensor, task: Task) -> Tensor:
        """(sets, rows, kv_heads, slots, width) over the bytes of a region."""
        if (rows := self._rows_of(task)) is not None:
            return rows.image(region)
        by_token = self._accelerator and not self._is_beside(task)
        return image_over(region, self._layout(task).shape, self._coding, by_token)

    def _rows_of(self, task: Task) -> KVRows | None:
        """The rows in host memory of which a device fetches what steps choose, at home or on their way."""
        place = task.layer, task.batch
        if place in self._pages and self._accelerator:
            return self._on_way[self._layouts[place]][self._buffer(task)]
        return self._rows.get(place)

    def _is_beside(self, task: Task) -> bool:
        return self._schedule.traffic.is_beside(task.layer, task.batch)

    # -- actions -------------------------------------------------------------------------------------------------------

    def open(self, task: Task, rows: BatchRows) -> KVCache:
        """The cache for a COMPUTE, with the rows that are still alive. Where the host attends, it has the prompts alone."""
        if not self._is_beside(task):
            return self._opened(task, rows, self._working_region(task), self._noted_at_home(task))
        region, noted = self._device_ring[self._buffer(task)], self._noted_on_device(task, 0)
        if rows.joining is not None:
            self._units[task.layer, task.batch].joined[task.step] = rows.joining
        if task.step:  # the host may still read what this needs, and opens it itself
            return self._cache(task, region, noted, self._places[task.layer, task.batch].layout.shape)
        return self._opened(task, rows, region, noted)

    def open_beside(self, task: Task, rows: BatchRows) -> KVCache:
        """The cache on the host for an ATTEND."""
        return self._opened(task, rows, self._on_host(task), self._noted_at_home(task))

    def begin_parts(self, task: Task, rows: BatchRows) -> None:
        """Begins a COMPUTE of prompts that go home part by part."""
        unit, visit = self._units[task.layer, task.batch], task.visit
        unit.changed, unit.cache = rows.changed(self._level), None
        unit.rows, unit.held, unit.generation = rows.size, unit.changed[1], rows.generation
        send = partial(self._send, task) if self._schedule.traffic.stores_kv(visit) else None
        unit.parts = PartsOnTheWay(self._memories.device, self._places[task.layer, task.batch].count, send)

    def open_part(self, task: Task, rows: slice) -> KVCache:
        """The cache for the next part of these prompts."""
        parts = self._units[task.layer, task.batch].parts
        assert parts is not None
        image, noted = self._on_device(task, parts.begin(rows))
        return self._cache_over(task, image, noted)

    def _on_device(self, task: Task, part: PartOfPrompts) -> tuple[Tensor, SlotNotes]:
        """The image of a part in its place, and what is noted of its slots."""
        places, buffer = self._places[task.layer, task.batch], self._buffer(task)
        shape = places.layout.of_rows(part.rows.stop - part.rows.start).shape
        region = self._device_ring[buffer][places.start(part.number) :]
        return image_over(region, shape, self._coding, by_token=False), self._noted_on_device(task, part.number, shape)

    def _noted_at_home(self, task: Task) -> SlotNotes:
        return self._notes.get((task.layer, task.batch), NOTHING_NOTED)

    def _noted_on_device(self, task: Task, part: int, shape: tuple[int, int, int] | None = None) -> SlotNotes:
        """What a device notes of the slots of prompts that it reads for the host."""
        if not self._note_ring:
            return NOTHING_NOTED
        places = self._places[task.layer, task.batch]
        region = self._note_ring[self._buffer(task)][places.start_of_notes(part, self._note_bytes) :]
        return self._noted_in(region, shape or places.layout.shape)

    def _opened(self, task: Task, rows: BatchRows, region: Tensor, noted: SlotNotes) -> KVCache:
        """The cache over a region, in which living rows fill the places of those that have left."""
        unit, place = self._units[task.layer, task.batch], (task.layer, task.batch)
        if unit.cache is not None:
            unit.cache.replaced = None  # perhaps of another buffer
        cache = self._cache(task, region, noted)
        unit.changed, unit.cache = rows.changed(self._level), cache
        if (kept := self._pages.get(place) or self._rows.get(place)) is not None:
            unit.ranges, unit.choice, cache.choice.changed = rows.ranges(self._level), cache.choice, None
            if unit.generation != rows.generation:
                kept.keep_rows(rows.places_before)
        if unit.generation != rows.generation:
            cache.keep_rows(rows.places_before, rows.held_before[self._level])
        if unit.generation != rows.generation or rows.changes_all:
            unit.changed, unit.cache = (0, unit.changed[1]), None  # all is to be stored
        unit.rows, unit.held, unit.generation = rows.size, unit.changed[1], rows.generation
        return cache

    def _cache(self, task: Task, region: Tensor, noted: SlotNotes, shape: tuple[int, int, int] | None = None) -> KVCache:
        """The cache over a region, with its views of the region: both stay as long as this store. `shape`: of those slots
        that are there, where some are not."""
        place = id(region), task.layer, task.batch
        if place not in self._caches:
            image = self._image(region, task) if shape is None else image_over(region, shape, self._coding, by_token=False)
            self._caches[place] = self._cache_over(task, image, noted)
            self._caches[place].choice.is_needed = place[1:] in self._pages or place[1:] in self._rows
        cache = self._caches[place]
        cache.replaced = None
        return cache

    def _cache_over(self, task: Task, image: Tensor, noted: SlotNotes) -> KVCache:
        judge = self._judges.get(task.layer)
        return KVCache(image, noted.scores, self._coding, judge=judge, cap=self._cap, index=noted.key_index)

    def _working_region(self, task: Task) -> Tensor:
        if not self._schedule.traffic.moves_kv(task.layer, task.batch):
            return self._in_memory[task.layer, task.batch]
        return (self._device_ring or self._host_ring)[self._buffer(task)]

    def load(self, task: Task) -> int:
        """Host -> device: all held slots, one range from the start. Or what a step has chosen."""
        unit = self._units[task.layer, task.batch]
        if (kept := self._rows_of(task)) is not None:
            return self._load_rows(task, unit, kept)
        if self._is_beside(task):
            return self._transfer_rows(task, slice(0, self._layout(task).rows), to_device=True)
        return self._transfer(task, 0, unit.held, to_device=True)

    def _load_rows(self, task: Task, unit: Unit, kept: KVRows) -> int:
        buffer = self._device_ring[self._buffer(task)]
        if not self._schedule.traffic.chooses(task.visit):  # a text goes on
            return kept.load(buffer, unit.began_with, unit.held)
        assert unit.choice is not None
        return kept.bring(buffer, unit.choice)

    def store_parts(self, task: Task) -> MovedInParts:
        """Device -> host: prompts that go part by part, most of which are on their way."""
        parts = self._units[task.layer, task.batch].parts
        assert parts is not None
        return parts.finish()

    def store(self, task: Task) -> int:
        """Device -> host: the slots that the step changed."""
        unit = self._units[task.layer, task.batch]
        if self._is_beside(task):
            return self._transfer_rows(task, unit.joined.pop(task.step, slice(0)), to_device=False)
        if (kept := self._rows_of(task)) is not None:
            changed = None if unit.choice is None else unit.choice.changed
            return kept.store(self._device_ring[self._buffer(task)], unit.ranges, changed)
        if unit.replaced is None:
            return self._transfer(task, *unit.changed, to_device=False)
        return self._store_single(task, unit, unit.replaced)

    def _store_single(self, task: Task, unit: Unit, replaced: Tensor) -> int:
        """Device -> host, where each row and head has changed a slot of its own: the slots are copied side by side to a staging
        buffer, and the CPU copies them from there to their places. `replaced` is memory of the stream that computes: it is not
        dropped before this task ends, and so not before this stream has read it."""
        assert self._staging is not None and unit.cache is not None
        device, changed = unit.cache.image, self._changed(self._layout(task), unit.rows)
        gathered = torch.empty(changed.nbytes, dtype=torch.uint8, device=device.device)
        staged = self._staging[: changed.nbytes]
        gather_slots(device, replaced, gathered)
        staged.copy_(gathered, non_blocking=True)
        self._memories.device.finish()
        changed.bring(staged, self._on_host(task))
        if (task.layer, task.batch) in self._on_disk:
            unit.at_home = changed.numbers(staged).clone()
        return changed.value_bytes

    def _changed(self, layout: KVLayout, rows: int) -> ChangedSlots:
        if (layout, rows) not in self._changed_of:
            self._changed_of[layout, rows] = ChangedSlots(rows, layout.shape, layout.slot_bytes, self._coding.sets)
        return self._changed_of[layout, rows]

    def _both_regions(self, task: Task) -> tuple[Tensor, Tensor]:
        """The regions on the host and on the device."""
        return self._on_host(task), self._device_ring[self._buffer(task)]

    def _on_host(self, task: Task) -> Tensor:
        place = task.layer, task.batch
        return self._host_ring[self._buffer(task)] if place in self._on_disk else self._in_memory[place]

    def _transfer_rows(self, task: Task, rows: slice, to_device: bool) -> int:
        """Copies all slots of rows, and what is noted of them: few ranges, as they lie head by head."""
        image, noted = self._image(self._both_regions(task)[1], task)[:, rows], self._noted_on_device(task, 0)
        return self._copy_rows(task, rows, (image, noted.part(rows)), to_device)

    def _send(self, task: Task, part: PartOfPrompts) -> int:
        """Device -> host: a part of prompts."""
        return self._copy_rows(task, part.rows, self._on_device(task, part), to_device=False)

    def _copy_rows(self, task: Task, rows: slice, on_device: tuple[Tensor, SlotNotes], to_device: bool) -> int:
        there, (here, noted_here) = self._image(self._on_host(task), task)[:, rows], on_device
        noted_there = self._noted_at_home(task).part(rows)
        pairs = [*zip(there, here), *zip(noted_there.tensors, noted_here.tensors, strict=True)]
        for on_host, own in pairs:
            source, target = (on_host, own) if to_device else (own, on_host)
            target.copy_(source, non_blocking=True)
        return sum(own.nbytes for _, own in pairs)

    def _transfer(self, task: Task, first: int, last: int, to_device: bool) -> int:
        host, device = self._both_regions(task)
        per_slot = self._layout(task).slot_bytes
        source, target = (host, device) if to_device else (device, host)
        part = slice(first * per_slot, last * per_slot)
        target[part].copy_(source[part], non_blocking=True)
        return (last - first) * per_slot

    def read(self, task: Task) -> int:
        """Disk -> host: all held slots, and then, in their order, the changes in the journal. Or what a step has chosen."""
        unit = self._units[task.layer, task.batch]
        if (task.layer, task.batch) in self._pages:
            return self._read_pages(task, unit)
        moved = self._disk_slots(task, unit, 0, unit.held, self._read_slots)
        for place, slots in enumerate(unit.journaled):
            moved += self._read_journaled(task, place, slots)
        return moved

    def write(self, task: Task) -> int:
        """Writes what the step changed from host to disk. Scattered slots go into the journal until it is full."""
        unit = self._units[task.layer, task.batch]
        if (task.layer, task.batch) in self._pages:
            return self._write_pages(task, unit)
        if unit.replaced is not None and len(unit.journaled) < self._layout(task).journal:
            unit.journaled.append(unit.replaced if unit.at_home is None else unit.at_home)
            return self._append_journaled(task, len(unit.journaled) - 1, unit.journaled[-1])
        unit.journaled.clear()
        return self._disk_slots(task, unit, *unit.changed, self._write_slots)

    def _read_pages(self, task: Task, unit: Unit) -> int:
        pages, image = self._pages[task.layer, task.batch], self._values(task, writes=True)
        if not self._schedule.traffic.chooses(task.visit):  # a text goes on
            return pages.read(image, [RowRange(row, 0, unit.held) for row in range(unit.rows)])
        assert unit.choice is not None
        brought = pages.bring(image, self._choice_at_home(task, unit.choice), self._policy)
        self.spared_bytes += brought.spared
        return brought.moved

    def _write_pages(self, task: Task, unit: Unit) -> int:
        """Writes neighbouring tokens, or prompts alone: heads of the rows before them have changed a slot each."""
        pages, image = self._pages[task.layer, task.batch], self._values(task, writes=False)
        changed = None if unit.choice is None or self._policy.keeps_all else unit.choice.changed
        if changed is None:
            return pages.write(image, unit.ranges)
        prompts = [one for one in unit.ranges if one.row >= len(changed)]
        return pages.change(image, numpy_of(self._numbers_at_home(task, changed))) + pages.write(image, prompts)

    def _choice_at_home(self, task: Task, choice: ChosenSlots) -> ChosenSlots:
        """What a step has chosen, with numbers that the host may read."""
        if not self._accelerator:
            return choice
        slots = choice.slots  # read once: under a schedule with a fault a COMPUTE takes them meanwhile
        return replace(choice, slots=None if slots is None else self._numbers_at_home(task, slots))

    def _numbers_at_home(self, task: Task, slots: Tensor) -> Tensor:
        """Numbers of slots for a task of the host, which waits for them here: those of a device come behind the image."""
        if not self._accelerator:
            return slots
        start = self._layout(task).numbers_start
        there = self._host_ring[self._buffer(task)][start : start + slots.nbytes].view(slots.dtype).view(slots.shape)
        there.copy_(slots, non_blocking=True)
        self._memories.device.finish()
        return there

    def _values(self, task: Task, writes: bool) -> numpy.ndarray:
        """The image of a visit on its way from the disk or back."""
        region = self._host_ring[self._buffer(task)]
        return numpy_of(self._image(region, task), writes=writes)

    def _read_journaled(self, task: Task, place: int, slots: Tensor) -> int:
        """Reads one slot of every row and head into its place."""
        image, at, offset, scratch = self._journal_entry(task, place, slots, fills=True)
        self._memories.disk.read_into(self._on_disk[task.layer, task.batch], offset, scratch)
        image[at] = self._slots_of(scratch, slots.shape, 1)[..., 0, :]
        return len(slots) * self._layout(task).row_bytes

    def _append_journaled(self, task: Task, place: int, slots: Tensor) -> int:
        image, at, offset, scratch = self._journal_entry(task, place, slots, fills=False)
        self._slots_of(scratch, slots.shape, 1)[..., 0, :] = image[at]
        self._memories.disk.write_from(self._on_disk[task.layer, task.batch], offset, scratch)
        return len(slots) * self._layout(task).row_bytes

    def _journal_entry(self, task: Task, place: int, slots: Tensor, fills: bool) -> tuple[numpy.ndarray, Index, int, Tensor]:
        """The image and where in it the slots (rows, kv_heads) are; the entry's offset on disk, and a buffer for it. `fills`:
        the image is written."""
        image = numpy_of(self._image(self._host_ring[self._buffer(task)], task), writes=fills)
        at = (slice(None), numpy.arange(len(slots))[:, None], numpy.arange(slots.shape[1]), numpy_of(slots))
        layout = self._layout(task).of_rows(len(slots))
        return image, at, layout.journal_start(place), self._memories.disk.scratch(layout.padded_slot_bytes)

    def _disk_slots(self, task: Task, unit: Unit, first: int, last: int, action: SlotAction) -> int:
        """Cuts a range of slots into chunks that the disk threads work on in parallel."""
        home, region = self._on_disk[task.layer, task.batch], self._host_ring[self._buffer(task)]
        layout = self._layout(task).of_rows(unit.rows)
        image = numpy_of(self._image(region, task), writes=task.op.fetches)[:, : layout.rows]
        chunk = layout.slots_at_once
        cuts = [(home, layout, image, start, min(start + chunk, last)) for start in range(first, last, chunk)]
        self._memories.files.each(lambda cut: action(*cut), cuts)
        return (last - first) * layout.slot_bytes

    def _read_slots(self, home: DiskRegion, layout: KVLayout, image: numpy.ndarray, first: int, last: int) -> None:
        scratch = self._memories.disk.scratch((last - first) * layout.padded_slot_bytes)
        self._memories.disk.read_into(home, first * layout.padded_slot_bytes, scratch)
        numpy.copyto(image[:, :, :, first:last], self._slots_of(scratch, layout.shape, last - first))

    def _write_slots(self, home: DiskRegion, layout: KVLayout, image: numpy.ndarray, first: int, last: int) -> None:
        scratch = self._memories.disk.scratch((last - first) * layout.padded_slot_bytes)
        numpy.copyto(self._slots_of(scratch, layout.shape, last - first), image[:, :, :, first:last])
        self._memories.disk.write_from(home, first * layout.padded_slot_bytes, scratch)

    def _slots_of(self, scratch: Tensor, of: Sequence[int], slots: int) -> numpy.ndarray:
        """The bytes of disk slots as an image: (sets, rows, kv_heads, slots, width); `of` begins with rows and KV heads."""
        shape = (slots, self._coding.sets, *of[:2], self._coding.width)
        raw = numpy_of(scratch.view(self._coding.kept_dtype)).reshape(slots, -1)[:, : prod(shape[1:])]
        image: numpy.ndarray = raw.reshape(shape).transpose(1, 2, 3, 0, 4)
        return image
