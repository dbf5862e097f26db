"""Layout: how many bytes each buffer and file takes, and where each part of it begins.

Allocators and stores lay data out with these functions, and the footprint adds up what they return. The working room of the C
kernels is in formats/kernel_sizes.py, beside the header that they share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import inf, prod
from typing import NamedTuple

from h2o_flexgen.core.model_spec import LayerSpec, ModelSpec, StateTensor, TensorSpec
from h2o_flexgen.core.prefix_groups import room_of
from h2o_flexgen.core.site import Site
from h2o_flexgen.core.workload import Batch
from h2o_flexgen.formats.blocked import Blocked
from h2o_flexgen.formats.kernel_sizes import FLOAT_BYTES
from h2o_flexgen.formats.table import FORMATS, PLAIN

ALIGNMENT = 4096  # of every buffer and of every part of our files, as direct disk access requires
VIEW_ALIGNMENT = 64  # of plain values: with less, the same product may come out with other last bits (measured with one row)
PAGE_ALIGNED_FROM = 16 * ALIGNMENT  # larger tensors start at a page, or keep their place in one: reads go straight there
HALF_BYTES = 2  # of a value of 16 bits
READERS = 6  # threads that read and write files
GATHER_PARTS = 32  # of the buffer for single tokens, of which a disk reads many at once; without a queue, a thread has each
GATHERED_BYTES = 64 << 10  # of such a part, which a thread reads at a time, if they lie side by side
SLOT_NUMBER_BYTES = 8
READ_NUMBER_BYTES = 8  # of a token that was read: its slot, and the steps in which it was not wanted
PICKED_VALUES = 1 << 20  # logits that tokens are picked from at once: temporaries in float64 have 8 MiB, whatever the batch
CHUNK_BYTES = 4 << 20  # bytes of a file that one reader takes at a time
HUGE_PAGE_BYTES = 2 << 20
WHOLE_HUGE_PAGES_FROM = 4 * HUGE_PAGE_BYTES  # a smaller buffer might become larger by more than a quarter


def aligned(nbytes: int, alignment: int = ALIGNMENT) -> int:
    return -(-nbytes // alignment) * alignment


def region_bytes(nbytes: int) -> int:
    """Bytes of host memory that are allocated for this many: whole pages, one at least."""
    return aligned(max(nbytes, 1))


def read_buffer_bytes(nbytes: int) -> int:
    """Bytes of a buffer that weights are read into. A large one has whole huge pages: disks read into small pages at half their
    rate."""
    return aligned(nbytes, HUGE_PAGE_BYTES if nbytes >= WHOLE_HUGE_PAGES_FROM else ALIGNMENT)


def disk_buffer_bytes(nbytes: int) -> int:
    """The buffer of a disk thread for this many bytes: a chunk that begins and ends in the middle of a page still fits."""
    return aligned(max(nbytes, CHUNK_BYTES + 2 * ALIGNMENT))


class Arena(NamedTuple):
    starts: tuple[int, ...]  # the start of each tensor
    nbytes: int

    @classmethod
    def of(cls, sizes: Iterable[int]) -> Arena:
        """Tensors of these sizes, one after the other: large ones start at a page, the others at a cache line."""
        starts, end = [], 0
        for nbytes in sizes:  # of a model with experts there are thousands, so no function is called for each
            alignment = ALIGNMENT if nbytes >= PAGE_ALIGNED_FROM else VIEW_ALIGNMENT
            start = -(-end // alignment) * alignment
            starts.append(start)
            end = start + nbytes
        return cls(tuple(starts), aligned(end))


def _start_behind(end: int, nbytes: int) -> int:
    return aligned(end, ALIGNMENT if nbytes >= PAGE_ALIGNED_FROM else VIEW_ALIGNMENT)


def keeps_its_place(tensor: TensorSpec) -> bool:
    """Whether a tensor that is read from a file may begin anywhere in a page. Blocks may: GGUF files have them at
    any place, and the code that reads them, in C and in torch, takes bytes from any address. Plain values of 16 bits may:
    their products have the same bits wherever they begin. In float32, those of one row by torch do not."""
    if tensor.format == PLAIN:
        keeps = tensor.itemsize == tensor.stored_itemsize == HALF_BYTES
    else:
        keeps = isinstance(FORMATS[tensor.format], Blocked)
    return keeps and tensor.nbytes >= PAGE_ALIGNED_FROM


def read_arena(tensors: Iterable[TensorSpec], accelerator: bool, places: Mapping[str, int] | None = None) -> Arena:
    """Tensors that are read from files, one after the other. Where they are computed with as they were read, and not copied to
    an accelerator first, those that keep their place begin in a page where they do in their file (`places`, by name), and have
    their pages for themselves: so whole pages of the file are read to where they belong."""
    starts, end = [], 0
    for tensor in tensors:
        if not accelerator and keeps_its_place(tensor):
            starts.append(aligned(end) + (places or {}).get(tensor.name, 0))
            end = aligned(end) + aligned(tensor.nbytes) + ALIGNMENT
        else:
            starts.append(_start_behind(end, tensor.nbytes))
            end = starts[-1] + tensor.nbytes
    return Arena(tuple(starts), aligned(end))


def decoded_arena(layer: LayerSpec) -> Arena:
    """The values of a layer that are held beside its bytes while it computes; the part of a head's table comes last."""
    return Arena.of(tensor.decoded_nbytes for tensor in layer.decoded)


