"""KVPages: tokens that lie in pages on disk come to their places in an image, however many of them a page has room for."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from h2o_flexgen.core.buffer_layout import ALIGNMENT, GATHERERS, KVLayout
from h2o_flexgen.core.workload import Batch
from h2o_flexgen.engine.rows import RowRange
from h2o_flexgen.engine.stores.kv_pages import KVPages, TokensRead
from h2o_flexgen.kernels.native import variants
from h2o_flexgen.kernels.raw_memory import numpy_of
from h2o_flexgen.kernels.read_tokens import TokenReads
from h2o_flexgen.kv.key_index import ChosenSlots
from h2o_flexgen.kv.step import KVStep
from h2o_flexgen.memory import disk as memory_disk
from h2o_flexgen.memory.disk import DiskFiles, DiskTier, OffloadFolder
from h2o_flexgen.policies.by_position import Full
from h2o_flexgen.policies.kv_options import KVOptions
from tests.kernels.variants import used

ROWS, HEADS, SLOTS, SHARE, STEP = 3, 2, 83, 0.5, 4
LENGTHS = (70, 24, 51)
WIDTHS = (3, 12, 128, 256, 600)  # values of a head: 4096 bytes hold many tokens, two, one that fills it, and none
UNSEEN = -1.0
POLICY = Full(KVOptions(kv_recall=SHARE))


@pytest.fixture
def disk(offload: Path) -> Iterator[DiskTier]:
    with closing(OffloadFolder(offload)), DiskFiles() as files, closing(DiskTier(files, offload)) as tier:
        files.start_gathering()
        yield tier


def layout_of(width: int) -> KVLayout:
    return KVLayout(ROWS, HEADS, SLOTS, 0, 2 * HEADS * width * 4, in_pages=True)


def opened(disk: DiskTier, layout: KVLayout) -> KVPages:
    disk.alloc(3 * ALIGNMENT)  # it does not begin where the file does
    return KVPages(disk.alloc(layout.disk_bytes), layout, disk)


def filled(width: int, seed: int = 0) -> Tensor:
    return torch.randn(2, ROWS, HEADS, SLOTS, width, generator=torch.Generator().manual_seed(seed))


def step_of(lengths: tuple[int, ...]) -> KVStep:
    occupancy = POLICY.occupancy(Batch(tuple(range(len(lengths))), lengths), STEP + 1)
    return KVStep.of(occupancy.at(STEP), SLOTS, torch.device("cpu"))


def choice_of(now: KVStep, seed: int) -> ChosenSlots:
    """Slots of each head by chance, the first ones and the newest among them; places behind a row's own are 0."""
    random, counts, held = np.random.default_rng(seed), now.slots.attended, [count + 1 for count in now.slots.counts]
    slots = np.zeros((len(counts), HEADS, max(counts)), np.int64)
    for row, (count, own) in enumerate(zip(counts, held)):
        always = {*range(4), *range(own - 16, own)}
        for head in range(HEADS):
            others = random.permutation(sorted({*range(own)} - always))[: count - len(always)]
            slots[row, head, :count] = sorted({*always, *others.tolist()})
    return ChosenSlots(now, torch.from_numpy(slots))


