"""Tokens that lie apart in a file: many threads share the list of what is read, and what the system does not give is told."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from h2o_flexgen.core.buffer_layout import ALIGNMENT
from h2o_flexgen.kernels.native import variants
from h2o_flexgen.kernels.operations import read_tokens
from h2o_flexgen.kernels.raw_memory import address_of
from h2o_flexgen.kernels.read_tokens import ENDED, TokenReads, read_tokens_twin
from tests.kernels.variants import used

BUILDS = ["torch", *variants()[:1]]
PAGES = 2  # of a page group, which has one token of one head
WIDTH = PAGES * ALIGNMENT // 4


def reads_of(descriptor: int, groups: Sequence[int], alignment: int = ALIGNMENT) -> TokenReads:
    """One row, of which each page group is a token."""
    listed, held = numpy.array([(0, 0, group) for group in groups], numpy.int64), numpy.array([64], numpy.int64)
    image = numpy.zeros((1, 1, 1, 64, WIDTH), numpy.int32)
    return TokenReads(descriptor, alignment, listed, held, PAGES * ALIGNMENT, 1, image, numpy.zeros(2, numpy.int64))


def buffer_of(pages: int = PAGES) -> Tensor:
    return torch.frombuffer(mmap.mmap(-1, pages * ALIGNMENT), dtype=torch.uint8)


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
        for done in [pool.submit(read_tokens, wanted, buffer_of()) for _ in range(8)]:
            done.result()
    assert not wanted.progress[1]
    found = wanted.image[0, 0, 0]
    assert (found == (numpy.arange(64) * (numpy.arange(64) % 2 == 0))[:, None]).all()


class LookedUpTogether(numpy.ndarray[Any, Any]):
    """A list in which two threads look something up at the same moment."""

    meeting: threading.Barrier
    looked_up: list[int]

    def __getitem__(self, place: Any) -> Any:
        self.looked_up.append(place)
        self.meeting.wait(timeout=30)
        return numpy.asarray(self)[place]


def test_threads_of_the_twin_never_take_the_same(numbers: Path, opened: Callable[[Path, int], int]) -> None:
    wanted = reads_of(opened(numbers, os.O_RDONLY), range(16))
    groups = wanted.groups.view(LookedUpTogether)
    groups.meeting, groups.looked_up = threading.Barrier(2), []
    object.__setattr__(wanted, "groups", groups)
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(read_tokens_twin, wanted, buffer_of()) for _ in range(2)]:
            done.result()
    assert sorted(groups.looked_up) == [*range(16)]
    assert (wanted.image[0, 0, 0, :16] == numpy.arange(16)[:, None]).all()


@pytest.mark.parametrize("build", BUILDS)
def test_what_the_system_says_of_a_failed_read_is_told(build: str, numbers: Path, opened: Callable[[Path, int], int]) -> None:
    wanted = reads_of(opened(numbers, os.O_WRONLY), range(2))
    with used(build):
        read_tokens(wanted, buffer_of())
    assert wanted.progress[1] == errno.EBADF


@pytest.mark.parametrize("build", BUILDS)
def test_a_file_that_ends_within_a_page_group_has_ended(build: str, numbers: Path, opened: Callable[[Path, int], int]) -> None:
    os.truncate(numbers, (4 * PAGES + 1) * ALIGNMENT)
    wanted = reads_of(opened(numbers, os.O_RDONLY), (0, 3, 4))
    with used(build):
        read_tokens(wanted, buffer_of())
    assert wanted.progress[1] == ENDED
    assert [*wanted.image[0, 0, 0, :5, 0]] == [0, 0, 0, 3, 0] and not wanted.image[0, 0, 0, 4].any()


@pytest.mark.parametrize("build", BUILDS)
def test_a_short_read_goes_on_where_it_ended(build: str, numbers: Path, opened: Callable[[Path, int], int]) -> None:
    """The system gives the bytes for which there is memory, and says only of the next ones that they have none."""
    wanted, buffer = reads_of(opened(numbers, os.O_RDONLY), [5]), buffer_of()
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    assert protect(address_of(buffer) + ALIGNMENT, ALIGNMENT, 0) == 0
    with used(build):
        read_tokens(wanted, buffer)
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
    read_tokens_twin(wanted, buffer_of())
    assert not wanted.progress[1] and (wanted.image[0, 0, 0, 5] == 5).all()
    assert begins == [5 * PAGES * ALIGNMENT, (5 * PAGES + 1) * ALIGNMENT]
