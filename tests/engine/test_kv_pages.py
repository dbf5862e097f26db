"""KVPages: tokens that lie in pages on disk come to their places in an image, however many of them a page has room for."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from h2o_flexgen.core.buffer_layout import ALIGNMENT, GATHER_PARTS, KVLayout
from h2o_flexgen.core.workload import Batch
from h2o_flexgen.engine.rows import RowRange
from h2o_flexgen.engine.stores.kv_pages import KVPages, TokensRead
from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.kernels.native import variants
from h2o_flexgen.kernels.raw_memory import numpy_of
from h2o_flexgen.kernels.read_tokens import ReadQueue, TokenReads
from h2o_flexgen.kv.key_index import ChosenSlots
from h2o_flexgen.kv.slots import Coding
from h2o_flexgen.kv.step import KVStep
from h2o_flexgen.memory import disk as memory_disk
from h2o_flexgen.memory.disk import DiskFiles, DiskTier, OffloadFolder
from h2o_flexgen.policies.by_position import Full
from h2o_flexgen.policies.kv_options import KVOptions
from tests.helpers.patience import PATIENCE_SECONDS
from tests.kernels.variants import used

ROWS, HEADS, SLOTS, SHARE, STEP = 3, 2, 83, 0.5, 4
LENGTHS = (70, 24, 51)
WIDTHS = (3, 12, 128, 256, 600)  # values of a head: 4096 bytes hold many tokens, two, one that fills it, and none
UNSEEN = -1.0
BUILD = next(iter(variants()), "torch")
POLICY = Full(KVOptions(kv_recall=SHARE))


@contextmanager
def tier_in(folder: Path) -> Iterator[DiskTier]:
    with closing(OffloadFolder(folder)), DiskFiles() as files, closing(DiskTier(files, folder)) as tier:
        tier.alloc(ALIGNMENT)
        tier.start_gathering()
        yield tier


@pytest.fixture
def disk(offload: Path) -> Iterator[DiskTier]:
    with tier_in(offload) as tier:
        yield tier


@pytest.fixture
def disk_of_threads(offload: Path) -> Iterator[DiskTier]:
    """Where the system has no queue of reads."""
    with patch.object(ReadQueue, "opened", return_value=None), tier_in(offload) as tier:
        yield tier


def layout_of(width: int) -> KVLayout:
    return KVLayout(ROWS, HEADS, SLOTS, 0, 2 * HEADS * width * 4, by_row=True)


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
    bring_chosen(width, build, disk)


@pytest.mark.parametrize("width", [12, 600])
def test_chosen_tokens_come_to_their_places_where_threads_read_them(width: int, disk_of_threads: DiskTier) -> None:
    bring_chosen(width, BUILD, disk_of_threads)


def bring_chosen(width: int, build: str, disk: DiskTier) -> None:
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


def test_what_was_not_wanted_for_longest_makes_room() -> None:
    """Room for three tokens and a row's own one. Where a step wants more, nothing of it is here."""
    read, count = tokens_read(layout_of(12), 4), 80
    for wanted, is_left in (("012", "012"), ("02", ""), ("0", ""), ("034", "34"), ("034", ""), ("0356", None), ("1", "1")):
        asked = np.isin(np.arange(SLOTS), [int(slot) for slot in wanted])[None]
        found = read.find(asked, [count], [2])
        if found is None or is_left is None:
            assert found is is_left
            continue
        assert "".join(map(str, found.left[0].nonzero()[0])) == is_left
        entries = found.entries[0, [*asked[0].nonzero()[0], count]]
        assert len({*entries.tolist()}) == len(wanted) + 1 and (entries // 4 == 2).all(), "in the part of the room of its place"
        assert (found.entries[0, ~asked[0] & (np.arange(SLOTS) < count)] < 0).all()


def tokens_read(layout: KVLayout, most: int) -> TokensRead:
    width = layout.row_bytes // (2 * HEADS * 4)
    pages = torch.frombuffer(mmap.mmap(-1, layout.reused_bytes(most)), dtype=torch.uint8)
    return TokensRead(pages.fill_(77), layout, most, Coding(PLAIN, torch.float32, width))


def brought_to(choice: ChosenSlots, image: Tensor) -> Tensor:
    """What a step attends, in an image in which there is nothing else."""
    if choice.read is None:
        return image
    assert choice.slots is not None
    found = torch.full_like(image, UNSEEN)
    for row, head in np.ndindex(*choice.slots.shape[:2]):
        found[:, row, head, choice.slots[row, head]] = choice.read.tokens[:, row, head, choice.read.entries[row, head]]
    return found


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
    pages = KVPages(disk.alloc(layout.disk_bytes), layout, disk, tokens_read(layout, most))
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
        assert choice.read is not None
        found = brought_to(choice, image)
        least = at_most = 0
        for place, (row, count) in enumerate(zip(rows, now.slots.counts)):
            wanted = {*choice.slots[place].flatten().tolist()} & {*range(count)}
            for head in range(HEADS):
                own = sorted({*choice.slots[place, head].tolist()} & {*range(count)})
                assert torch.equal(found[:, place, head, own], every[:, row, head, own])
            least, at_most = least + len(wanted - seen[row]), at_most + len(wanted - (seen[row] & last.get(row, set())))
            seen[row], last[row] = seen[row] | wanted, wanted
        most_of_all = sum(REUSING.choosing(HEADS).most_brought(count + 1) for count in now.slots.counts)
        left = brought.moved // layout.row_bytes
        assert left == least if has_room_for_all else least <= left <= at_most
        assert brought == (left * layout.row_bytes, (most_of_all - left) * layout.row_bytes)
        assert not left if step % 2 else left > 0


@pytest.mark.parametrize("width", WIDTHS)
def test_a_step_finds_the_token_of_the_one_before_and_writes_whole_page_groups(width: int, disk: DiskTier) -> None:
    layout, every = layout_of(width), filled(width)
    pages, lengths = KVPages(disk.alloc(layout.disk_bytes), layout, disk, tokens_read(layout, SLOTS)), [20, 37]
    pages.write(numpy_of(every), [RowRange(row, 0, length + STEP - 1) for row, length in enumerate(lengths)])
    for step in range(18):
        now, image = step_of(tuple(length + step for length in lengths)), torch.full_like(every, UNSEEN)
        slots = torch.zeros(2, HEADS, SLOTS, dtype=torch.int64)
        for row, count in enumerate(now.slots.counts):
            slots[row, :, : count + 1] = torch.arange(count + 1)
            image[:, row, :, count] = every[:, row, :, count]
        choice = ChosenSlots(now, slots)
        brought = pages.bring(numpy_of(image, writes=True), choice, REUSING)
        assert choice.read is not None and (not brought.moved if step else brought.moved > 0)
        choice.read.put_newest(now, image[0], image[1])
        found = brought_to(choice, image)
        for row, count in enumerate(now.slots.counts):
            assert torch.equal(found[:, row, :, : count + 1], every[:, row, :, : count + 1])
        pages.write(numpy_of(image), [RowRange(row, count, count + 1) for row, count in enumerate(now.slots.counts)])
    found = torch.full_like(every, UNSEEN)
    pages.read(numpy_of(found, writes=True), [RowRange(0, 0, 41), RowRange(1, 0, 58)])
    assert torch.equal(found[:, 0, :, :41], every[:, 0, :, :41]) and torch.equal(found[:, 1, :, :58], every[:, 1, :, :58])


@pytest.mark.parametrize("ends", [61, 63])
def test_what_several_tokens_have_replaced_is_read_again(ends: int, disk: DiskTier) -> None:
    """As where a text goes on. A token that a step has put there itself, and that is written once more, is another one."""
    layout, every, new, now = layout_of(256), filled(256), filled(256, 1), step_of((57,))
    pages, count = KVPages(disk.alloc(layout.disk_bytes), layout, disk, tokens_read(layout, SLOTS)), now.slots.counts[0]
    slots = torch.arange(count + 1).expand(1, HEADS, -1).contiguous()
    pages.write(numpy_of(every), [RowRange(0, 0, count)])
    for _ in range(2):
        choice, image = ChosenSlots(now, slots), every.clone()
        pages.bring(numpy_of(image, writes=True), choice, REUSING)
        assert choice.read is not None
        choice.read.put_newest(now, image[0], image[1])
        pages.write(numpy_of(image), [RowRange(0, count, count + 1)])
    pages.write(numpy_of(new), [RowRange(0, count - 3, count), RowRange(0, count, count + 1), RowRange(0, count + 1, ends)])
    later = step_of((ends - STEP + 1,))
    choice = ChosenSlots(later, torch.arange(ends + 1).expand(1, HEADS, -1).contiguous())
    brought = pages.bring(numpy_of(torch.full_like(every, UNSEEN), writes=True), choice, REUSING)
    assert brought.moved == (ends - count + 3) * layout.row_bytes
    found = brought_to(choice, torch.full_like(every, UNSEEN))
    assert torch.equal(found[:, 0, :, : count - 3], every[:, 0, :, : count - 3])
    assert torch.equal(found[:, 0, :, count - 3 : ends], new[:, 0, :, count - 3 : ends])


def test_a_step_that_is_made_again_puts_another_token_in_place_of_its_own(disk: DiskTier) -> None:
    layout, every, new, now = layout_of(256), filled(256), filled(256, 1), step_of((57,))
    pages, count = KVPages(disk.alloc(layout.disk_bytes), layout, disk, tokens_read(layout, SLOTS)), now.slots.counts[0]
    pages.write(numpy_of(every), [RowRange(0, 0, count)])
    for step, own in ((now, new), (now, every), (step_of((58,)), every)):
        choice = ChosenSlots(step, torch.arange(step.slots.counts[0] + 1).expand(1, HEADS, -1).contiguous())
        brought = pages.bring(numpy_of(every, writes=True), choice, REUSING)
        assert choice.read is not None
        choice.read.put_newest(step, own[0], own[1])
    assert not brought.moved
    found = brought_to(choice, torch.full_like(every, UNSEEN))
    assert torch.equal(found[:, 0, :, : count + 2], every[:, 0, :, : count + 2])


def test_where_a_step_wants_more_than_there_is_room_for_all_of_it_comes(disk: DiskTier) -> None:
    layout, every, now = layout_of(12), filled(12), step_of(LENGTHS)
    pages, image = KVPages(disk.alloc(layout.disk_bytes), layout, disk, tokens_read(layout, 30)), torch.full_like(every, UNSEEN)
    pages.write(numpy_of(every), [RowRange(row, 0, count) for row, count in enumerate(now.slots.counts)])
    choice = choice_of(now, 3)
    for _ in range(2):
        brought = pages.bring(numpy_of(image, writes=True), choice, REUSING)
        assert choice.slots is not None and choice.read is None
        tokens = 0
        for row, count in enumerate(now.slots.counts):
            wanted = sorted({*choice.slots[row].flatten().tolist()} & {*range(count)})
            assert torch.equal(image[:, row, :, wanted], every[:, row, :, wanted])
            tokens += len(wanted)
        assert brought.moved == tokens * layout.row_bytes


def test_a_read_that_fails_is_an_error(disk: DiskTier) -> None:
    fail_to_read(disk)


def test_a_read_of_threads_that_fails_is_an_error(disk_of_threads: DiskTier) -> None:
    fail_to_read(disk_of_threads)


def fail_to_read(disk: DiskTier) -> None:
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
    ("tokens", "threads", "at_once"),
    [(1500, GATHER_PARTS, 16), (68, 23, 3), (GATHER_PARTS, GATHER_PARTS, 1), (20, 20, 1), (1, 1, 1)],
)
def test_many_threads_read_at_once(tokens: int, threads: int, at_once: int, disk_of_threads: DiskTier) -> None:
    """Each of the threads takes its part from one list, of few tokens one. All are in the middle of it at the same time."""
    meeting, sizes = threading.Barrier(threads), list[int]()

    def noted(wanted: TokenReads, buffer: Tensor, at_once: int) -> None:
        assert len(buffer) >= at_once * wanted.group_bytes
        sizes.append(at_once)
        meeting.wait(PATIENCE_SECONDS)

    bring_many(tokens, disk_of_threads, noted)
    assert sizes == [at_once] * threads


