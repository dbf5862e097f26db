"""Disk: direct reads and writes past the page cache, with several aligned ranges in flight from a small pool of threads.

It serves checkpoint files, which are read in place (`Files.read`), and the offload file for KV and activations (`DiskTier`). A
range of whole pages, or one that shares its memory pages with no other data, is read straight to its place if its alignment
there is that in its file. Several of these that follow each other in a file are one read, as each costs time of a processor.
Any other range (of another dtype, or at an odd address) goes through a buffer of the reading thread.
The pool's threads live as long as the `DiskFiles` object and do nothing but reads, writes and the copies that belong to them.
Single tokens of KV (`gather`) come through a queue of reads, which one thread at a time keeps full, or by threads of their own.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from weakref import finalize

import numpy
import torch
from torch import Tensor

from h2o_flexgen.core.buffer_layout import (
    ALIGNMENT,
    CHUNK_BYTES,
    GATHER_PARTS,
    HUGE_PAGE_BYTES,
    READERS,
    aligned,
    disk_buffer_bytes,
    gather_buffer_bytes,
)
from h2o_flexgen.core.files import Check
from h2o_flexgen.formats.kernel_sizes import shared
from h2o_flexgen.kernels.operations import read_tokens
from h2o_flexgen.kernels.raw_memory import bytes_of, numpy_of
from h2o_flexgen.kernels.read_tokens import ENDED, ReadQueue, TokenReads
from h2o_flexgen.memory.host import Meter
from h2o_flexgen.memory.threads import SharedWork, started_pool

COPY_VALUES = 1 << 15  # torch copies fewer values than this in the calling thread, as readers need


@dataclass(frozen=True)
class Checked:
    """A range of a file that is read only to compare its bytes with what was written."""

    file: Path
    offset: int
    nbytes: int
    check: Check

    def cut(self) -> list[Checked]:
        starts = range(0, self.nbytes, CHUNK_BYTES)
        return [replace(self, offset=self.offset + at, nbytes=min(CHUNK_BYTES, self.nbytes - at)) for at in starts]


@dataclass(frozen=True)
class FilePiece:
    """A range of a file and the values in memory that it becomes."""

    file: Path
    offset: int
    out: Tensor  # (values,), contiguous
    dtype: torch.dtype  # as stored
    check: Check | None = None  # of the bytes as stored, in the chunks that the piece is cut into
    pages: Tensor | None = None  # bytes: the whole pages around `out`, if they hold no other data

    @property
    def nbytes(self) -> int:
        return self.out.numel() * self.dtype.itemsize

    @property
    def is_direct(self) -> bool:
        """True if the bytes can be read straight to their place: same dtype, and place and offset agree in alignment."""
        return self.out.dtype == self.dtype and (self.out.data_ptr() - self.offset) % ALIGNMENT == 0

    @property
    def pages_start(self) -> int:
        """The byte of the file at which its pages begin."""
        return self.offset - self.offset % ALIGNMENT

    @property
    def pages_end(self) -> int:
        assert self.pages is not None
        return self.pages_start + len(self.pages)

    def alone_in(self, pages: Tensor) -> FilePiece:
        """The same piece, with these pages, which hold no other data."""
        assert self.is_direct and self.check is None and self.dtype == torch.uint8
        assert pages.data_ptr() == self.out.data_ptr() - self.offset % ALIGNMENT and len(pages) % ALIGNMENT == 0
        return replace(self, pages=pages)

    def cut(self, chunk_bytes: int = CHUNK_BYTES) -> list[FilePiece]:
        if self.pages is not None:
            return list(self._cut_by_pages(self.pages, chunk_bytes))
        values = chunk_bytes // self.dtype.itemsize
        if 0 < self.out.numel() <= values:
            return [self]
        return [
            replace(self, offset=self.offset + start * self.dtype.itemsize, out=self.out[start : start + values])
            for start in range(0, self.out.numel(), values)
        ]

    def _cut_by_pages(self, pages: Tensor, chunk_bytes: int) -> Iterator[FilePiece]:
        begin, end = self.offset // ALIGNMENT * ALIGNMENT, self.offset + self.nbytes
        for at in range(0, len(pages), chunk_bytes):
            first, behind = max(self.offset, begin + at), min(end, begin + at + chunk_bytes)
            own = self.out[first - self.offset : behind - self.offset]
            yield replace(self, offset=first, out=own, pages=pages[at : at + chunk_bytes])


def runs(pieces: Iterable[FilePiece]) -> list[list[FilePiece]]:
    """The pieces, in runs of neighbours of a file that have whole pages. A run has as many bytes as a chunk at most."""
    pieces = list(pieces)
    found: list[list[FilePiece]] = [[piece] for piece in pieces if piece.pages is None]
    run: list[FilePiece] = []
    for piece in sorted((piece for piece in pieces if piece.pages is not None), key=_place_in_files):
        if run and _follows(piece, run[-1]) and piece.pages_end - run[0].pages_start <= CHUNK_BYTES:
            run.append(piece)
        else:
            found.append(run := [piece])
    return found


def _place_in_files(piece: FilePiece) -> tuple[str, int]:
    return str(piece.file), piece.offset


def _follows(piece: FilePiece, before: FilePiece) -> bool:
    """Whether its pages begin where those of the other one end, or with the last of them."""
    return before.file == piece.file and before.pages_end - piece.pages_start in (0, ALIGNMENT)


class DiskFiles:
    """Open files and the threads that read and write them."""

    def __init__(self, readers: int = READERS) -> None:
        self.readers = readers
        self._pool = started_pool(readers, "disk")  # now, while there is memory for its threads
        self._lock = threading.Lock()
        self._open: dict[Path, int] = {}
        finalize(self, _close_all, self._open).atexit = False  # a process that ends closes them by itself
        self._buffers = threading.local()
        self._queue: ReadQueue | None = None  # made where single tokens are read
        self._turn = threading.Lock()  # of those that read through it
        self._to_queue: mmap.mmap | None = None  # memory to gather into, of the one that has its turn
        self._gatherers: ThreadPoolExecutor | None = None  # started in its place

    def __enter__(self) -> DiskFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for pool in filter(None, (self._pool, self._gatherers)):
            pool.shutdown(wait=True, cancel_futures=True)
        if self._queue is not None:
            self._queue.close()
            self._queue = None  # its number may be another one's from now on
        with self._lock:
            _close_all(self._open)

    def read(self, pieces: Iterable[FilePiece]) -> int:
        """Reads all pieces in parallel and returns the number of bytes."""
        chunks = [chunk for piece in pieces for chunk in piece.cut()]
        self.each(self._read_run, runs(chunks))
        return sum(chunk.nbytes for chunk in chunks)

    def check(self, ranges: Iterable[Checked]) -> None:
        """Reads all ranges in parallel to compare them with what was written."""
        self.each(self._read_to_buffer, [chunk for checked in ranges for chunk in checked.cut()])

    def each(self, action: Callable[..., object], items: Sequence[object]) -> None:
        """Runs the action on every item, in the pool and here. The first error is raised here, after all have ended."""
        work = SharedWork(action, items)
        for _ in range(min(self.readers, len(items) - 1)):  # the calling thread is one of those that do it
            self._pool.submit(work.do)
        work.do()
        work.finish()

    def start_gathering(self, file: int) -> None:
        """Makes ready to read single tokens of a file, while there is memory for it: with a queue of reads, where the system
        has that and the file is read past the page cache, or else with threads."""
        if self._queue is None and passes_page_cache(file):
            self._queue = ReadQueue.opened()
        if self._queue is None and self._gatherers is None:
            self._gatherers = started_pool(GATHER_PARTS, "gather")

    def gather(self, wanted: TokenReads) -> None:
        """Reads single tokens from a file to their places."""
        if not len(wanted.groups):
            return
        if self._queue is not None:
            self._gather_queued(wanted)
            return
        assert self._gatherers is not None
        room = gather_buffer_bytes(wanted.group_bytes)
        at_once = min(room // wanted.group_bytes, -(-len(wanted.groups) // GATHER_PARTS))  # of few, each thread has its part
        workers = min(GATHER_PARTS, -(-len(wanted.groups) // at_once))
        work = SharedWork(lambda _: read_tokens(wanted, self._gather_buffer(room), at_once), range(workers))
        for _ in range(workers):
            self._gatherers.submit(work.do)
        work.finish()

    def _gather_queued(self, wanted: TokenReads) -> None:
        """Reads them through the queue, in turn with others, so that there is one buffer."""
        nbytes = GATHER_PARTS * gather_buffer_bytes(wanted.group_bytes)
        at_once = max(1, nbytes // (shared().queued_reads * wanted.group_bytes))
        with self._turn:
            if self._to_queue is None or len(self._to_queue) < nbytes:
                self._to_queue = _pages(nbytes)
            read_tokens(wanted, torch.frombuffer(self._to_queue, dtype=torch.uint8)[:nbytes], at_once, self._queue)
            if wanted.progress[1] and self._queue is not None:
                self._leave_queue(self._queue)

    def _leave_queue(self, queue: ReadQueue) -> None:
        """Makes threads read single tokens from now on. Reads may be under way where one failed: the queue waits for them."""
        self._gatherers = self._gatherers or started_pool(GATHER_PARTS, "gather")
        self._queue = None
        queue.close()

    def _gather_buffer(self, nbytes: int) -> Tensor:
        """Aligned memory of the calling thread to gather into."""
        pages: mmap.mmap | None = getattr(self._buffers, "gathered", None)
        if pages is None or len(pages) < nbytes:
            pages = self._buffers.gathered = _pages(nbytes)
        return torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]

    def buffer(self, nbytes: int) -> memoryview:
        """Aligned scratch memory of the calling thread, grown when needed and kept."""
        pages: memoryview | None = getattr(self._buffers, "pages", None)
        if pages is None or len(pages) < nbytes:
            pages = self._buffers.pages = huge_pages(disk_buffer_bytes(nbytes))
        return pages[:nbytes]

    def descriptor(self, file: Path) -> int:
        with self._lock:
            if file not in self._open:
                self._open[file] = open_direct(file, os.O_RDONLY)
            return self._open[file]

    def _read_run(self, run: Sequence[FilePiece]) -> None:
        """Reads neighbours at once where the system gives all that is wanted, and otherwise one by one."""
        if len(run) == 1 or not self._read_at_once(run):
            for piece in run:
                self._read_chunk(piece)

    def _read_at_once(self, run: Sequence[FilePiece]) -> bool:
        """Each has its pages from where the one before ends. A page that two share is copied to the second one."""
        pages = [bytes_of(piece.pages, writes=True) for piece in run if piece.pages is not None]
        shares = [before.pages_end - piece.pages_start for before, piece in pairwise(run)]
        own = [pages[0], *(each[shared:] for each, shared in zip(pages[1:], shares, strict=True))]
        start, wanted = run[0].pages_start, run[-1].offset + run[-1].nbytes
        with suppress(OSError):  # which is told by the read of the piece that has it
            if start + os.preadv(self.descriptor(run[0].file), own, start) >= wanted:
                for before, each, shared in zip(pages, pages[1:], shares):
                    each[:shared] = before[len(before) - shared :]
                return True
        return False

    def _read_chunk(self, piece: FilePiece) -> None:
        pages = piece.pages
        if piece.is_direct and piece.offset % ALIGNMENT == 0 and piece.nbytes % ALIGNMENT == 0:
            pages = piece.out
        if pages is not None:
            self._read_checked(piece, bytes_of(pages, writes=True))
            return
        source = torch.frombuffer(self._read_to_buffer(piece), dtype=torch.uint8)
        if source.data_ptr() % piece.dtype.itemsize:
            source = source.clone()  # values at an odd address cannot be viewed as their dtype
        copy_here(source.view(piece.dtype), piece.out)

    def _read_to_buffer(self, wanted: FilePiece | Checked) -> memoryview:
        """The bytes of the range, valid until the thread's next read."""
        skip = wanted.offset % ALIGNMENT
        return self._read_checked(wanted, self.buffer(aligned(skip + wanted.nbytes)))

    def _read_checked(self, wanted: FilePiece | Checked, pages: memoryview) -> memoryview:
        """The wanted bytes, in aligned memory that holds the pages they lie in."""
        skip, check = wanted.offset % ALIGNMENT, wanted.check
        try:
            read_fully(self.descriptor(wanted.file), wanted.offset - skip, pages, skip + wanted.nbytes, wanted.file)
        except OSError as error:
            raise (error if check is None else check.unreadable(error)) from error
        data = pages[skip : skip + wanted.nbytes]
        if check is not None:
            check(wanted.offset, data)
        return data


