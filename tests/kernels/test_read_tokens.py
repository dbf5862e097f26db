"""Tokens that lie apart in a file: many reads are under way, in a queue or by threads that share the list of what is read; and
what the system does not give is told."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

from h2o_flexgen.core.buffer_layout import ALIGNMENT
from h2o_flexgen.kernels.native import variants
from h2o_flexgen.kernels.operations import read_tokens
from h2o_flexgen.kernels.raw_memory import address_of, numpy_of
from h2o_flexgen.kernels.read_tokens import ENDED, ReadQueue, TokenReads, read_tokens_twin
from tests.helpers.patience import PATIENCE_SECONDS
from tests.kernels.variants import used

BUILDS = ["torch", *variants()[:1]]
QUEUED = "queued"  # the same library with a queue, which not every system has
WAYS = [*BUILDS, *([QUEUED] if variants() else [])]
PAGES = 2  # of a page group, which has one token of one head
WIDTH = PAGES * ALIGNMENT // 4
O_DIRECT = getattr(os, "O_DIRECT", 0)


def reads_of(descriptor: int, groups: Sequence[int], alignment: int = ALIGNMENT) -> TokenReads:
    """One row, of which each page group is a token."""
    listed, held = numpy.array([(0, 0, group) for group in groups], numpy.int64), numpy.array([64], numpy.int64)
    image = numpy.zeros((1, 1, 1, 64, WIDTH), numpy.int32)
    return TokenReads(descriptor, alignment, listed, held, PAGES * ALIGNMENT, 1, image, numpy.zeros(2, numpy.int64))


def buffer_of(pages: int = PAGES) -> Tensor:
    return torch.frombuffer(mmap.mmap(-1, pages * ALIGNMENT), dtype=torch.uint8)


@contextmanager
def reading(way: str, at_once: int = 1) -> Iterator[Callable[[TokenReads, Tensor], None]]:
    """Reads so many page groups at a time, or has as many of these reads in a queue as the buffer has room for."""
    with used(variants()[0] if way == QUEUED else way):
        queue = ReadQueue.opened() if way == QUEUED else None
        if way == QUEUED and queue is None:
            pytest.skip("the system keeps queues of reads from this process")
        yield lambda wanted, buffer: read_tokens(wanted, buffer, at_once, queue)
        if queue is not None:
            queue.close()


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    """A file of 64 page groups, filled with their own numbers."""
    file = tmp_path / "groups"
    file.write_bytes(numpy.repeat(numpy.arange(64, dtype=numpy.int32), WIDTH).tobytes())
    return file


@pytest.fixture
def opened(request: pytest.FixtureRequest) -> Callable[[Path, int], int]:
    def open_file(file: Path, flags: int) -> int:
        descriptor = os.open(file, flags)
        request.addfinalizer(lambda: os.close(descriptor))
        return descriptor

    return open_file


@pytest.mark.parametrize("build", BUILDS)
def test_threads_that_share_a_list_read_all_of_it(build: str, numbers: Path, opened: Callable[[Path, int], int]) -> None:
    wanted = reads_of(opened(numbers, os.O_RDONLY), range(0, 64, 2))
    with used(build), ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(read_tokens, wanted, buffer_of(), 1) for _ in range(8)]:
            done.result()
    assert not wanted.progress[1]
    found = wanted.image[0, 0, 0]
    assert (found == (numpy.arange(64) * (numpy.arange(64) % 2 == 0))[:, None]).all()


def test_there_is_no_queue_without_the_library() -> None:
    with used("torch"):
        assert ReadQueue.opened() is None


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("reads", [1, 3, 20])
def test_a_queue_reads_all_of_it_whatever_it_has_room_for(
    reads: int, direct: bool, numbers: Path, opened: Callable[[Path, int], int]
) -> None:
    wanted = reads_of(opened(numbers, os.O_RDONLY | (O_DIRECT if direct else 0)), [*range(0, 40, 2), 41, 42, 43, 44, 63])
    with reading(WAYS[-1]) as read:
        read(wanted, buffer_of(reads * PAGES))
    found, own = wanted.image[0, 0, 0], wanted.groups[:, 2]
    assert not wanted.progress[1] and (found[own] == own[:, None]).all()
    assert not found[[*range(1, 40, 2), 40, *range(45, 63)]].any()


def image_on_pages(tokens: int) -> numpy.ndarray:
    """(sets, rows, heads, tokens, width): 2 rows have these tokens of 2 pages together, each as it lies on disk."""
    values = numpy_of(buffer_of(tokens * PAGES), writes=True).view(numpy.int32).reshape(tokens, 2, 2, WIDTH // 4)
    image = values.transpose(1, 2, 0, 3)[:, None]
    return as_strided(image, (2, 2, *image.shape[2:]), (image.strides[0], 0, *image.strides[2:]))


@pytest.mark.parametrize("joined", [1, 4])
@pytest.mark.parametrize("way", WAYS)
def test_tokens_come_to_the_entries_that_they_have(
    way: str, joined: int, numbers: Path, opened: Callable[[Path, int], int]
) -> None:
    """Straight there, where a token is a page group and lies as on disk. Neighbours have neighbouring entries, or others."""
    entries = numpy.full((2, 64), -1, numpy.int32)
    entries[0, [3, 4, 5, 9]], entries[1, [0, 1, 2, 8]] = [7, 8, 2, 0], [10, 11, 12, 1]
    begins = [0, 16 * PAGES * ALIGNMENT]
    listed = numpy.array([(row, begins[row], group) for row, group in numpy.argwhere(entries >= 0)], numpy.int64)
    image, held, progress = image_on_pages(14), numpy.array([48, 48], numpy.int64), numpy.zeros(2, numpy.int64)
    file, buffer = opened(numbers, os.O_RDONLY | O_DIRECT), buffer_of(8 * PAGES)
    wanted = TokenReads(file, ALIGNMENT, listed, held, PAGES * ALIGNMENT, 1, image, progress, entries)
    with reading(way, joined) as read:
        read(wanted, buffer)
    assert not progress[1]
    for row, token in numpy.argwhere(entries >= 0):
        assert (image[:, row, :, entries[row, token]] == 16 * row + token).all()
    assert not image[:, 0, :, [3, 4, 5, 6, 9, 13]].any(), "no token's"
    assert way == "torch" or not buffer.any(), "they are not copied"


@pytest.mark.parametrize("way", WAYS)
def test_of_a_page_group_those_come_that_have_entries(way: str, numbers: Path, opened: Callable[[Path, int], int]) -> None:
    """Four tokens of a head are a page group here."""
    values, entries = numpy.zeros((1, 1, 1, 6, WIDTH // 4), numpy.int32), numpy.full((1, 64), -1, numpy.int32)
    entries[0, [8, 10, 11, 20]] = [5, 0, 3, 1]
    listed, held = numpy.array([(0, 0, 2), (0, 0, 5)], numpy.int64), numpy.array([22], numpy.int64)
    file, progress = opened(numbers, os.O_RDONLY), numpy.zeros(2, numpy.int64)
    wanted = TokenReads(file, ALIGNMENT, listed, held, PAGES * ALIGNMENT, 4, values, progress, entries)
    with reading(way) as read:
        read(wanted, buffer_of(4 * PAGES))
    assert not progress[1] and [*values[0, 0, 0, :, 0]] == [2, 5, 0, 2, 0, 2]


class LookedUpTogether(numpy.ndarray[Any, Any]):
    """A list in which two threads look something up at the same moment."""

    meeting: threading.Barrier
    looked_up: list[int]

    def __getitem__(self, place: Any) -> Any:
        self.looked_up.append(place)
        self.meeting.wait(PATIENCE_SECONDS)
        return numpy.asarray(self)[place]


def test_threads_of_the_twin_never_take_the_same(numbers: Path, opened: Callable[[Path, int], int]) -> None:
    wanted = reads_of(opened(numbers, os.O_RDONLY), range(16))
    groups = wanted.groups.view(LookedUpTogether)
    groups.meeting, groups.looked_up = threading.Barrier(2), []
    object.__setattr__(wanted, "groups", groups)
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(read_tokens_twin, wanted, buffer_of(), 1) for _ in range(2)]:
            done.result()
    assert sorted(groups.looked_up) == [*range(16)]
    assert (wanted.image[0, 0, 0, :16] == numpy.arange(16)[:, None]).all()


@pytest.mark.parametrize("way", WAYS)
def test_what_the_system_says_of_a_failed_read_is_told(way: str, numbers: Path, opened: Callable[[Path, int], int]) -> None:
    wanted = reads_of(opened(numbers, os.O_WRONLY), range(2))
    with reading(way) as read:
        read(wanted, buffer_of())
    assert wanted.progress[1] == errno.EBADF


@pytest.mark.parametrize("way", WAYS)
def test_a_file_that_ends_within_a_page_group_has_ended(way: str, numbers: Path, opened: Callable[[Path, int], int]) -> None:
    os.truncate(numbers, (4 * PAGES + 1) * ALIGNMENT)
    wanted = reads_of(opened(numbers, os.O_RDONLY), (0, 3, 4))
    with reading(way) as read:
        read(wanted, buffer_of())
    assert wanted.progress[1] == ENDED
    assert [*wanted.image[0, 0, 0, :5, 0]] == [0, 0, 0, 3, 0] and not wanted.image[0, 0, 0, 4].any()


@pytest.mark.parametrize("way", WAYS)
def test_a_short_read_goes_on_where_it_ended(way: str, numbers: Path, opened: Callable[[Path, int], int]) -> None:
    """The system gives the bytes for which there is memory, and says only of the next ones that they have none."""
    wanted, buffer = reads_of(opened(numbers, os.O_RDONLY), [5]), buffer_of()
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    assert protect(address_of(buffer) + ALIGNMENT, ALIGNMENT, 0) == 0
    with reading(way) as read:
        read(wanted, buffer)
    assert wanted.progress[1] == errno.EFAULT
    assert (buffer[:ALIGNMENT].view(torch.int32) == 5).all()


def test_the_twin_reads_all_of_what_comes_in_parts(
    numbers: Path, opened: Callable[[Path, int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A direct read goes on where a page begins."""
    preadv, begins = os.preadv, list[int]()

    def short(descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        begins.append(offset)
        return preadv(descriptor, [buffers[0][: ALIGNMENT + 100]], offset)

    monkeypatch.setattr(os, "preadv", short)
    wanted = reads_of(opened(numbers, os.O_RDONLY), [5])
    read_tokens_twin(wanted, buffer_of(), 1)
    assert not wanted.progress[1] and (wanted.image[0, 0, 0, 5] == 5).all()
    assert begins == [5 * PAGES * ALIGNMENT, (5 * PAGES + 1) * ALIGNMENT]
