"""KVPages: the KV of one (layer, batch) on disk where decode steps choose the tokens that they read.

Rows lie one after another there, each token with the values of all its heads side by side, in page groups (`KVLayout`). Rows
keep their places on disk for as long as they live: those that move up in memory take the number of their place along. A page
group is read and written whole. Where all tokens stay, the newest ones of a row are among those that every step reads, so the
page group that the next token belongs to is in memory when it is written. Where tokens go, each head has its newest one in the
slot of another. The page groups with these slots are read before they are written.

Where what was read stays in memory (`TokensRead`), steps attend it there, and nothing is copied. Tokens lie there one by one,
without their page group. So where a page group has several, that of the newest token is read for itself before it is written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from h2o_flexgen.core.buffer_layout import ALIGNMENT, KVLayout
from h2o_flexgen.engine.rows import RowRange
from h2o_flexgen.engine.stores.kv_rows import RowPlaces
from h2o_flexgen.kernels.raw_memory import numpy_of
from h2o_flexgen.kv.key_index import ChosenSlots, SlotsRead
from h2o_flexgen.kv.slots import Coding, image_over
from h2o_flexgen.memory.disk import DiskRegion, DiskTier, TokensOnDisk
from h2o_flexgen.policies.policy import KVPolicy

Pair = tuple[numpy.ndarray, numpy.ndarray]
NOWHERE = -1  # instead of the number of a slot
NEVER_WANTED = 2**31 - 1  # more steps than any row has


class Found(NamedTuple):
    """Places of tokens in memory, and which of them are to be read. (rows, slots)"""

    entries: numpy.ndarray  # int32: their numbers there, or NOWHERE
    left: numpy.ndarray


class Brought(NamedTuple):
    moved: int  # bytes
    spared: int  # bytes that would have come as well if no two heads had chosen alike, and nothing had been in memory


class TokensRead:
    """The tokens of each row that steps have read, in memory: the next one reads only others, and attends all of them here.
    What was not wanted for longest makes room. Rows are known by their places on disk."""

    def __init__(self, region: Tensor, layout: KVLayout, most: int, coding: Coding) -> None:
        """`region`: room for so many tokens of each row. A token lies there as on disk, with all its heads side by side."""
        region[::ALIGNMENT] = 0  # a read into memory that nothing has touched takes twice as long
        self._most = most
        self._tokens = image_over(region, (1, layout.heads, layout.rows * most), coding, by_token=True)
        numbers = region[layout.reused_start(most) : layout.reused_bytes(most)].view(torch.int32)
        self._slots, self._idle = numpy_of(numbers, writes=True).reshape(2, layout.rows, most)  # steps that did not want it
        self._newest = numpy.full(layout.rows, NOWHERE)  # the slot of each row's own token, for which a step has made room
        self.forget()

    def forget(self, place: int | slice = slice(None)) -> None:
        """Forgets the tokens of a row, or of all."""
        self._slots[place], self._idle[place], self._newest[place] = NOWHERE, NEVER_WANTED, NOWHERE

    def follow(self, place: int, first: int, end: int) -> None:
        """Follows what is written of a row: of all but what a step has put here by itself nothing is known."""
        if not first:
            self.forget(place)
        elif first == self._newest[place] and end == first + 1:
            self._newest[place] = NOWHERE
        else:
            is_written = (self._slots[place] >= first) & (self._slots[place] < end)
            self._slots[place, is_written], self._idle[place, is_written] = NOWHERE, NEVER_WANTED

    def rows(self, count: int) -> Tensor:
        """The tokens of all rows as the image of each of so many. (sets, rows, heads, entries, width)"""
        return self._tokens.expand(-1, count, -1, -1, -1)

    def find(self, wanted: numpy.ndarray, counts: Sequence[int], places: Sequence[int]) -> Found | None:
        """Finds the wanted tokens (rows, slots), and makes room for others, and for each row's own. None: there is not so much
        room."""
        here = [self._wanted_here(own, count, place) for own, count, place in zip(wanted, counts, places)]
        needed = [int(own.sum() - there.sum()) + 1 for own, there in zip(wanted, here)]
        if any(need + there.sum() > self._most for need, there in zip(needed, here)):
            return None
        entries, left = numpy.full(wanted.shape, NOWHERE, numpy.int32), wanted.copy()
        for row, (place, there, need) in enumerate(zip(places, here, needed)):
            own, idle = self._slots[place], self._idle[place]
            left[row, own[there]] = False
            idle += own != NOWHERE
            idle[there] = 0
            taken = numpy.sort(idle.argpartition(self._most - need)[self._most - need :])
            own[taken], idle[taken] = numpy.append(left[row].nonzero()[0], counts[row]), 0
            now = (idle == 0).nonzero()[0]
            entries[row, own[now]] = place * self._most + now
            self._newest[place] = counts[row]
        return Found(entries, left)

    def _wanted_here(self, wanted: numpy.ndarray, count: int, place: int) -> numpy.ndarray:
        """The wanted ones of a row's tokens here. Behind those that are on disk nothing is known."""
        own = self._slots[place]
        is_known = (own != NOWHERE) & (own < count)
        own[~is_known], self._idle[place, ~is_known] = NOWHERE, NEVER_WANTED
        found: numpy.ndarray = is_known & wanted[own]
        return found