def decoded_bytes(spec: ModelSpec, site: Site) -> int:
    """Bytes of the buffer for decoded values, which all layers share; none where products of any rows read packed bytes."""
    is_read = all(site.reads(spec.product, format, spec.dtype, rows=inf) for format in spec.formats if format != PLAIN)
    return 0 if is_read else _largest_decoded(spec)


def _largest_decoded(spec: ModelSpec) -> int:
    return max(decoded_arena(layer).nbytes for form in spec.forms for layer in form.unlike_layers)


def part_starts(spec: ModelSpec, head: LayerSpec) -> range:
    """The places for decoded parts of the head's packed table in that buffer, after its other weights."""
    part = head.decoded[-1].decoded_nbytes
    return range(decoded_arena(head).starts[-1], _largest_decoded(spec) - part + 1, aligned(part))


def hidden_bytes(spec: ModelSpec, batch: Batch) -> int:
    """Bytes of the hidden states of a batch between two layers, at their widest: of its prompts, or of a decode step."""
    return max(tokens * form.widest for tokens, form in _hidden_tokens_of(spec, batch)) * spec.itemsize


def next_hidden_bytes(spec: ModelSpec, batch: Batch, at_once: int, moves: bool, accelerator: bool) -> int:
    """Bytes beside them for those that a layer makes of them, with so many tokens of prompts computed at once."""
    most = max(at_once, batch.size)
    forms = _hidden_tokens_of(spec, batch)
    return max(_values_beside(form, tokens, min(tokens, most), moves, accelerator) for tokens, form in forms) * spec.itemsize


def next_step_bytes(spec: ModelSpec, rows: int, moves: bool, accelerator: bool) -> int:
    """The same in a decode step."""
    return _values_beside(spec, rows, rows, moves, accelerator) * spec.itemsize


def _values_beside(spec: ModelSpec, tokens: int, at_once: int, moves: bool, accelerator: bool) -> int:
    """Values that are held beside a batch's states at their widest. What is made part by part takes the place of what it is
    made of: in the buffer of states that move, or where both are as wide."""
    found = 0
    for before, behind, overwrites in spec.widths:
        if moves:
            held = (at_once if accelerator or behind <= before else tokens) * behind
        else:
            made = 0 if overwrites else at_once if behind == before else tokens
            held = tokens * (before - spec.widest) + made * behind
        found = max(found, held)
    return found


def states_start(tokens: int, before: int, behind: int) -> int:
    """The first value of a layer's states in a buffer in which, part by part, those that it makes of them are written from the
    start: no part is written where the states of a later one lie. `before`, `behind`: values of a token in and out."""
    return tokens * max(0, behind - before)


def prompt_form(spec: ModelSpec, batch: Batch) -> ModelSpec:
    """The model as the prompts of a batch pass it: like decode steps, where rows come and go and both are computed at once."""
    return spec.of_prompts if batch.seats is None else spec


def _hidden_tokens_of(spec: ModelSpec, batch: Batch) -> Sequence[tuple[int, ModelSpec]]:
    return (_hidden_tokens(batch), prompt_form(spec, batch)), (batch.size, spec)


def _hidden_tokens(batch: Batch) -> int:
    shared = 0 if batch.seats is None else batch.seats.prefixes.computed  # prefixes are computed beside their first rows
    return batch.readings * batch.size * batch.prompt_len + shared