def _pages(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def huge_pages(nbytes: int) -> memoryview:
    """Memory of which as much as possible lies on huge pages, if there are any: reads into small ones take twice as long. It
    begins where one does, as the system does not see to that for every size."""
    pages = _pages(nbytes + HUGE_PAGE_BYTES)
    start = -torch.frombuffer(pages, dtype=torch.uint8).data_ptr() % HUGE_PAGE_BYTES
    if whole := nbytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES:
        with suppress(OSError, AttributeError):
            pages.madvise(mmap.MADV_HUGEPAGE, start, whole)
    return memoryview(pages)[start : start + nbytes]


@torch.inference_mode()  # a mode of each thread; a run's tensors are made in it
def copy_here(source: Tensor, out: Tensor) -> None:
    """Copies, converting the dtype, in this thread: readers must not start torch's threads as well."""
    if source.dtype == out.dtype:
        numpy.copyto(numpy_of(out, writes=True), numpy_of(source))
        return
    for start in range(0, out.numel(), COPY_VALUES - 1):
        out[start : start + COPY_VALUES - 1].copy_(source[start : start + COPY_VALUES - 1])


def _close_all(descriptors: dict[Path, int]) -> None:
    while descriptors:
        _, descriptor = descriptors.popitem()
        os.close(descriptor)


def open_direct(file: Path, flags: int) -> int:
    """Opens a file past the page cache if the file system allows it, and otherwise through it."""
    if hasattr(os, "O_DIRECT"):
        try:
            return os.open(file, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return os.open(file, flags)


def read_fully(descriptor: int, offset: int, out: memoryview, wanted: int, file: Path) -> None:
    """Fills `out` from an aligned offset. At the end of the file, only `wanted` bytes need to be there."""
    done, is_direct = 0, True
    while done < wanted:
        # after a short read (a signal, the file's end) a direct read must continue at an aligned offset
        at = done // ALIGNMENT * ALIGNMENT if is_direct else done
        try:
            count = os.preadv(descriptor, [out[at:]], offset + at)
        except OSError as error:
            what = f"{error.strerror} where {wanted - at} bytes from byte {offset + at} on were to be read"
            raise OSError(error.errno, what, str(file)) from error
        if at + count > done:
            done = at + count
            continue
        end = os.fstat(descriptor).st_size
        if end < offset + wanted or not is_direct:
            missing = offset + wanted - min(end, offset + done)
            raise OSError(f"{file}: ends at byte {offset + wanted - missing}, {missing} bytes too early; is it truncated?")
        is_direct = False  # the file has more, but direct reads do not reach it
        through_page_cache(descriptor)


def passes_page_cache(descriptor: int) -> bool:
    """Whether a file is read and written past the page cache."""
    return hasattr(os, "O_DIRECT") and bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def through_page_cache(descriptor: int) -> None:
    """Switches a descriptor to the page cache, which takes any offset and size."""
    if hasattr(os, "O_DIRECT"):
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT)


def _reserve(descriptor: int, offset: int, nbytes: int) -> None:
    """Reserves space on disk, or only sets the file's length if the file system or the system cannot reserve."""
    try:
        os.posix_fallocate(descriptor, offset, nbytes)
    except (OSError, AttributeError) as error:
        if getattr(error, "errno", errno.EINVAL) not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        os.ftruncate(descriptor, max(offset + nbytes, os.fstat(descriptor).st_size))


def write_fully(descriptor: int, offset: int, source: memoryview) -> None:
    """Writes from an aligned offset. The size is aligned too, and so is every offset at which a direct write continues."""
    done, is_direct = 0, True
    while done < len(source):
        at = done // ALIGNMENT * ALIGNMENT if is_direct else done
        count = os.pwrite(descriptor, source[at:], offset + at)
        if at + count > done:
            done = at + count
        elif is_direct:  # the same short write twice
            is_direct = False
            through_page_cache(descriptor)
        else:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def unwritable(folder: Path, error: OSError) -> ValueError:
    return ValueError(f"offload folder {folder} cannot be written ({error.strerror}); give another --offload-dir")


class OffloadFolder:
    """The folder for a run's files. If it did not exist, it is created, and removed at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._made: list[Path] = []
        try:
            self._made = [place for place in (path, *path.parents) if not place.exists()]
            path.mkdir(parents=True, exist_ok=True)
            if not os.access(path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            self.close()
            raise unwritable(path, error) from error

    def close(self) -> None:
        for place in self._made:
            with suppress(OSError):  # another process put a file in it, or removed it
                place.rmdir()


@dataclass(frozen=True)
class DiskRegion:
    offset: int
    nbytes: int


class TokensOnDisk(NamedTuple):
    """Single tokens of rows that lie in pages of a region, by the page groups that have them."""

    groups: numpy.ndarray  # (count, 3), int64: a row, where it begins in the region, and the number of a page group in it
    held: numpy.ndarray  # (rows,), int64: the tokens that each row has there
    group_bytes: int
    group_tokens: int


class DiskTier:
    """One file for everything that a run puts on disk. Its name is removed as soon as it is open, so that nothing is left,
    however the process ends. Its space is reserved at once, so that a full disk is noticed before the work begins."""

    def __init__(self, files: DiskFiles, folder: Path) -> None:
        self.meter = Meter()
        self.files = files
        self.folder = folder
        self._descriptor: int | None = None
        self._regions: dict[DiskRegion, None] = {}  # in use, in order; a gap is only reused once all behind it is free

    def alloc(self, nbytes: int) -> DiskRegion:
        region = DiskRegion(self._end, aligned(nbytes))
        if self._descriptor is None:
            self._descriptor = self._create()
            self._closing = finalize(self, os.close, self._descriptor)  # also if the tier is freed without being closed
            self._closing.atexit = False
        try:
            if region.nbytes:
                _reserve(self._descriptor, region.offset, region.nbytes)
        except OSError as error:
            raise self._failure(error, region.nbytes) from error
        self._regions[region] = None
        self.meter.add(region.nbytes)
        return region

    def free(self, region: DiskRegion) -> None:
        self.meter.remove(region.nbytes)
        self._regions.pop(region, None)
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, self._end)  # a conversation's KV stays, a turn's hidden states do not

    @property
    def _end(self) -> int:
        last = next(reversed(self._regions), None)
        return 0 if last is None else last.offset + last.nbytes

    def read_into(self, region: DiskRegion, start: int, out: Tensor) -> None:
        """Reads from `start`, which is aligned like the place of `out`."""
        assert self._descriptor is not None
        read_fully(self._descriptor, region.offset + start, bytes_of(out, writes=True), out.nbytes, self.folder)

    def write_from(self, region: DiskRegion, start: int, source: Tensor) -> None:
        """Writes to `start`, which is aligned like the place and size of `source`."""
        assert self._descriptor is not None
        try:
            write_fully(self._descriptor, region.offset + start, bytes_of(source))
        except OSError as error:
            raise self._failure(error, source.nbytes) from error

    def start_gathering(self) -> None:
        """Makes ready to read single tokens of its regions, of which there is one at least."""
        assert self._descriptor is not None
        self.files.start_gathering(self._descriptor)

    def gather(
        self, region: DiskRegion, wanted: TokensOnDisk, image: numpy.ndarray, entries: numpy.ndarray | None = None
    ) -> None:
        """Reads single tokens of a region to their places in an image (sets, rows, heads, slots, width). `entries`: the slot of
        the image for each token of a row, or less than 0; (rows, tokens), int32."""
        assert self._descriptor is not None
        groups = wanted.groups.copy()
        groups[:, 1] += region.offset
        progress, sizes = numpy.zeros(2, numpy.int64), (wanted.group_bytes, wanted.group_tokens)
        self.files.gather(TokenReads(self._descriptor, ALIGNMENT, groups, wanted.held, *sizes, image, progress, entries))
        if failed := int(progress[1]):
            what = "ended too early" if failed == ENDED else os.strerror(failed)
            raise OSError(
                errno.EIO if failed == ENDED else failed, f"{what} where single tokens were to be read", str(self.folder)
            )

    def scratch(self, nbytes: int) -> Tensor:
        """Aligned memory of the calling thread to read into or write from."""
        return torch.frombuffer(self.files.buffer(aligned(nbytes)), dtype=torch.uint8)

    def close(self) -> None:
        if self._descriptor is not None:
            self._closing()
            self._descriptor = None

    def _create(self) -> int:
        path = self.folder / f"h2o_flexgen-{os.getpid()}-{id(self):x}.offload"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)  # another process may have removed it
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
            try:
                return open_direct(path, os.O_RDWR)
            finally:
                path.unlink()
        except OSError as error:
            raise unwritable(self.folder, error) from error

    def _failure(self, error: OSError, nbytes: int) -> OSError:
        reason = "is full" if error.errno == errno.ENOSPC else f"failed ({error.strerror})"
        return OSError(
            error.errno,
            f"disk {reason}: {nbytes / 1e9:.3f} GB more could not be written in {self.folder}; lower the disk share",
        )
