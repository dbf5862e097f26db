"""The footprint of a plan: the bytes that a block holds on every tier, peak included, before anything is allocated.
MemoryLimits: the bytes that may be held on every tier; and what of a machine's memory is not planned with.

Sizes come from the functions by which allocators and stores lay data out (core/buffer_layout). Only the working space is an
estimate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from h2o_flexgen.core.buffer_layout import (
    CHUNK_BYTES,
    GATHER_PARTS,
    READERS,
    Arena,
    KVLayout,
    PrefixLayout,
    aligned,
    asked_arena,
    decoded_bytes,
    disk_buffer_bytes,
    gather_buffer_bytes,
    hidden_bytes,
    probe_bytes,
    read_arena,
    read_buffer_bytes,
    region_bytes,
)
from h2o_flexgen.core.model_spec import ModelSpec, TensorSpec
from h2o_flexgen.core.site import DEVICE, DISK, HOST, TIERS, Site
from h2o_flexgen.core.workload import Block
from h2o_flexgen.planning.block_plan import BlockPlan, KVRooms, StateRooms
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.placement import Place, layers_by_tiers
from h2o_flexgen.planning.working_space import (
    DEVICE_LIBRARIES,
    block_working_bytes,
    choosing_beside_bytes,
    guesses_bytes,
    loading_bytes,
)
from h2o_flexgen.schedule.ops import READ, WORKERS, WRITE, Data
from h2o_flexgen.schedule.schedule import Schedule

WEIGHTS = "weights"  # the part that holds weights at rest
READ_BEFORE = "KV read before"  # the part that holds what steps have read of KV on disk
SHARED = ("activations", "loading", "drafts")  # parts that are there once, however many devices compute
# of Python's objects: what is known of a tensor, a view of it, and a piece of a file that is read to it
KNOWN_BYTES, VIEW_BYTES, PIECE_BYTES = 500, 600, 1050
FEW_PLACES = 4 << 20  # of them count as the process's own
LOOKED_UP_BYTES = 440  # of Python's dicts for each token of a text in which guesses are looked up: the most that was measured
Parts = dict[str, dict[str, int]]  # tier -> what it holds -> bytes


@dataclass(frozen=True)
class Footprint:
    """Bytes by tier and by what they hold."""

    parts: Mapping[str, Mapping[str, int]]
    devices: tuple[Mapping[str, int], ...] = ()  # the parts of each, where several compute

    def total(self, tier: str) -> int:
        return sum(self.parts.get(tier, {}).values())

    def __or__(self, other: Footprint) -> Footprint:
        """The larger of both: blocks of a workload run one after the other."""
        return Footprint(
            {tier: _larger(self.parts.get(tier, {}), other.parts.get(tier, {})) for tier in TIERS},
            tuple(map(_larger, self.devices, other.devices)),
        )


def _larger(one: Mapping[str, int], other: Mapping[str, int]) -> Mapping[str, int]:
    return {name: max(one.get(name, 0), other.get(name, 0)) for name in [*one, *other]}


def footprint(planned: BlockPlan, site: Site, scored_at_once: int = 0) -> Footprint:
    """The footprint of a block. `scored_at_once`: positions of prompts for which logits are made together; 0 if only the last
    of each row has logits. Of several devices it has the parts of the one that holds most, and what all need of the host."""
    each = [_parts(section, planned, site, scored_at_once) for section in planned.sections]
    if len(each) == 1:
        return Footprint(each[0])
    held = {DEVICE: max((parts[DEVICE] for parts in each), key=lambda parts: sum(parts.values()))}
    for tier in (HOST, DISK):
        names = dict.fromkeys(name for parts in each for name in parts[tier])
        held[tier] = {name: _together(name, [parts[tier].get(name, 0) for parts in each]) for name in names}
    return Footprint(held, tuple(parts[DEVICE] for parts in each))


def _together(name: str, of_sections: Sequence[int]) -> int:
    """Bytes of a part that every device needs, or that all share."""
    return max(of_sections) if name in SHARED else sum(of_sections)


def _parts(planned: BlockPlan, whole: BlockPlan, site: Site, scored_at_once: int) -> Parts:
    """What a block holds, or one device's section of it. `whole`: the block with all its sections."""
    spec, schedule = planned.spec, planned.schedule
    parts: Parts = {tier: defaultdict(int) for tier in TIERS}
    compute = DEVICE if schedule.traffic.accelerator else HOST
    _add_weights(parts, planned, compute, site.writes_weights)
    _add_kv(parts, planned, compute)
    _add_states(parts, planned, compute)
    _add_hidden(parts, spec, planned.block, schedule, compute)
    if compute == DEVICE:
        parts[HOST]["loading"] = max(map(loading_bytes, spec.unlike_tensors))
        parts[DEVICE]["libraries"] = DEVICE_LIBRARIES
        if chosen := choosing_beside_bytes(planned, site):
            parts[HOST]["working space"] = chosen
    parts[compute]["working space"] = block_working_bytes(planned, site, scored_at_once, whole.guesses_any)
    parts[compute]["decoded weights"] = decoded_bytes(spec, site)
    parts[compute]["probe"] = 0 if planned.plan.probe is None else region_bytes(probe_bytes(spec))
    parts[compute]["shared prefixes"] = _prefix_bytes(planned, scored_at_once)
    if adapters := site.adapters.of(spec.tensors):
        parts[compute]["adapters"] = adapters
    if drafts := _draft_bytes(whole):
        parts[HOST]["drafts"] = drafts
    if guesses := sum(guesses_bytes(planned, place) for place in _guessing(whole)):
        parts[compute]["guesses"] = guesses
    parts[HOST]["disk buffers"] = _disk_buffers(planned, site)
    if places := _place_bytes(planned):
        parts[HOST]["places of weights"] = places
    return {tier: dict(held) for tier, held in parts.items()}