def asked_arena(spec: ModelSpec, rows: int, shares: bool, judged: bool) -> Arena:
    """The places of what crosses the link where the host attends a decode step: queries, keys, values, and the outcome; where
    queries have one more key, its weight, and where rows share prefixes its values; and where a policy asks what tokens are
    worth, that comes last."""
    widest = max(own.head_dim for own in spec.of_heads)
    heads = rows * spec.heads * widest * spec.itemsize
    kv_heads = rows * max(own.kv_heads * own.head_dim for own in spec.of_heads) * spec.itemsize
    values = kv_heads * (spec.kv_sets - 1)  # none where keys have them
    weight = (rows * spec.heads * FLOAT_BYTES,) if shares or spec.sink_scores else ()
    of_prefix = (rows * spec.heads * widest * FLOAT_BYTES,) if shares else ()
    worth = (rows * max(own.kv_heads for own in spec.of_heads) * FLOAT_BYTES,) if judged else ()
    return Arena.of((heads, kv_heads, values, heads, *weight, *of_prefix, *worth))


def probe_bytes(spec: ModelSpec) -> int:
    """Bytes of the weights and biases of a probe where it is computed with."""
    return len(spec.kv_layers) * spec.kv_heads * (spec.width + 1) * FLOAT_BYTES


@dataclass(frozen=True)
class PrefixLayout:
    """The KV of a shared prefix, of all layers, where it is computed with: an image for each layer, and after them what a
    policy that judges it knows of each token. The states at its end lie behind all tokens for which there is room."""

    heads: tuple[int, ...]  # KV heads of each layer with KV
    tokens: int
    row_bytes: tuple[int, ...]  # bytes of keys and values of one token in each of these layers
    note_bytes: int = 0  # bytes that a policy keeps of a head's token
    states: tuple[StateLayout, ...] = ()  # of one row, in each layer with states

    @classmethod
    def of(cls, spec: ModelSpec, tokens: int, note_bytes: int) -> PrefixLayout:
        layers = [*map(spec.at, spec.kv_layers)]
        heads, row_bytes = tuple(own.kv_heads for own in layers), tuple(own.kv_bytes_per_slot for own in layers)
        return cls(heads, tokens, row_bytes, note_bytes, states_of_one(spec))

    def image_start(self, place: int) -> int:
        """The first byte of the image of a layer, which stands there among those with KV."""
        return self.tokens * sum(self.row_bytes[:place])

    def image_bytes(self, place: int) -> int:
        return self.tokens * self.row_bytes[place]

    def notes_start(self, place: int) -> int:
        return self.tokens * (sum(self.row_bytes) + self.note_bytes * sum(self.heads[:place]))

    def notes_bytes(self, place: int) -> int:
        return self.heads[place] * self.tokens * self.note_bytes

    @property
    def nbytes(self) -> int:
        return self.notes_start(len(self.heads))

    # -- states ----------------------------------------------------------------------------------------------------------

    def state_start(self, place: int) -> int:
        """The first byte of the states of a layer, which stands there among those with states."""
        return room_of(self.tokens) * self.token_bytes + sum(layout.nbytes for layout in self.states[:place])

    @property
    def state_bytes(self) -> int:
        return sum(layout.nbytes for layout in self.states)

    @property
    def token_bytes(self) -> int:
        return replace(self, tokens=1).nbytes

    @property
    def beside(self) -> int:
        """The tokens that would have room where the states lie."""
        return room_of(-(-self.state_bytes // self.token_bytes)) if self.states else 0


@dataclass(frozen=True)
class KVLayout:
    """The KV of one batch in one layer. In memory it is an image of all slots. On disk, slots are padded so that any range can
    be read and written directly; after them is a journal of slots that changed one by one.

    Where decode steps choose the tokens that they bring, KV lies row by row. On disk each row has its tokens in *page groups*:
    as many tokens as a page has room for, or one in several. A token has its keys of all heads, and behind them its values."""

    rows: int
    heads: int
    slots: int  # slots of each row
    journal: int  # slots of the journal
    row_bytes: int  # bytes of a row's keys and values in one slot
    by_row: bool = False  # at home rows lie one behind the other: on disk in page groups

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.rows, self.heads, self.slots

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot of all rows."""
        return self.rows * self.row_bytes

    @property
    def image_bytes(self) -> int:
        return self.slots * self.slot_bytes

    @property
    def staged_bytes(self) -> int:
        """Bytes of one slot of all rows and heads, and of the numbers of these slots: what crosses the link from a device where
        each row and head has changed a slot of its own."""
        return self.slot_bytes + self.rows * self.heads * SLOT_NUMBER_BYTES

    @property
    def numbers_start(self) -> int:
        """The place of numbers of slots behind an image."""
        return aligned(self.image_bytes, SLOT_NUMBER_BYTES)

    @property
    def numbered_bytes(self) -> int:
        """Bytes of an image and of numbers of its slots: where a device chooses what is read of a disk, both pass the host."""
        return self.numbers_start + prod(self.shape) * SLOT_NUMBER_BYTES

    def score_bytes(self, of_a_slot: int) -> int:
        """Bytes of what a policy keeps about every slot of a head; they lie beside the image."""
        return prod(self.shape) * of_a_slot

    # -- on disk -------------------------------------------------------------------------------------------------------

    @property
    def padded_slot_bytes(self) -> int:
        return aligned(self.slot_bytes)

    @property
    def disk_bytes(self) -> int:
        return self.rows * self.disk_row_bytes if self.by_row else self.journal_start(self.journal)

    @property
    def page_group_tokens(self) -> int:
        return max(1, ALIGNMENT // self.row_bytes)

    @property
    def page_group_bytes(self) -> int:
        return aligned(self.page_group_tokens * self.row_bytes)

    @property
    def disk_row_bytes(self) -> int:
        """Bytes of a row in page groups."""
        return -(-self.slots // self.page_group_tokens) * self.page_group_bytes

    def journal_start(self, entry: int) -> int:
        return (self.slots + entry) * self.padded_slot_bytes

    @property
    def slots_at_once(self) -> int:
        """The number of slots that a disk thread takes at a time."""
        return max(1, CHUNK_BYTES // self.padded_slot_bytes)

    @property
    def page_groups_at_once(self) -> int:
        """The number of page groups that a disk thread takes at a time."""
        return max(1, CHUNK_BYTES // self.page_group_bytes)

    def reused_bytes(self, tokens: int) -> int:
        """Bytes of so many tokens of each row that stay in memory between the steps that read them, and of their numbers."""
        return self.reused_start(tokens) + self.rows * tokens * READ_NUMBER_BYTES

    def reused_start(self, tokens: int) -> int:
        """The place of these numbers, behind the tokens."""
        return aligned(self.rows * tokens * self.row_bytes, READ_NUMBER_BYTES)

    def of_rows(self, rows: int) -> KVLayout:
        """The layout of only this many rows: those that are left, or those of a part."""
        return replace(self, rows=rows)


def gather_buffer_bytes(page_group_bytes: int) -> int:
    """A part of the buffer for single tokens: whole page groups, one at least."""
    return max(page_group_bytes, GATHERED_BYTES // page_group_bytes * page_group_bytes)


@dataclass(frozen=True)
class StateLayout:
    """The states of a batch in one layer: row by row, and tensor by tensor in a row. On disk they lie as in memory."""

    rows: int
    tensors: tuple[StateTensor, ...]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first byte of each tensor in a row."""
        return tuple(accumulate((aligned(one.nbytes, VIEW_ALIGNMENT) for one in self.tensors[:-1]), initial=0))

    @cached_property
    def row_bytes(self) -> int:
        return sum(aligned(one.nbytes, VIEW_ALIGNMENT) for one in self.tensors)

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    def cuts(self, rows: int) -> Iterator[slice]:
        """The parts of so many rows that a disk thread takes at a time, to whole pages."""
        end = aligned(rows * self.row_bytes)
        return (slice(start, min(start + CHUNK_BYTES, end)) for start in range(0, end, CHUNK_BYTES))


def states_of_one(spec: ModelSpec) -> tuple[StateLayout, ...]:
    """The states of one row behind a prompt, in each layer in which rows have some: nothing of them is rounded yet."""
    of_layers = (spec.layers[layer].states for layer in spec.state_layers)
    return tuple(StateLayout(1, tuple(one.in_full for one in states if one.notes is None)) for states in of_layers)


@dataclass(frozen=True)
class PromptPlaces:
    """The places of a device for the KV of prompts that the host attends later: those of one batch in one layer, in a buffer.
    Parts of the prompts take the places in turn, so that one part goes home while the next is computed."""

    layout: KVLayout  # of the part that has most rows
    count: int

    def start(self, part: int) -> int:
        """The place of a part, by its number among those of the batch."""
        return part % self.count * region_bytes(self.layout.image_bytes)

    @property
    def nbytes(self) -> int:
        return self.count * region_bytes(self.layout.image_bytes)

    # -- what a policy notes of their slots, in a buffer of its own ------------------------------------------------------

    def start_of_notes(self, part: int, of_a_slot: int) -> int:
        return part % self.count * region_bytes(self.layout.score_bytes(of_a_slot))

    def notes_bytes(self, of_a_slot: int) -> int:
        return self.count * region_bytes(self.layout.score_bytes(of_a_slot)) if of_a_slot else 0
