"""KVPages: the KV of one (layer, batch) on disk where decode steps choose the tokens that they read.

Rows lie one after another there, each token with the values of all its heads side by side, in page groups (`KVLayout`). Rows
keep their places on disk for as long as they live: those that move up in memory take the number of their place along. A page
group is read and written whole. Where all tokens stay, the newest ones of a row are among those that every step reads, so the
page group that the next token belongs to is in memory when it is written. Where what was read stays in memory (`TokensRead`),
tokens come from there one by one, without their page group. The one that the last step made is never there yet. So its page
group is always read from disk, and the next token's is whole. Whatever puts a token there earlier must see to that.
Where tokens go, each head has its newest one in the slot of another. The page groups with these slots are read before they are
written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from h2o_flexgen.core.buffer_layout import READ_NUMBER_BYTES, KVLayout
from h2o_flexgen.engine.rows import RowRange
from h2o_flexgen.kernels.raw_memory import numpy_of
from h2o_flexgen.kv.key_index import ChosenSlots
from h2o_flexgen.memory.disk import DiskRegion, DiskTier, TokensOnDisk
from h2o_flexgen.policies.policy import KVPolicy

Pair = tuple[numpy.ndarray, numpy.ndarray]
NOWHERE = -1  # instead of the number of a slot
NEVER_WANTED = 2**31 - 1  # more steps than any row has


class Brought(NamedTuple):
    moved: int  # bytes
    spared: int  # bytes that would have come as well if no two heads had chosen alike, and nothing had been in memory


class TokensRead:
    """The tokens of each row that steps have read, in memory: the next one reads only others. What was not wanted for longest
    makes room. Rows are known by their places on disk."""

    def __init__(self, region: Tensor, layout: KVLayout, most: int, disk: DiskTier) -> None:
        """`region`: room for so many tokens of each row."""
        self._disk, self._most, middle = disk, most, layout.rows * most * READ_NUMBER_BYTES
        numbers = numpy_of(region[:middle].view(torch.int32), writes=True).reshape(2, layout.rows, most)
        self._slots, self._idle = numbers  # steps in which it was not wanted
        values = region[middle : layout.reused_bytes(most)]
        self._values = numpy_of(values, writes=True).reshape(layout.rows, most * layout.row_bytes)
        self.forget()

    def forget(self, place: int | slice = slice(None)) -> None:
        """Forgets the tokens of a row, or of all."""
        self._slots[place], self._idle[place] = NOWHERE, NEVER_WANTED

    def bring(self, image: numpy.ndarray, wanted: numpy.ndarray, places: Sequence[int]) -> numpy.ndarray:
        """Copies those of the wanted tokens (rows, slots) that are here to an image. Returns the others."""
        left: numpy.ndarray = wanted.copy()
        self._disk.files.each(lambda row: self._bring_row(image, row, places[row], left[row]), range(len(left)))
        return left

    def take(self, image: numpy.ndarray, read: numpy.ndarray, places: Sequence[int]) -> None:
        """Takes the tokens (rows, slots) that were read, in place of those that were not wanted for longest."""
        self._disk.files.each(lambda row: self._take_row(image, row, places[row], read[row]), range(len(read)))

    def _bring_row(self, image: numpy.ndarray, row: int, place: int, left: numpy.ndarray) -> None:
        own = self._slots[place]
        is_wanted = (own != NOWHERE) & left[own]
        self._idle[place] += own != NOWHERE
        self._idle[place, is_wanted] = 0
        entries = is_wanted.nonzero()[0]
        slots = own[entries]
        for there, here in self._by_head(image, row, place):
            there[slots] = here[entries]
        left[slots] = False

    def _take_row(self, image: numpy.ndarray, row: int, place: int, read: numpy.ndarray) -> None:
        own, idle, slots = self._slots[place], self._idle[place], read.nonzero()[0][: self._most]
        entries = numpy.arange(self._most)
        if len(slots) < self._most:
            entries = idle.argpartition(-len(slots) - 1)[self._most - len(slots) :]
        own[entries], idle[entries] = slots, 0
        for there, here in self._by_head(image, row, place):
            here[entries] = there[slots]

    def _by_head(self, image: numpy.ndarray, row: int, place: int) -> Iterator[Pair]:
        """The slots of each head of a row in an image, and its tokens here. (slots or tokens, width)"""
        sets, _, heads, _, width = image.shape
        values = self._values[place].view(image.dtype).reshape(sets, heads, self._most, width)
        return ((image[own, row, head], values[own, head]) for own, head in product(range(sets), range(heads)))


class KVPages:
    def __init__(self, home: DiskRegion, layout: KVLayout, disk: DiskTier, before: TokensRead | None = None) -> None:
        """`before`: what steps before have read, where that stays."""
        self._home = home
        self._layout = layout
        self._disk = disk
        self._before = before
        self._places = [*range(layout.rows)]  # of each row, on disk

    def begin(self) -> None:
        """Begins with other rows, or with one that lives on."""
        self._places = [*range(self._layout.rows)]
        if self._before is not None:
            self._before.forget()

    def keep_rows(self, kept: Sequence[int]) -> None:
        """Row `kept[dst]` becomes row `dst`. The places of rows that have left are free for others."""
        moved = [self._places[source] for source in kept]
        self._places = [*moved, *(place for place in self._places if place not in set(moved))]

    # -- ranges of rows ------------------------------------------------------------------------------------------------

    def write(self, image: numpy.ndarray, changed: Sequence[RowRange]) -> int:
        """Writes ranges of an image (sets, rows, heads, slots, width)."""
        if self._before is not None:
            for begun in (one.row for one in changed if not one.first):
                self._before.forget(self._places[begun])
        self._disk.files.each(lambda cut: self._write_groups(image, cut), [*self._cuts(changed)])
        return self._nbytes(changed)

    def read(self, image: numpy.ndarray, wanted: Sequence[RowRange]) -> int:
        """Reads ranges that begin with a row's first token."""
        self._disk.files.each(lambda cut: self._read_groups(image, cut), [*self._cuts(wanted)])
        return self._nbytes(wanted)

    def _nbytes(self, ranges: Sequence[RowRange]) -> int:
        return sum(end - first for _, first, end in ranges) * self._layout.row_bytes

    def _cuts(self, ranges: Sequence[RowRange]) -> Iterator[RowRange]:
        """The parts, to whole page groups, that a disk thread takes at a time."""
        at_once = self._layout.page_group_tokens * self._layout.page_groups_at_once
        for row, first, end in ranges:
            start = first // self._layout.page_group_tokens * self._layout.page_group_tokens
            yield from (RowRange(row, at, min(at + at_once, end)) for at in range(start, end, at_once))

    def _write_groups(self, image: numpy.ndarray, cut: RowRange) -> None:
        start, groups = self._place_of(cut)
        scratch = self._disk.scratch(groups * self._layout.page_group_bytes)
        for there, own in self._tokens_of(numpy_of(scratch, writes=True), image, cut):
            numpy.copyto(there, own)
        self._disk.write_from(self._home, start, scratch)

    def _read_groups(self, image: numpy.ndarray, cut: RowRange) -> None:
        start, groups = self._place_of(cut)
        scratch = self._disk.scratch(groups * self._layout.page_group_bytes)
        self._disk.read_into(self._home, start, scratch)
        for there, own in self._tokens_of(numpy_of(scratch), image, cut):
            numpy.copyto(own, there)

    def _place_of(self, cut: RowRange) -> tuple[int, int]:
        """The place of a part on disk, and the number of its page groups."""
        layout = self._layout
        first, groups = cut.first // layout.page_group_tokens, -(-(cut.end - cut.first) // layout.page_group_tokens)
        return self._places[cut.row] * layout.disk_row_bytes + first * layout.page_group_bytes, groups

    def _tokens_of(self, raw: numpy.ndarray, image: numpy.ndarray, cut: RowRange) -> Iterator[Pair]:
        """The tokens of a part, as they lie on disk and in the image: those of page groups that are full, and the others."""
        layout, (sets, _, heads, _, width) = self._layout, image.shape
        full, rest = divmod(cut.end - cut.first, layout.page_group_tokens)
        values = raw.view(image.dtype).reshape(-1, layout.page_group_bytes // image.itemsize)
        used = values[:, : layout.page_group_tokens * sets * heads * width]
        groups = used.reshape(len(used), layout.page_group_tokens, sets, heads, width)
        own, middle = image[:, cut.row, :, cut.first : cut.end], full * layout.page_group_tokens
        if full:
            parted = own[:, :, :middle].reshape(sets, heads, full, layout.page_group_tokens, width)
            assert numpy.may_share_memory(parted, own) and numpy.may_share_memory(groups, raw), "these are views"
            yield groups[:full].transpose(2, 3, 0, 1, 4), parted
        if rest:
            yield groups[full, :rest].transpose(1, 2, 0, 3), own[:, :, middle:]

    # -- single tokens -------------------------------------------------------------------------------------------------

    def change(self, image: numpy.ndarray, slots: numpy.ndarray) -> int:
        """Writes one slot of each head of the first rows, (rows, heads), beside what is in their page groups on disk."""
        changed: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for row, head in product(*map(range, slots.shape)):
            slot = int(slots[row, head])
            changed[row, slot // self._layout.page_group_tokens].append((head, slot))
        self._disk.files.each(lambda one: self._change_group(image, *one), [*changed.items()])
        return len(slots) * self._layout.row_bytes

    def _change_group(self, image: numpy.ndarray, place: tuple[int, int], changed: Sequence[tuple[int, int]]) -> None:
        """Changes slots of heads in a page group of a row."""
        (sets, _, heads, _, width), tokens, (row, group) = image.shape, self._layout.page_group_tokens, place
        start, _ = self._place_of(RowRange(row, group * tokens, (group + 1) * tokens))
        scratch = self._disk.scratch(self._layout.page_group_bytes)
        self._disk.read_into(self._home, start, scratch)
        values = numpy_of(scratch, writes=True).view(image.dtype)[: tokens * sets * heads * width]
        there = values.reshape(tokens, sets, heads, width)
        for head, slot in changed:
            there[slot % tokens, :, head] = image[:, row, head, slot]
        self._disk.write_from(self._home, start, scratch)

    def bring(self, image: numpy.ndarray, choice: ChosenSlots, policy: KVPolicy) -> Brought:
        """Reads the tokens that a decode step has chosen in any head, except its own newest ones."""
        if choice.now is None or choice.slots is None:
            return Brought(0, 0)
        counts, layout = choice.now.slots.counts, self._layout
        wanted = _wanted(numpy_of(choice.slots), counts, layout.slots)
        left = wanted if self._before is None else self._before.bring(image, wanted, self._places)
        self._disk.gather(self._home, self._on_disk(left, counts), image)
        if self._before is not None:
            self._before.take(image, left, self._places)
        brought = int(left.sum()) * layout.row_bytes
        choosing = policy.choosing(layout.heads)
        most = sum(choosing.most_brought(count + 1) for count in counts) * layout.row_bytes
        return Brought(brought, most - brought)

    def _on_disk(self, wanted: numpy.ndarray, counts: Sequence[int]) -> TokensOnDisk:
        """The page groups that have wanted tokens (rows, slots)."""
        layout, (rows, slots) = self._layout, wanted.shape
        filled = numpy.zeros((rows, -(-slots // layout.page_group_tokens) * layout.page_group_tokens), bool)
        filled[:, :slots] = wanted
        of_row, group = filled.reshape(rows, -1, layout.page_group_tokens).any(-1).nonzero()
        begins = numpy.array(self._places[:rows], numpy.int64) * layout.disk_row_bytes
        groups = numpy.stack((of_row, begins[of_row], group), axis=1).astype(numpy.int64)
        return TokensOnDisk(groups, numpy.array(counts, numpy.int64), layout.page_group_bytes, layout.page_group_tokens)


def _wanted(chosen: numpy.ndarray, counts: Sequence[int], slots: int) -> numpy.ndarray:
    """The slots of each row that any head has chosen, as truths (rows, slots). Places behind a row's own are 0, a slot that all
    choose."""
    rows = len(chosen)
    wanted = numpy.zeros((rows, slots), bool)
    wanted[numpy.arange(rows)[:, None, None], chosen] = True
    return wanted & (numpy.arange(slots) < numpy.array(counts)[:, None])