def _add_weights(parts: Parts, planned: BlockPlan, compute: str, written: bool) -> None:
    schedule = planned.schedule
    arenas: dict[tuple[str, ...], str] = {(DEVICE,): DEVICE, (HOST,): HOST} if compute == DEVICE else {(DEVICE, HOST): HOST}
    for tiers, holder in arenas.items():
        parts[holder][WEIGHTS] += _worked_out(_held_weights, planned, *tiers)
    if written:
        parts[DISK][WEIGHTS] += _worked_out(_written_weights, planned, DISK)
    if schedule.traffic.weights_on_disk:
        largest_read = _largest_read_and_copied if schedule.traffic.accelerator else _largest_read
        parts[HOST]["weight buffers"] += schedule.weight_buffers * _worked_out(largest_read, planned, DISK)
    if schedule.traffic.accelerator:
        parts[DEVICE]["weight buffers"] += schedule.weight_buffers * _worked_out(_largest_layer, planned, DISK, HOST)


def _place_bytes(planned: BlockPlan) -> int:
    """Bytes of Python's objects that say where tensors lie: in the model, and in each buffer that they meet, with what is read
    to it. Those of a model without experts are few."""
    views, pieces = views_and_pieces(planned)
    held = KNOWN_BYTES * len(planned.spec.tensors) + VIEW_BYTES * views + PIECE_BYTES * pieces
    return max(0, held - FEW_PLACES)


def views_and_pieces(planned: BlockPlan) -> tuple[int, int]:
    """Views and pieces of tensors, as many as a block keeps at most: in each buffer that a layer meets."""
    schedule, traffic = planned.schedule, planned.schedule.traffic
    moved = (Data.WEIGHTS,) if traffic.moves_any_weights else ()
    met = schedule.ways(*moved, batches=traffic.batches)
    pieces = _worked_out(_read_pieces, planned, DISK) + _cuts(schedule) * traffic.layers
    return met * _worked_out(_viewed, planned), met * pieces


def _cuts(schedule: Schedule) -> int:
    """Pieces of a layer that come of cutting it for each batch."""
    return schedule.slices - 1


def _viewed(planned: BlockPlan) -> int:
    return sum(len(layer.tensors) for form in planned.spec.forms for layer in form.layers)