def test_threads_read_what_goes_through_the_page_cache(tmp_path: Path) -> None:
    """A queue would make one read after the other."""
    file = tmp_path / "file"
    file.touch()
    with closing(open(file, "rb")) as cached:
        assert not memory_disk.passes_page_cache(cached.fileno())
        with DiskFiles() as files:
            files.start_gathering(cached.fileno())
            assert files._queue is None and files._gatherers is not None


@pytest.mark.parametrize(("group_bytes", "under_way", "at_once"), [(ALIGNMENT, 128, 4), (16 * ALIGNMENT, 32, 1)])
def test_many_reads_are_in_the_queue_at_once(group_bytes: int, under_way: int, at_once: int, disk: DiskTier) -> None:
    given = list[tuple[int, int, bool]]()

    def noted(wanted: TokenReads, buffer: Tensor, at_once: int, queue: ReadQueue) -> None:
        given.append((len(buffer) // (at_once * wanted.group_bytes), at_once, queue.number != 0))

    if disk.files._queue is None:
        pytest.skip("the system keeps queues of reads from this process")
    bring_many(500, disk, noted, group_bytes)
    assert given == [(under_way, at_once, True)]


def test_there_is_one_buffer_whatever_thread_reads_through_the_queue(disk: DiskTier) -> None:
    places = list[int]()

    def noted(wanted: TokenReads, buffer: Tensor, at_once: int, queue: ReadQueue) -> None:
        places.append(buffer.data_ptr())

    if disk.files._queue is None:
        pytest.skip("the system keeps queues of reads from this process")
    bring_many(500, disk, noted)
    with ThreadPoolExecutor(1) as other:
        other.submit(bring_many, 500, disk, noted).result()
    assert len(places) == 2 and len(set(places)) == 1


def test_where_a_read_through_the_queue_fails_threads_make_the_next_ones(disk: DiskTier) -> None:
    queues = list[ReadQueue | None]()

    def noted(wanted: TokenReads, buffer: Tensor, at_once: int, queue: ReadQueue | None = None) -> None:
        queues.append(queue)
        wanted.progress[1] = 0 if queue is None else errno.EINVAL

    if (queue := disk.files._queue) is None:
        pytest.skip("the system keeps queues of reads from this process")
    with pytest.raises(OSError, match="single tokens"):
        bring_many(500, disk, noted)
    assert queues == [queue] and not queue.close.alive
    bring_many(500, disk, noted)
    assert len(queues) > 1 and not any(queues[1:])


def test_nothing_is_read_through_a_queue_that_is_closed(disk: DiskTier) -> None:
    disk.files.close()
    assert disk.files._queue is None


def bring_many(tokens: int, disk: DiskTier, noted: Callable[..., None], group_bytes: int = ALIGNMENT) -> None:
    layout = KVLayout(1, HEADS, 3000, 0, group_bytes, by_row=True)
    pages, now, image = opened(disk, layout), step_of((2990,)), torch.zeros(2, 1, HEADS, 3000, 256)
    chosen = np.tile(np.arange(0, 2 * tokens, 2), (1, HEADS, 1))
    with patch.object(memory_disk, "read_tokens", noted):
        pages.bring(numpy_of(image, writes=True), ChosenSlots(now, torch.from_numpy(chosen)), POLICY)