class KVPages:
    def __init__(self, home: DiskRegion, layout: KVLayout, disk: DiskTier, before: TokensRead | None = None) -> None:
        """`before`: what steps before have read, where that stays."""
        self._home = home
        self._layout = layout
        self._disk = disk
        self._before = before
        self._places = RowPlaces(layout.rows)  # on disk

    def begin(self) -> None:
        """Begins with other rows, or with one that lives on."""
        self._places.begin()
        if self._before is not None:
            self._before.forget()

    def keep_rows(self, kept: Sequence[int]) -> None:
        """Row `kept[dst]` becomes row `dst`."""
        self._places.keep_rows(kept)

    # -- ranges of rows ------------------------------------------------------------------------------------------------

    def write(self, image: numpy.ndarray, changed: Sequence[RowRange]) -> int:
        """Writes ranges of an image (sets, rows, heads, slots, width)."""
        if self._before is not None:
            for row, first, end in changed:
                self._before.follow(self._places.now[row], first, end)
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
        return self._places.now[cut.row] * layout.disk_row_bytes + first * layout.page_group_bytes, groups

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
        slots = numpy_of(choice.slots)
        wanted = _wanted(slots, counts, layout.slots)
        found = None if self._before is None else self._before.find(wanted, counts, self._places.now)
        left = wanted if found is None else found.left
        choice.read = None
        if self._before is not None and found is not None:
            choice.read = self._read_in_place(self._before.rows(len(counts)), found, counts, slots)
            self._disk.gather(self._home, self._behind(counts), image)
        else:
            self._disk.gather(self._home, self._on_disk(wanted, counts), image)
        brought = int(left.sum()) * layout.row_bytes
        choosing = policy.choosing(layout.heads)
        most = sum(choosing.most_brought(count + 1) for count in counts) * layout.row_bytes
        return Brought(brought, most - brought)

    def _read_in_place(self, tokens: Tensor, found: Found, counts: Sequence[int], slots: numpy.ndarray) -> SlotsRead:
        """Reads what is not in memory yet. Says where the chosen slots (rows, kv_heads, most) are."""
        self._disk.gather(self._home, self._on_disk(found.left, counts), numpy_of(tokens, writes=True), found.entries)
        rows = numpy.arange(len(counts))
        entries, newest = found.entries[rows[:, None, None], slots], found.entries[rows, counts]
        return SlotsRead(tokens, *(torch.from_numpy(each.astype(numpy.int64)) for each in (entries, newest)))

    def _behind(self, counts: Sequence[int]) -> TokensOnDisk:
        """The page groups that have some of a row's tokens on disk, and go on with its own."""
        own, tokens = numpy.array(counts), self._layout.page_group_tokens
        rows = (own % tokens).nonzero()[0]
        return self._page_groups(rows, own[rows] // tokens, counts)

    def _on_disk(self, wanted: numpy.ndarray, counts: Sequence[int]) -> TokensOnDisk:
        """The page groups that have wanted tokens (rows, slots)."""
        layout, (rows, slots) = self._layout, wanted.shape
        filled = numpy.zeros((rows, -(-slots // layout.page_group_tokens) * layout.page_group_tokens), bool)
        filled[:, :slots] = wanted
        of_row, number = filled.reshape(rows, -1, layout.page_group_tokens).any(-1).nonzero()
        return self._page_groups(of_row, number, counts)

    def _page_groups(self, rows: numpy.ndarray, numbers: numpy.ndarray, counts: Sequence[int]) -> TokensOnDisk:
        layout, places = self._layout, numpy.array(self._places.now, numpy.int64)
        groups = numpy.stack((rows, places[rows] * layout.disk_row_bytes, numbers), axis=1).astype(numpy.int64)
        return TokensOnDisk(groups, numpy.array(counts, numpy.int64), layout.page_group_bytes, layout.page_group_tokens)


def _wanted(chosen: numpy.ndarray, counts: Sequence[int], slots: int) -> numpy.ndarray:
    """The slots of each row that any head has chosen, as truths (rows, slots). Places behind a row's own are 0, a slot that all
    choose."""
    rows = len(chosen)
    wanted = numpy.zeros((rows, slots), bool)
    wanted[numpy.arange(rows)[:, None, None], chosen] = True
    return wanted & (numpy.arange(slots) < numpy.array(counts)[:, None])