def _read_pieces(planned: BlockPlan, tier: str) -> int:
    total = 0
    for form in planned.spec.forms:
        for (_, placed), alike in layers_by_tiers(form, planned.plan, planned.placement.weights).items():
            there = (one for one, place in zip(form.layers[alike[0]].stored, placed) if place == tier)
            total += len(alike) * sum(1 + one.nbytes // CHUNK_BYTES for one in there)
    return total


def _worked_out(function: Callable[..., int], planned: BlockPlan, *tiers: str) -> int:
    """The parts that depend on the weights alone: they are the same for all blocks of a model with the same shares."""
    key, known = (function, planned.plan.weights if tiers else None, tiers), planned.spec.worked_out
    if key not in known:
        known[key] = function(planned, *tiers)
    found: int = known[key]
    return found


def _held_weights(planned: BlockPlan, *tiers: str) -> int:
    placed = planned.placement.weights
    return Arena.of([tensor.nbytes for tensor in planned.spec.tensors.values() if placed[tensor.name] in tiers]).nbytes


def _written_weights(planned: BlockPlan, tier: str) -> int:
    placed = planned.placement.weights
    on_disk = [tensor for tensor in planned.spec.tensors.values() if placed[tensor.name] == tier]
    return sum(aligned(tensor.stored_nbytes) for tensor in on_disk)


def _largest_layer(planned: BlockPlan, *tiers: str) -> int:
    """Bytes of the layer that has most on these tiers."""
    return max(Arena.of(tensor.nbytes for tensor in own).nbytes for own in _of_layers(planned, tiers))


def _largest_read(planned: BlockPlan, *tiers: str) -> int:
    """The same where layers are computed with as they were read."""
    return read_buffer_bytes(max(read_arena(own, accelerator=False).nbytes for own in _of_layers(planned, tiers)))


def _largest_read_and_copied(planned: BlockPlan, *tiers: str) -> int:
    return read_buffer_bytes(max(read_arena(own, accelerator=True).nbytes for own in _of_layers(planned, tiers)))


def _of_layers(planned: BlockPlan, tiers: tuple[str, ...]) -> Iterator[list[TensorSpec]]:
    """The tensors of each layer that are on these tiers, as decode steps pass it and as prompts do. Of layers with the same
    sizes in the same places there is one."""
    for form in planned.spec.forms:
        for (_, placed), alike in layers_by_tiers(form, planned.plan, planned.placement.weights).items():
            yield [tensor for tensor, tier in zip(form.layers[alike[0]].stored, placed) if tier in tiers]


def _add_kv(parts: Parts, planned: BlockPlan, compute: str) -> None:
    """Adds the KV: each level is kept by itself, and what the host is asked is asked for all heads at once."""
    traffic = planned.schedule.traffic
    unlike: dict[object, list[Place]] = {}
    for place, tier in traffic.kv.items():
        asked_by = place[1] if traffic.attends_on_host else None  # parts of its prompts have places of their own
        unlike.setdefault((planned.kv.layouts(*place), tier, traffic.is_beside(*place), asked_by), []).append(place)
    for number, level in enumerate(planned.levels):
        layouts = [(planned.kv.layouts(*alike[0])[number], alike) for alike in unlike.values()]
        there = {alike[0]: (layout, len(alike)) for layout, alike in layouts if layout is not None}
        if there:
            note_bytes = level.policy.score_bytes if planned.block.only_reads else planned.kv.note_bytes(number)
            _add_level(parts, planned, there, note_bytes, compute)
            if level.policy.reuses_read and not planned.block.only_reads:
                parts[HOST][READ_BEFORE] += sum(
                    count * region_bytes(layout.reused_bytes(level.policy.reused_tokens(layout)))
                    for place, (layout, count) in there.items()
                    if traffic.kv[place] == DISK
                )
    if beside := {batch for layer, batch in traffic.kv if traffic.is_beside(layer, batch)}:
        sizes = (planned.block.batches[batch].size for batch in beside)
        shares, judged = bool(planned.block.prefix_room), planned.plan.policy.judge is not None
        parts[HOST]["asked"] += sum(region_bytes(asked_arena(planned.spec, size, shares, judged).nbytes) for size in sizes)


def _add_level(
    parts: Parts, planned: BlockPlan, there: Mapping[Place, tuple[KVLayout, int]], note_bytes: int, compute: str
) -> None:
    """Adds the KV of one level: what lies at rest, notes of its slots, and buffers. `there`: of places that are alike one, and
    how many there are."""
    traffic, buffers = planned.schedule.traffic, planned.schedule.buffers_of(Data.KV)
    if planned.block.only_reads:  # in one place for all layers and batches
        layouts = [layout for layout, _ in there.values()]
        parts[compute]["KV"] += region_bytes(max(layout.image_bytes for layout in layouts))
        noted = max(layout.score_bytes(note_bytes) for layout in layouts)
        parts[compute]["KV notes"] += region_bytes(noted) if note_bytes else 0
        return
    for place, (layout, count) in there.items():
        tier = traffic.kv[place]
        if note_bytes:
            noted_on = HOST if traffic.is_beside(*place) else compute
            parts[noted_on]["KV notes"] += count * region_bytes(layout.score_bytes(note_bytes))
        home = layout.disk_bytes if tier == DISK else region_bytes(layout.image_bytes)
        parts[tier if tier != DEVICE else compute]["KV"] += count * home
    rooms = KVRooms.of(planned, {place: layout for place, (layout, _) in there.items()}, note_bytes)
    parts[HOST]["KV buffers"] += buffers * rooms.on_host + rooms.staged
    parts[DEVICE]["KV buffers"] += buffers * rooms.on_device
    parts[DEVICE]["KV notes"] += buffers * rooms.noted


def _add_states(parts: Parts, planned: BlockPlan, compute: str) -> None:
    """Adds the states of rows, at rest and in buffers."""
    traffic, buffers, layouts = planned.schedule.traffic, planned.schedule.buffers_of(Data.STATE), planned.states
    if planned.block.only_reads:  # in one place for all layers and batches
        parts[compute]["states"] += max((region_bytes(layout.nbytes) for layout in layouts.values()), default=0)
        return
    for place, layout in layouts.items():
        tier = traffic.state[place]
        parts[tier if tier != DEVICE else compute]["states"] += region_bytes(layout.nbytes)
    rooms = StateRooms.of(planned)
    parts[HOST]["state buffers"] += buffers * rooms.on_host
    parts[DEVICE]["state buffers"] += buffers * rooms.on_device


def _add_hidden(parts: Parts, spec: ModelSpec, block: Block, schedule: Schedule, compute: str) -> None:
    sizes = [region_bytes(hidden_bytes(spec, batch)) for batch in block.batches]
    for nbytes, tier in zip(sizes, schedule.traffic.hidden):
        parts[tier if tier != DEVICE else compute]["activations"] += nbytes
    own = [at for at, layer in enumerate(spec.layers) if layer.tensors] if schedule.traffic.lanes.devices > 1 else []
    for batch, nbytes in enumerate(sizes):  # found from the device before, and left for the next
        passed = sum(schedule.traffic.passes_on(at, batch) for at in (own[0] - 1, own[-1]) if at >= 0) if own else 0
        parts[compute]["activation buffers"] += passed * nbytes
    moved = [nbytes for batch, nbytes in enumerate(sizes) if schedule.traffic.moves_hidden(batch)]
    if moved:
        parts[compute]["activation buffers"] += schedule.buffers_of(Data.HIDDEN) * max(moved)
    if DISK in schedule.traffic.hidden:
        staged = schedule.buffers_of(Data.HIDDEN) if compute == DEVICE else 0
        parts[HOST]["activation buffers"] += (staged + 1) * max(moved)


def _prefix_bytes(planned: BlockPlan, scored_at_once: int) -> int:
    """Bytes of the KV of prefixes that rows share, and of their hidden states where log-probabilities are made of these."""
    spec, tokens = planned.spec, planned.block.prefix_room
    if not tokens:
        return 0
    hidden = spec.width * spec.itemsize if scored_at_once else 0
    return region_bytes(PrefixLayout.of(spec, tokens, planned.plan.prefix_note_bytes).nbytes) + tokens * hidden


def _guessing(planned: BlockPlan) -> Iterator[int]:
    """The batches of which tokens are guessed."""
    return (place for place in range(len(planned.block.batches)) if planned.guesses(place))


def _draft_bytes(planned: BlockPlan) -> int:
    """Bytes of what rows look their guesses up in: their own prompts and texts."""
    guessing = (planned.block.batches[place] for place in _guessing(planned))
    return LOOKED_UP_BYTES * sum(batch.size * batch.longest_text(planned.block.gen_len) for batch in guessing)


def _disk_buffers(planned: BlockPlan, site: Site) -> int:
    """Bytes of the buffers of everything that reads or writes: the disk threads, the workers of both lanes, the caller, and the
    thread that writes prefixes. Weights that stay in memory come through them as well."""
    writes_prefixes = site.writes_prefixes and planned.block.prefix_room > 0
    threads = READERS + WORKERS[READ] + WORKERS[WRITE] + 1 + writes_prefixes
    on_disk = {planned.kv.layouts(*place) for place, tier in planned.schedule.traffic.kv.items() if tier == DISK}
    layouts = [layout for levels in on_disk for layout in levels if layout is not None]
    slots = (layout.page_group_bytes if layout.by_row else layout.padded_slot_bytes for layout in layouts)
    gathered = max((gather_buffer_bytes(layout.page_group_bytes) for layout in layouts if layout.by_row), default=0)
    return threads * disk_buffer_bytes(max(slots, default=0)) + GATHER_PARTS * gathered


# -- limits ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryLimits:
    """Bytes that may be held per tier; None is no limit. `host_base` is what the process holds before anything is loaded.
    `processes`: how many of them run the plan on this machine, each with a device of its own, over weights of host memory that
    they share; one more process supervises them. `folder`: where data lies on the disk, if that is known."""

    device: int | None = None
    host: int | None = None
    disk: int | None = None
    host_base: int = 0
    processes: int = 1
    folder: Path | None = None

    def of(self, tier: str) -> int | None:
        return {DEVICE: self.device, HOST: self.host, DISK: self.disk}[tier]

    def with_limit(self, tier: str, nbytes: int) -> MemoryLimits:
        changed: dict[str, Any] = {tier: nbytes}
        return replace(self, **changed)

    def needs(self, footprint: Footprint, tier: str) -> int:
        return sum(self.held(footprint, tier).values())

    def room(self, footprint: Footprint, tier: str) -> float:
        """Bytes that a plan leaves of a limit."""
        limit = self.of(tier)
        return inf if limit is None else limit - self.needs(footprint, tier)

    def held(self, footprint: Footprint, tier: str) -> dict[str, int]:
        """Bytes by what they hold on a tier, of all processes."""
        parts = {name: nbytes * self.copies(tier, name) for name, nbytes in footprint.parts.get(tier, {}).items()}
        return {**parts, "process": self.base(tier)}

    def base(self, tier: str) -> int:
        """Bytes that processes hold by themselves."""
        return (self.host_base if tier == HOST else 0) * (self.processes + 1 if self.processes > 1 else 1)

    def copies(self, tier: str, part: str) -> int:
        """How many processes hold such bytes on a tier: each has a device of its own, and all of them one copy of weights in
        host memory."""
        return 1 if tier == DEVICE or (tier, part) == (HOST, WEIGHTS) else self.processes

    def first_exceeded(self, footprint: Footprint) -> str | None:
        for tier in TIERS:
            limit = self.of(tier)
            if limit is not None and self.needs(footprint, tier) > limit:
                return tier
        return None

    def exceeded_by(self, peak_bytes: Mapping[str, int]) -> dict[str, int]:
        """Bytes by which peaks exceed the limits, by tier."""
        limits = {tier: self.of(tier) for tier in peak_bytes}
        return {tier: 0 if (most := limits[tier]) is None else max(0, peak - most) for tier, peak in peak_bytes.items()}

    def with_half_free(self) -> MemoryLimits:
        """Limits so much smaller that a plan leaves half of the memory beside the process free."""
        base = self.base(HOST)
        host = None if self.host is None else base + max(0, self.host - base) // 2
        return replace(self, device=None if self.device is None else self.device // 2, host=host)


HOST_SHARE = 0.05  # the kernel, its page tables, other processes
HOST_LEAST, HOST_MOST = 10**9, 8 * 10**9
DEVICE_SHARE = 0.02  # what a driver keeps, error correction included: a T4 of 16 GB has 15.8
CONTEXT_BYTES = 500 * 10**6  # a CUDA context, with the libraries for products


def left_to_system(machine: Machine) -> Mapping[str, int]:
    """Bytes per tier left to the system: a machine's figures are those of the whole; the system, the driver of a GPU and other
    programs need a share. A disk needs none: its figure is what is free there."""
    host = min(max(int(HOST_SHARE * machine.host_bytes), HOST_LEAST), HOST_MOST)
    device = int(DEVICE_SHARE * machine.device_bytes) + CONTEXT_BYTES if machine.has_accelerator else 0
    return {DEVICE: min(device, machine.device_bytes), HOST: min(host, machine.host_bytes)}
