"""The weights of a run: those that stay in the memory that computes with them, those in host memory that a device fetches, and
those that are read from their files. Reads and loads go into rings of buffers, in the slices of the schedule.

What is moved are stored bytes. A layer with few rows computes with them; otherwise they are decoded, once for all its batches,
into a buffer that all layers share. Packed tables of the vocabulary are decoded in pieces: for lookups, the rows of these
tokens; for logits, one part after the other.

Wanted: the experts that the rows of a pass need, known as soon as the router of their block has decided for all rows. Slices
that follow soon are fetched before that, so all their experts are fetched. Later slices wait for a buffer until then, and only
their needed experts are fetched: no transfer waits for a router. Experts that were not fetched are not read, since a slice
computes only with the experts that its rows were given to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.checkpoints.checkpoint import WeightSource
from h2o_flexgen.checkpoints.stored_tensors import Located, Segment
from h2o_flexgen.core.buffer_layout import ALIGNMENT, decoded_bytes, keeps_its_place, part_starts, read_arena, read_buffer_bytes
from h2o_flexgen.core.model_spec import LayerSpec, ModelSpec, TensorSpec, rows_asking
from h2o_flexgen.core.site import DEVICE, DISK, HOST
from h2o_flexgen.formats.kernel_sizes import FLOAT_BYTES
from h2o_flexgen.formats.kernel_table import PRODUCT
from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.kernels.matrix import DecodeBuffer, Matrix, PackedMatrix, SteadyMatrix, memory_of
from h2o_flexgen.kernels.operations import in_one_order
from h2o_flexgen.memory.device import DeviceTier
from h2o_flexgen.memory.disk import Checked, FilePiece
from h2o_flexgen.memory.host import HostTier
from h2o_flexgen.memory.memories import Memories, Ring, own_site
from h2o_flexgen.memory.pack import TORCH_DTYPES, Layout, Pack, PackEntry, Range, copies_between, slices
from h2o_flexgen.models.base import Weights
from h2o_flexgen.schedule.ops import Task, Visit
from h2o_flexgen.schedule.schedule import Schedule

# -- needed experts --------------------------------------------------------------------------------------------------------

Pass = tuple[int, int, int]  # step, block, and the batch that the weights come with

ALL = None  # so many rows have chosen that hardly any expert is left out
NOTHING: frozenset[str] = frozenset()


class Wanted:
    def __init__(self, spec: ModelSpec, schedule: Schedule) -> None:
        self._layers = spec.layers
        self._weight_batch = schedule.weight_batch
        self._batches = Counter(map(schedule.weight_batch, range(schedule.traffic.batches)))  # that share a pass over weights
        self._routers = _routers(spec, schedule)
        self._chosen: dict[Pass, set[int] | None] = {}
        self._over: Counter[Pass] = Counter()
        self._known: dict[Pass, frozenset[int]] = {}

    # -- for the thread that computes --------------------------------------------------------------------------------------

    def waits_for(self, layer: int) -> bool:
        """Whether what is fetched depends on what the router of this layer chooses."""
        return layer in self._routers

    def chose(self, visit: Visit, experts: Tensor) -> None:
        """Records the experts (..., chosen) that the router of a visit has chosen for some of its rows."""
        if not self.waits_for(visit.layer):
            return
        place = self._pass(visit.step, visit.layer, visit.batch)
        before = self._chosen.setdefault(place, set())
        if before is ALL or experts[..., 0].numel() >= self._routers[visit.layer]:
            self._chosen[place] = ALL
        else:
            before.update(experts.unique().tolist())

    def computed(self, visit: Visit) -> None:
        """Records that a visit is over, or had nothing to compute."""
        if not self.waits_for(visit.layer):
            return
        place = self._pass(visit.step, visit.layer, visit.batch)
        self._over[place] += 1
        if self._over[place] == self._batches[place[-1]]:
            if chosen := self._chosen.pop(place, ALL):
                self._known = {place: frozenset(chosen)}  # nothing of the block before is fetched any more
            del self._over[place]

    # -- for the lanes that fetch ------------------------------------------------------------------------------------------

    def left_out(self, visit: Visit) -> frozenset[str]:
        """The tensors of a layer, by their names in the model, that are known by now not to be needed."""
        experts = self._known.get(self._pass(*visit))
        if experts is None:
            return NOTHING
        return frozenset(name for name, number in self._layers[visit.layer].expert_of.items() if number not in experts)

    def _pass(self, step: int, layer: int, batch: int) -> Pass:
        block = self._layers[layer].block
        return step, -1 if block is None else block, self._weight_batch(batch)


def _routers(spec: ModelSpec, schedule: Schedule) -> Mapping[int, int]:
    """The layers that choose among experts that are fetched, and how many tokens need nearly all of them."""
    with_experts = [number for number, layer in enumerate(spec.layers) if layer.expert_of]
    found: dict[int, int] = {}
    first: dict[int | None, int] = {}
    for number in with_experts:
        layer = spec.layers[number]
        router = first.setdefault(layer.block, number)
        if router != number and schedule.traffic.moves_weights(number):
            found[router] = rows_asking(min(share for _, share in layer.products))
    return found


# -- weights ---------------------------------------------------------------------------------------------------------------

Copies = tuple[list[tuple[Tensor, Tensor]], int]  # to and from, and the bytes of tensors in them
Places = Callable[[], Mapping[str, Located]]  # called only when something has to be read


class WeightStore:
    def __init__(self, spec: ModelSpec, tiers: Mapping[str, str], source: WeightSource, memories: Memories) -> None:
        self._spec = spec
        self._tiers = tiers
        self._memories = memories
        self._dtype = TORCH_DTYPES[spec.dtype]
        accelerator = memories.device.accelerator
        self._stays_in = (DEVICE,) if accelerator else (DEVICE, HOST)
        self._stored = source.locate(self._on(DISK))
        self._check_stored()
        resident = memories.compute if accelerator else memories.at_rest
        self._resident = self._fill(source, self._on(*self._stays_in), resident)
        self._host = self._fill(source, self._on(HOST) if accelerator else [], memories.at_rest)
        self._host_ring = self._device_ring = Ring(memories.weights, buffers=0, nbytes=0)
        decoded = decoded_bytes(spec, own_site(memories.device.kind, accelerator))
        self._decoded = memories.compute.alloc(decoded) if decoded else None

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that are read in every step."""
        return tuple(dict.fromkeys(stored.file for one in self._stored.values() for _, stored in one.segments))

    # -- once ----------------------------------------------------------------------------------------------------------

    def _on(self, *tiers: str) -> list[TensorSpec]:
        return [tensor for tensor in self._spec.tensors.values() if self._tiers[tensor.name] in tiers]

    def _type_of(self, tensor: TensorSpec) -> torch.dtype:
        """The type of a plain tensor's values: some have 32 bits in any model."""
        return torch.float32 if tensor.itemsize == FLOAT_BYTES else self._dtype

    def _layout(self, tensors: Iterable[TensorSpec]) -> Layout:
        return Layout.pack(self._entries(tensors))

    def _entries(self, tensors: Iterable[TensorSpec]) -> dict[str, PackEntry]:
        return {tensor.name: PackEntry(0, tensor.shape, self._type_of(tensor), tensor.format) for tensor in tensors}

    def _check_stored(self) -> None:
        """Checks what every step reads, once and before anything is computed. Steps read parts of tensors, and would find
        damage only after tokens were handed out."""
        stored = [segment.stored for located in self._stored.values() for segment in located.segments]
        checked = [Checked(one.file, one.offset, one.nbytes, one.check) for one in stored if one.check is not None]
        self._memories.files.check(checked)

    def _fill(self, source: WeightSource, tensors: list[TensorSpec], memory: HostTier | DeviceTier) -> Pack:
        """Makes or reads the tensors into one arena; besides it, at most one tensor is held at a time. In memory that several
        processes share, only one process does this."""
        layout = self._layout(tensors)
        pack = Pack(memory.alloc(layout.nbytes) if tensors else torch.empty(0, dtype=torch.uint8), layout)
        if self._memories.finds_weights and memory is self._memories.at_rest:
            return pack
        located = cache(lambda: source.locate(tensors))
        for tensor in tensors:
            out = pack.bytes(tensor.name)
            here = out if out.device.type == "cpu" else torch.empty(out.nbytes, dtype=torch.uint8)
            self._bring(tensor, here, source, located)
            if here is not out:
                out.copy_(here)
        return pack

    def hand_round(self, give: Callable[[Tensor], None]) -> None:
        """Gives the weights that stay on the device, tensor by tensor, to the processes that share those in host memory."""
        for tensor in self._on(*self._stays_in) if self._memories.device.accelerator else ():
            give(self._resident.bytes(tensor.name))

    def _bring(self, tensor: TensorSpec, out: Tensor, source: WeightSource, located: Places) -> None:
        """Makes or reads the format's bytes of one tensor in host memory."""
        values = out.view(self._type_of(tensor)).view(tensor.shape) if tensor.format == PLAIN else out
        is_there = source.fill(tensor, values)
        if not is_there:
            segments = located()[tensor.name].segments
            pieces = ((segment, self._piece(tensor, segment, out, 0)) for segment in segments)
            self._memories.files.read(replace(piece, check=one.stored.check) for one, piece in pieces if piece is not None)

    def _piece(self, tensor: TensorSpec, segment: Segment, out: Tensor, start: int) -> FilePiece | None:
        """The bytes of a tensor from `start` on that belong to the segment, and their place in its file. Plain values may have
        another type there."""
        stored, own = segment.stored, self._type_of(tensor)
        if tensor.format == PLAIN and (dtype := TORCH_DTYPES[stored.dtype]) != own:
            before = start // own.itemsize * dtype.itemsize
            return FilePiece(stored.file, stored.offset + before, out.view(own), dtype)
        first, behind = max(start, segment.start), min(start + len(out), segment.start + stored.nbytes)
        if first >= behind:
            return None
        return FilePiece(stored.file, stored.offset + first - segment.start, out[first - start : behind - start], torch.uint8)

    # -- for a block ---------------------------------------------------------------------------------------------------

    def prepare(self, schedule: Schedule) -> None:
        """Makes the rings that schedules use, once: all blocks of a plan move the same weights through the same buffers.
        Pieces, copies and views into them are kept for the block."""
        self._schedule = schedule
        self._pieces: dict[SlicePlace, list[tuple[str, list[FilePiece]]]] = {}  # by tensor
        self._copies: dict[SlicePlace, Copies] = {}
        self._views: dict[LayerPlace, dict[str, Matrix]] = {}
        self._parts: dict[LayerPlace, list[PackedMatrix]] = {}  # parts of a packed logit matrix
        self._packed: dict[LayerPlace, list[PackedMatrix]] = {}  # among the views
        self._viewed_pass = -1
        self.wanted = Wanted(self._spec, schedule)
        self.skipped_bytes: Counter[str] = Counter()  # by lane: of experts that no row chose
        memories, buffers = self._memories, schedule.weight_buffers
        largest_moved = _largest(self._moved_layouts) if memories.device.accelerator else 0
        largest_read = read_buffer_bytes(_largest(self._disk_layouts))
        self._host_ring = self._host_ring or Ring(memories.weights, buffers, largest_read)
        self._device_ring = self._device_ring or Ring(memories.compute, buffers, largest_moved)

    def layer(self, visit: Visit) -> LayerSpec:
        """The layer as the rows of a visit pass it."""
        if len(self._spec.forms) == 1:
            return self._spec.layers[visit.layer]
        return self._layer_of(self._pass_of(visit))

    def _pass_of(self, visit: Visit) -> LayerPass:
        return LayerPass(visit.layer, len(self._spec.forms) > 1 and self._schedule.traffic.is_of_prompts(visit.step))

    def _layer_of(self, one: LayerPass) -> LayerSpec:
        return self._spec.forms[one.is_of_prompts].layers[one.layer]

    @cached_property
    def _passes(self) -> list[LayerPass]:
        forms = range(len(self._spec.forms))
        return [LayerPass(layer, bool(form)) for form in forms for layer in range(len(self._spec.layers))]

    @cached_property
    def _disk_layouts(self) -> dict[LayerPass, Layout]:
        return {one: self._disk_layout(self._of(self._layer_of(one), DISK)) for one in self._passes}

    def _disk_layout(self, tensors: Sequence[TensorSpec]) -> Layout:
        arena = read_arena(tensors, self._memories.device.accelerator, self._places_in_page)
        return Layout.placed(self._entries(tensors), arena)

    @cached_property
    def _places_in_page(self) -> Mapping[str, int]:
        """The place in a page of its file at which a tensor begins, for tensors that keep this place."""
        if self._memories.device.accelerator:
            return {}
        found = ((self._spec.tensors[name], one.segments) for name, one in self._stored.items())
        return {tensor.name: own[0].stored.offset % ALIGNMENT for tensor, own in found if self._can_keep_its_place(tensor, own)}

    def _can_keep_its_place(self, tensor: TensorSpec, segments: Sequence[Segment]) -> bool:
        """Whether it lies in the file in one piece, with the bytes and at an address with which it can be computed."""
        if len(segments) > 1 or not keeps_its_place(tensor):
            return False
        stored, dtype = segments[0].stored, self._type_of(tensor)
        return tensor.format != PLAIN or (TORCH_DTYPES[stored.dtype] == dtype and stored.offset % dtype.itemsize == 0)

    @cached_property
    def _moved_layouts(self) -> dict[LayerPass, Layout]:
        return {one: self._layout(self._of(self._layer_of(one), HOST, DISK)) for one in self._passes}

    def _of(self, layer: LayerSpec, *tiers: str) -> list[TensorSpec]:
        return [tensor for tensor in layer.stored if self._tiers[tensor.name] in tiers]

    def _slice(self, place: SlicePlace, tier: str) -> list[Range]:
        tensors = self._of(self._layer_of(place.of), tier)
        sizes = {tensor.name: tensor.nbytes for tensor in tensors}
        return slices(sizes, self._schedule.slices, self._places_in_page)[place.part]

    # -- actions -------------------------------------------------------------------------------------------------------

    def read(self, task: Task) -> int:
        """Disk -> host."""
        place = self._place(task)
        if place not in self._pieces:
            target = self._read_pack(place)
            self._pieces[place] = [(cut.name, self._pieces_of(cut, target)) for cut in self._slice(place, DISK)]
        left_out = self.wanted.left_out(task.visit)
        for name, pieces in self._pieces[place]:
            self.skipped_bytes[task.lane] += sum(piece.nbytes for piece in pieces) if name in left_out else 0
        return self._memories.files.read(
            [piece for name, pieces in self._pieces[place] if name not in left_out for piece in pieces]
        )

    def _pieces_of(self, cut: Range, target: Pack) -> list[FilePiece]:
        """The pieces of a part of a tensor, cut once instead of at every read."""
        tensor, out = self._spec.tensors[cut.name], target.range(cut)
        found = (self._piece(tensor, segment, out, cut.start) for segment in self._stored[cut.name].segments)
        pieces = [piece for piece in found if piece is not None]
        if cut.name in self._places_in_page:
            pieces = [piece.alone_in(target.pages(cut)) for piece in pieces]
        return [chunk for piece in pieces for chunk in piece.cut()]

    def load(self, task: Task) -> int:
        """Host -> device: weights that stay in host memory, and those that the read of the same slice has put there."""
        place = self._place(task)
        if place not in self._copies:
            self._copies[place] = self._copies_of(place, NOTHING)
        copies, moved = self._copies[place]
        if left_out := self.wanted.left_out(task.visit):
            whole, (copies, moved) = moved, self._copies_of(place, left_out)
            self.skipped_bytes[task.lane] += whole - moved
        for device, host in copies:
            device.copy_(host, non_blocking=True)
        return moved

    def _copies_of(self, place: SlicePlace, left_out: frozenset[str]) -> Copies:
        parts = (self._slice(place, tier) for tier in (HOST, DISK))
        resting, read = ([cut for cut in cuts if cut.name not in left_out] for cuts in parts)
        target = Pack(self._device_ring[place.slot], self._moved_layouts[place.of])
        copies = copies_between(self._host, target, resting)
        copies += copies_between(self._read_pack(place), target, read) if read else []
        return copies, sum(cut.stop - cut.start for cut in (*resting, *read))

    def _place(self, task: Task) -> SlicePlace:
        part = task.batch if self._schedule.cuts_layers else 0
        return SlicePlace(self._pass_of(task.visit), part, self._schedule.weight_buffer(task.visit))

    def _read_pack(self, place: SlicePlace) -> Pack:
        return Pack(self._host_ring[place.slot], self._disk_layouts[place.of])

    def _layer_place(self, visit: Visit) -> LayerPlace:
        return LayerPlace(self._pass_of(visit), self.buffer(visit))

    def views(self, visit: Visit) -> Weights:
        """The layer's weights by local name, where they lie. Packed matrices are decoded into a buffer, once per pass over the
        layer's weights, since the next pass finds other bytes there. Valid until the next call, which decodes into the same
        buffer. Tables decoded in pieces are not included."""
        place, number = self._layer_place(visit), self._schedule.weight_number(*visit)
        if place not in self._views:
            layer = self._layer_of(place.of)
            whole = ((local, tensor) for local, tensor in layer.tensors if local not in layer.in_pieces)
            multiplied = dict(layer.products).keys() if self._spec.product != PRODUCT else ()
            self._views[place] = {local: self._weight(tensor, place, local in multiplied) for local, tensor in whole}
            self._packed[place] = [weight for weight in self._views[place].values() if isinstance(weight, PackedMatrix)]
        if number != self._viewed_pass:
            self._viewed_pass = number
            for weight in (*self._packed[place], *self._parts.get(place, [])):
                weight.renew()
        return self._views[place]

    def kind(self, visit: Visit) -> Hashable:
        """What the matrices of a layer are, apart from their values."""
        each = ((local, tensor.shape, tensor.format) for local, tensor in self.layer(visit).tensors)
        return tuple(each), tuple((local, type(weight)) for local, weight in self.views(visit).items())

    def memory(self, visit: Visit) -> Sequence[Tensor]:
        """The tensors in which a layer's weights lie, in the order of `kind`."""
        self.views(visit)
        return [memory_of(weight) for weight in self._views[self._layer_place(visit)].values()]

    def buffer(self, visit: Visit) -> int:
        """The buffer through which a layer's weights come; the same number for all visits of a layer that is not moved."""
        moves = self._schedule.traffic.moves_weights(visit.layer)
        return self._schedule.weight_buffer(visit) if moves else 0

    def forget_decoded(self) -> None:
        """Makes the next visit decode its matrices, whatever was decoded before: a captured graph must decode them itself."""
        self._viewed_pass = -1

    def _weight(self, tensor: TensorSpec, place: LayerPlace, is_steady: bool) -> Matrix:
        """`is_steady`: products with this matrix must not depend on the rows beside a row."""
        pack = self._pack_of(tensor, place)
        if tensor.format == PLAIN:
            return SteadyMatrix(pack.view(tensor.name)) if is_steady else pack.view(tensor.name)
        return pack.matrix(tensor.name, self._room(tensor, self._layer_of(place.of)), self._spec.product)

    def _room(self, tensor: TensorSpec, layer: LayerSpec) -> DecodeBuffer | None:
        if self._decoded is None:
            return None
        return DecodeBuffer(Pack(self._decoded, self._decoded_layout(layer)).view(tensor.name))

    def look_up(self, visit: Visit, tokens: Tensor) -> tuple[Tensor, Weights]:
        """Tokens (rows, tokens) and weights for a layer that takes tokens. From a packed table only the rows of these tokens
        are decoded. They become the table, and the tokens become places in it."""
        layer, views = self.layer(visit), self.views(visit)
        local, table = layer.token_table, layer.packed_tensor(layer.token_table)
        if local is None or table is None:
            return tokens, views
        found = torch.empty(tokens.numel(), table.shape[1], dtype=self._dtype, device=tokens.device)
        pack = self._pack_of(table, self._layer_place(visit))
        pack.decode_rows(table.name, tokens.flatten(), found)
        return torch.arange(len(found), device=found.device).view(tokens.shape), {**views, local: found}

    def for_logits(self, visit: Visit, hidden: Tensor) -> Iterator[Weights]:
        """The weights of a layer that makes logits of hidden states (positions, width): once where a kernel in C reads the
        matrix as it is stored, otherwise part by part."""
        layer = self.layer(visit)
        local, matrix = layer.logit_matrix, layer.packed_tensor(layer.logit_matrix)
        if local is None or matrix is None or not in_one_order(self._spec.product, matrix.format, hidden, len(hidden)):
            yield from self.logit_parts(visit)
            return
        whole = self._pack_of(matrix, self._layer_place(visit))
        yield {**self.views(visit), local: whole.matrix(matrix.name, None, self._spec.product)}

    def logit_parts(self, visit: Visit) -> Iterator[Weights]:
        """The same once for each part of a packed matrix, each valid until the next. Parts with a buffer of their own are
        decoded once for all batches of a pass; the others take turns in the last buffer."""
        layer, place = self.layer(visit), self._layer_place(visit)
        local, matrix = layer.logit_matrix, layer.packed_tensor(layer.logit_matrix)
        if local is None or matrix is None or not layer.logit_parts:
            yield self.views(visit)
            return
        if place not in self._parts:
            rooms = self._rooms_for_parts(layer, matrix)
            whole = self._pack_of(matrix, place).matrix(matrix.name, rooms[0], self._spec.product)
            self._parts[place] = [
                whole.part(rows, rooms[min(number, len(rooms) - 1)]) for number, rows in enumerate(layer.logit_parts)
            ]
        views = self.views(visit)
        for part, rows in zip(self._parts[place], layer.logit_parts, strict=True):
            yield {**views, **_part_of_biases(views, layer.logit_bias, rows), local: part}

    def _rooms_for_parts(self, layer: LayerSpec, matrix: TensorSpec) -> list[DecodeBuffer | None]:
        """The buffers of parts: all that the layer's other weights leave of the buffer for the largest layer."""
        if self._decoded is None:
            return [None]
        part, room = self._decoded_layout(layer).entries[matrix.name], self._decoded
        starts = part_starts(self._spec, layer)
        return [DecodeBuffer(room[start : start + part.nbytes].view(self._dtype).view(part.shape)) for start in starts]

    def _pack_of(self, tensor: TensorSpec, place: LayerPlace) -> Pack:
        """The pack with a tensor's bytes while its layer computes."""
        if self._tiers[tensor.name] in self._stays_in:
            return self._resident
        if self._memories.device.accelerator:
            return Pack(self._device_ring[place.slot], self._moved_layouts[place.of])
        return Pack(self._host_ring[place.slot], self._disk_layouts[place.of])

    def _decoded_layout(self, layer: LayerSpec) -> Layout:
        """A router that works in fp32 has its values in fp32, too."""
        dtypes = {self._spec.itemsize: self._dtype}
        entries = ((tensor, dtypes.get(tensor.itemsize, torch.float32)) for tensor in layer.decoded)
        return Layout.pack({tensor.name: PackEntry(0, tensor.shape, dtype) for tensor, dtype in entries})


class LayerPass(NamedTuple):
    """A layer as decode steps pass it, or as prompts do."""

    layer: int
    is_of_prompts: bool


class LayerPlace(NamedTuple):
    """A layer in a buffer of a ring."""

    of: LayerPass
    slot: int


class SlicePlace(NamedTuple):
    """A slice of a layer in a buffer of a ring."""

    of: LayerPass
    part: int
    slot: int


def _largest(layouts: Mapping[LayerPass, Layout]) -> int:
    return max(layout.nbytes for layout in layouts.values())


def _part_of_biases(views: Weights, name: str | None, rows: slice) -> Weights:
    biases = None if name is None else views[name]
    return {name: biases[rows]} if name is not None and isinstance(biases, Tensor) else {}