@pytest.mark.parametrize("build", ["torch", *variants()[:1]])
@pytest.mark.parametrize("width", WIDTHS)
def test_chosen_tokens_come_to_their_places(width: int, build: str, disk: DiskTier) -> None:
    layout, now = layout_of(width), step_of(LENGTHS)
    pages, every, image = opened(disk, layout), filled(width), torch.full((2, ROWS, HEADS, SLOTS, width), UNSEEN)
    pages.write(numpy_of(every), [RowRange(row, 0, count) for row, count in enumerate(now.slots.counts)])
    choice = choice_of(now, width)
    assert choice.slots is not None
    with used(build):
        brought = pages.bring(numpy_of(image, writes=True), choice, POLICY)
    tokens = left = 0
    for row, count in enumerate(now.slots.counts):
        wanted = sorted({*choice.slots[row].flatten().tolist()} & {*range(count)})
        assert torch.equal(image[:, row, :, wanted], every[:, row, :, wanted])
        assert torch.equal(image[:, row, :, count:], torch.full_like(image[:, row, :, count:], UNSEEN)), "not on disk yet"
        groups = {token // layout.page_group_tokens for token in wanted}
        beside = [token for token in range(count) if token // layout.page_group_tokens not in groups]
        assert torch.equal(image[:, row, :, beside], torch.full_like(image[:, row, :, beside], UNSEEN)), "not asked for"
        tokens, left = tokens + len(wanted), left + len(beside)
    most = sum(POLICY.choosing(HEADS).most_brought(count + 1) for count in now.slots.counts)
    assert brought == (tokens * layout.row_bytes, (most - tokens) * layout.row_bytes) and most > tokens
    assert left > 0 or layout.page_group_tokens > 2, "tokens that nothing asks for"


@pytest.mark.parametrize("width", WIDTHS)
def test_tokens_that_are_added_one_by_one_are_there(width: int, disk: DiskTier) -> None:
    pages, every = opened(disk, layout_of(width)), filled(width)
    pages.write(numpy_of(every), [RowRange(0, 0, 20), RowRange(2, 0, 37)])
    for step in range(25):
        pages.write(numpy_of(every), [RowRange(0, 20 + step, 21 + step), RowRange(2, 37 + step, 38 + step)])
    found = torch.full_like(every, UNSEEN)
    assert (
        pages.read(numpy_of(found, writes=True), [RowRange(0, 0, 45), RowRange(2, 0, 62)]) == 107 * layout_of(width).row_bytes
    )
    assert torch.equal(found[:, 0, :, :45], every[:, 0, :, :45]) and torch.equal(found[:, 2, :, :62], every[:, 2, :, :62])
    assert (found[:, 1] == UNSEEN).all() and (found[:, 0, :, 45:] == UNSEEN).all()


def test_rows_that_move_up_keep_their_places_and_others_take_those_that_are_free(disk: DiskTier) -> None:
    pages, every, new = opened(disk, layout_of(12)), filled(12), filled(12, 1)
    pages.write(numpy_of(every), [RowRange(row, 0, 40) for row in range(ROWS)])
    pages.keep_rows([2, 1])  # the first row has left
    pages.write(numpy_of(new), [RowRange(2, 0, 30)])
    found = torch.full_like(every, UNSEEN)
    pages.read(numpy_of(found, writes=True), [RowRange(0, 0, 40), RowRange(1, 0, 40), RowRange(2, 0, 30)])
    assert torch.equal(found[:, :2, :, :40], every[:, [2, 1], :, :40])
    assert torch.equal(found[:, 2, :, :30], new[:, 2, :, :30])


@pytest.mark.parametrize("width", WIDTHS)
def test_each_head_changes_a_slot_of_its_own_and_leaves_what_is_beside_it(width: int, disk: DiskTier) -> None:
    pages, every, new, random = opened(disk, layout_of(width)), filled(width), filled(width, 1), np.random.default_rng(width)
    pages.write(numpy_of(every), [RowRange(row, 0, 80) for row in range(ROWS)])
    pages.keep_rows([1, 2])  # the places of rows are others than their numbers
    every = every[:, [1, 2, 0]]
    for _ in range(8):  # the last slot is in a page group that is not full
        slots = random.choice([7, 8, 30, 80, 82], (2, HEADS))
        assert pages.change(numpy_of(new), slots) == 2 * layout_of(width).row_bytes
        for row, head in np.ndindex(slots.shape):
            every[:, row, head, slots[row, head]] = new[:, row, head, slots[row, head]]
    found = torch.full_like(every, UNSEEN)
    pages.read(numpy_of(found, writes=True), [RowRange(row, 0, 80) for row in range(2)])
    assert torch.equal(found[:, :2, :, :80], every[:, :2, :, :80])


REUSING = Full(KVOptions(kv_recall=SHARE, kv_recall_reuse=True))


@pytest.mark.parametrize("width", WIDTHS[1:4])
@pytest.mark.parametrize("has_room_for_all", [False, True])
def test_what_was_read_before_is_not_read_again(has_room_for_all: bool, width: int, disk: DiskTier) -> None:
    read_less(width, disk, has_room_for_all)


def test_what_was_not_wanted_for_longest_makes_room(disk: DiskTier) -> None:
    layout, width = layout_of(12), 12
    region, every = torch.full((layout.reused_bytes(3),), 77, dtype=torch.uint8), numpy_of(filled(width))
    read = TokensRead(region, layout, 3, disk)
    for wanted, is_left in (("012", "012"), ("02", ""), ("0", ""), ("034", "34"), ("034", ""), ("1", "1"), ("123456", None)):
        asked = np.isin(np.arange(SLOTS), [int(slot) for slot in wanted])[None]
        image = np.full_like(every, UNSEEN)
        left = read.bring(image, asked, [2])
        found = "".join(map(str, left[0].nonzero()[0]))
        assert found == is_left or (is_left is None and len(found) in (3, 4) and "1" not in found), (wanted, found)
        here = asked[0] & ~left[0]
        assert (image[:, 0, :, here] == every[:, 0, :, here]).all() and (image[:, 0, :, ~here] == UNSEEN).all()
        read.take(every, left, [2])


def test_what_was_read_of_another_row_in_its_place_is_found(disk: DiskTier) -> None:
    made = TokensRead.forget

    def only_all(before: TokensRead, place: int | slice = slice(None)) -> None:
        if isinstance(place, slice):
            made(before, place)

    with patch.object(TokensRead, "forget", only_all), pytest.raises(AssertionError):
        read_less(12, disk, has_room_for_all=True)


def read_less(width: int, disk: DiskTier, has_room_for_all: bool) -> None:
    """Also of rows that move up. Of a row that begins in the place of another nothing is known."""
    layout, every, new = layout_of(width), filled(width), filled(width, 1)
    most = SLOTS if has_room_for_all else REUSING.reused_tokens(layout)
    region = torch.full((layout.reused_bytes(most),), 77, dtype=torch.uint8)
    pages = KVPages(disk.alloc(layout.disk_bytes), layout, disk, TokensRead(region, layout, most, disk))
    lengths, rows = [70, 24, 51], [0, 1, 2]  # the number of each row among `every`
    pages.write(numpy_of(every), [RowRange(row, 0, length + STEP - 1) for row, length in enumerate(lengths)])
    seen, last = defaultdict[int, set[int]](set), dict[int, set[int]]()  # of each row: in all steps, and in the last one
    for step in range(6):
        if step == 2:  # the first row has left
            pages.keep_rows([2, 1])
            rows, lengths = [2, 1], [51, 24]
        if step == 4:  # and one comes to its place
            pages.write(numpy_of(new), [RowRange(2, 0, 65 + STEP - 1)])
            rows, lengths, every, seen[0] = [2, 1, 0], [51, 24, 65], torch.cat((new[:, 2:], every[:, 1:]), 1), set()
        now = step_of(tuple(lengths))
        choice, image = choice_of(now, 100 * width + step // 2 % 2), torch.full((2, ROWS, HEADS, SLOTS, width), UNSEEN)
        assert choice.slots is not None
        brought = pages.bring(numpy_of(image, writes=True), choice, REUSING)
        least = at_most = 0
        for place, (row, count) in enumerate(zip(rows, now.slots.counts)):
            wanted = {*choice.slots[place].flatten().tolist()} & {*range(count)}
            assert torch.equal(image[:, place, :, sorted(wanted)], every[:, row, :, sorted(wanted)])
            least, at_most = least + len(wanted - seen[row]), at_most + len(wanted - (seen[row] & last.get(row, set())))
            seen[row], last[row] = seen[row] | wanted, wanted
        most_of_all = sum(REUSING.choosing(HEADS).most_brought(count + 1) for count in now.slots.counts)
        left = brought.moved // layout.row_bytes
        assert left == least if has_room_for_all else least <= left <= at_most
        assert brought == (left * layout.row_bytes, (most_of_all - left) * layout.row_bytes)
        assert not left if step % 2 else left > 0


def test_a_read_that_fails_is_an_error(disk: DiskTier) -> None:
    layout, now = layout_of(512), step_of(LENGTHS)
    pages, image = opened(disk, layout), filled(512)
    assert disk._descriptor is not None
    os.ftruncate(disk._descriptor, 4 * ALIGNMENT)
    for build in ("torch", *variants()[:1]):
        with used(build), pytest.raises(OSError, match="ended too early where single tokens were to be read"):
            pages.bring(numpy_of(image, writes=True), choice_of(now, 0), POLICY)
    with closing(open(os.devnull, "wb")) as closed, patch.object(disk, "_descriptor", closed.fileno()):
        for build in ("torch", *variants()[:1]):
            with used(build), pytest.raises(OSError, match="Bad file descriptor where single tokens were to be read"):
                pages.bring(numpy_of(image, writes=True), choice_of(now, 0), POLICY)


@pytest.mark.parametrize(
    ("tokens", "threads", "at_once"), [(1500, GATHERERS, 16), (68, 23, 3), (GATHERERS, GATHERERS, 1), (20, 20, 1), (1, 1, 1)]
)
def test_many_reads_are_under_way_at_once(tokens: int, threads: int, at_once: int, disk: DiskTier) -> None:
    """Each of the threads takes its part from one list, of few tokens one. All are in the middle of it at the same time."""
    layout = KVLayout(1, HEADS, 3000, 0, ALIGNMENT, in_pages=True)
    pages, now, image = opened(disk, layout), step_of((2990,)), torch.zeros(2, 1, HEADS, 3000, 256)
    chosen = np.tile(np.arange(0, 2 * tokens, 2), (1, HEADS, 1))
    meeting, sizes = threading.Barrier(threads), list[int]()

    def noted(wanted: TokenReads, buffer: Tensor) -> None:
        sizes.append(len(buffer) // wanted.group_bytes)
        meeting.wait(timeout=30)

    with patch.object(memory_disk, "read_tokens", noted):
        pages.bring(numpy_of(image, writes=True), ChosenSlots(now, torch.from_numpy(chosen)), POLICY)
    assert sizes == [at_once] * threads
