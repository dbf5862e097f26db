"""Rates of moving data: the offload folder's reads and writes past the page cache, copies, and an accelerator's links."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from math import inf
from pathlib import Path
from random import Random

import numpy
import torch
from torch import Tensor

from h2o_flexgen.core.buffer_layout import ALIGNMENT, CHUNK_BYTES
from h2o_flexgen.core.units import format_bytes
from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.operations import plain_product
from h2o_flexgen.memory.disk import DiskRegion, TokensOnDisk
from h2o_flexgen.memory.host import HostTier
from h2o_flexgen.memory.memories import Memories
from h2o_flexgen.profiling.bench import NOW, Bench, Figures, Now, ProfileSizes, ProfileWatch, Subject
from h2o_flexgen.schedule import ops

SHARE_OF_DISK = 4  # at most a quarter of the free space is written
LEAST_DISK_BYTES = 8 * CHUNK_BYTES  # with less, a rate says little
PARTS_OF_FILE = (64, 8, 1)  # how many times smaller the file is at first, for disks that are slow
WEIGHT_OF_DISK = 7.0
READ, WRITE, BOTH = "disk_read_per_s", "disk_write_per_s", "disk_both"
READS_BESIDE, COMPUTING_BESIDE = "reads_beside_computing", "computing_beside_reads"
SMALL_READS, SMALL_WRITES = "small_reads_per_s", "small_writes_per_s"
PAGES, FEW_PAGES = 2048, 64  # that are asked for at once, as a step may do; and first, to see how long they take
ROWS, SIDE = 16, 2048  # of a product beside which is read
COPY, SUM = "host_copy_per_s", "host_read_per_s"
LINKS = {  # page-locked host memory: rate to the device, and back
    True: ("host_to_device_per_s", "device_to_host_per_s"),
    False: ("unpinned_to_device_per_s", "unpinned_to_host_per_s"),
}


# -- disk ----------------------------------------------------------------------------------------------------------------


@contextmanager
def disk(memories: Memories, sizes: ProfileSizes, now: Now = NOW, watch: ProfileWatch | None = None) -> Iterator[Subject]:
    """Uses a temporary file that is written first, so that there is something to read."""
    most = _file_bytes(memories.disk.folder, sizes)
    compute = None if memories.device.accelerator else a_product()
    trial = DiskTrial(memories, sizes.disk_seconds / most, now, watch or ProfileWatch(), compute)
    try:
        steps = tuple(max(1, most // part) for part in PARTS_OF_FILE)
        yield Subject("disk", trial.rates, steps, enough=inf, weight=WEIGHT_OF_DISK)
    finally:
        trial.close()


def _file_bytes(folder: Path, sizes: ProfileSizes) -> int:
    free = shutil.disk_usage(folder).free
    least = min(LEAST_DISK_BYTES, sizes.disk_bytes)
    if free // SHARE_OF_DISK < least:
        raise ValueError(
            f"offload folder {folder} has {format_bytes(free)} free; a profile needs {format_bytes(SHARE_OF_DISK * least)}: "
            "make room or give another --offload-dir"
        )
    return min(sizes.disk_bytes, free // SHARE_OF_DISK)


def a_product() -> Callable[[], object]:
    """A product as a step has many: by all threads, of some rows with a matrix."""
    x, matrix = torch.full((ROWS, SIDE), 0.5), torch.full((SIDE, SIDE), 0.5)
    return lambda: plain_product(Factor(x), matrix, None)


class DiskTrial:
    """Reads and writes of a file; its size decides how long each is measured."""

    def __init__(
        self,
        memories: Memories,
        seconds_per_byte: float,
        now: Now,
        watch: ProfileWatch,
        compute: Callable[[], object] | None = None,
    ) -> None:
        """`compute`: what the processor does beside reads in a run; None if it does nothing."""
        self._compute = compute
        self._files, self._disk = memories.files, memories.disk
        self._seconds_per_byte, self._now, self._watch = seconds_per_byte, now, watch
        self._next: Counter[tuple[str, int]] = Counter()  # chunk that each worker of a lane is at, in its part of the file
        self._pages = numpy.zeros((1, PAGES, 1, 1, ALIGNMENT), numpy.uint8)
        self._region: DiskRegion | None = None
        self._size = self._chunk = self._chunks = 0

    def rates(self, nbytes: int) -> Figures:
        """Reads alone, writes alone, then both at once; reads beside what the processor computes; and single pages."""
        if self._size != nbytes:
            self._take(nbytes)
        seconds = self._seconds_per_byte * nbytes
        alone = {READ: self._rate(READ, seconds), WRITE: self._rate(WRITE, seconds)}
        with ThreadPoolExecutor(len(alone)) as pool:
            begun = [pool.submit(self._rate, way, seconds) for way in alone]
            shares = sum(one.result() / rate for one, rate in zip(begun, alone.values()))
        beside = {} if self._compute is None else self._beside(self._compute, alone[READ], seconds)
        return {**alone, BOTH: shares, **beside, **self._small(seconds / 2)}

    def close(self) -> None:
        if self._region is not None:
            self._disk.free(self._region)
        self._region, self._size = None, 0

    def _take(self, nbytes: int) -> None:
        """Writes a file of this size, in place of the last one."""
        self.close()
        readers = self._files.readers
        self._chunk = min(CHUNK_BYTES, max(ALIGNMENT, nbytes // (2 * readers) // ALIGNMENT * ALIGNMENT))
        self._chunks = max(1, nbytes // self._chunk)
        self._source = HostTier().alloc(self._chunk)[: self._chunk].random_(256)
        # as a run reads weights: straight into memory on large pages, since reading into small ones is slower
        self._target = HostTier().alloc(readers * self._chunk)
        self._next.clear()
        self._region, self._size = self._disk.alloc(self._chunks * self._chunk), nbytes
        self._fill()

    def _fill(self) -> None:
        """Writes some chunks at a time, so that progress can be seen on a slow disk."""
        step = 4 * self._files.readers
        for first in range(0, self._chunks, step):
            written, total = (format_bytes(chunks * self._chunk) for chunks in (first, self._chunks))
            self._watch.inside(f"writing a file to read from, {written} of {total}")
            self._files.each(self._write, [chunk * self._chunk for chunk in range(first, min(first + step, self._chunks))])

    def _rate(self, way: str, seconds: float) -> float:
        """Uses as many threads as the lane has workers, so that no thread idles at the end of a task."""
        workers = ops.WORKERS[ops.READ if way == READ else ops.WRITE]
        begun = self._now()
        with ThreadPoolExecutor(workers) as pool:
            done = sum(pool.map(lambda place: self._moved(way, place, workers, begun + seconds), range(workers)))
        return done / (self._now() - begun)

    def _beside(self, compute: Callable[[], object], reads_alone: float, seconds: float) -> Figures:
        """The shares of their rates that reads and products have while both are under way. They may take turns, which is the
        least."""
        ends = self._now() + seconds
        products_alone = self._per_second(compute, lambda: self._now() >= ends)
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(self._rate, READ, seconds)
            products = self._per_second(compute, reading.done)
        shares = {READS_BESIDE: reading.result() / reads_alone, COMPUTING_BESIDE: products / products_alone}
        least = min(1.0, sum(shares.values()))
        return {name: min(1.0, share / least) for name, share in shares.items()}

    def _small(self, seconds: float) -> Figures:
        """Pages a second that lie anywhere in the file: read as steps read the tokens that they choose, and written as they
        write their newest ones."""
        assert self._region is not None
        pages = range(self._chunks * self._chunk // ALIGNMENT)
        starts = [page * ALIGNMENT for page in Random(0).choices(pages, k=PAGES)]
        self._disk.start_gathering()
        write = partial(self._files.each, self._write_page)
        ways: dict[str, Callable[[Sequence[int]], object]] = {SMALL_READS: self._gather, SMALL_WRITES: write}
        return {name: self._pages_per_s(move, starts, seconds) for name, move in ways.items()}

    def _pages_per_s(self, move: Callable[[Sequence[int]], object], starts: Sequence[int], seconds: float) -> float:
        """A few tell how many there may be at once. A slow disk would take much longer than these seconds for all of them."""
        ends = self._now() + seconds
        rate = FEW_PAGES * self._per_second(partial(move, starts[:FEW_PAGES]), lambda: True)
        if (count := min(len(starts), int(rate * seconds))) <= FEW_PAGES:
            return rate
        return count * self._per_second(partial(move, starts[:count]), lambda: self._now() >= ends)

    def _gather(self, starts: Sequence[int]) -> None:
        assert self._region is not None
        groups = numpy.array([(row, start, 0) for row, start in enumerate(starts)], numpy.int64)
        wanted = TokensOnDisk(groups, numpy.ones(len(starts), numpy.int64), ALIGNMENT, 1)  # as if each were a row's only one
        self._disk.gather(self._region, wanted, self._pages[:, : len(starts)])

    def _write_page(self, start: int) -> None:
        assert self._region is not None
        self._disk.write_from(self._region, start, self._source[:ALIGNMENT])

    def _per_second(self, action: Callable[[], object], ended: Callable[[], bool]) -> float:
        begun, calls = self._now(), 0
        while not calls or not ended():
            action()
            calls += 1
        return calls / (self._now() - begun)

    def _moved(self, way: str, place: int, workers: int, ends: float) -> int:
        """Moves as many chunks at once as there are threads, task by task, in its own part of the file."""
        action, done = self._read if way == READ else self._write, 0
        group, part = min(self._chunks, self._files.readers), max(1, self._chunks // workers)
        while self._now() < ends or not done:
            first = place * part + self._next[way, place]
            self._files.each(action, [(first + member) % self._chunks * self._chunk for member in range(group)])
            self._next[way, place] = (self._next[way, place] + group) % part
            done += group * self._chunk
        return done

    def _read(self, start: int) -> None:
        assert self._region is not None
        place = start // self._chunk % self._files.readers * self._chunk
        self._disk.read_into(self._region, start, self._target[place : place + self._chunk])

    def _write(self, start: int) -> None:
        assert self._region is not None
        self._disk.write_from(self._region, start, self._source)


# -- copies --------------------------------------------------------------------------------------------------------------


def copies(bench: Bench, host: Bench, sizes: ProfileSizes, page_locked: HostTier) -> list[Subject]:
    """Copies and reads of host memory, and an accelerator's links. `host` is the bench of the CPU."""
    source, target = host.pool.halves()
    values = source.view(torch.float32)
    subjects = [
        host.rate("host copy", COPY, source.nbytes, lambda: target.copy_(source)),
        host.rate("host read", SUM, source.nbytes, values.sum),
    ]
    return subjects + (links(bench, host, sizes, page_locked) if bench.device.accelerator else [])


def links(bench: Bench, host: Bench, sizes: ProfileSizes, page_locked: HostTier) -> list[Subject]:
    """The links between host and device, with page-locked and with pageable host memory."""
    nbytes = min(sizes.copied_bytes, bench.pool.nbytes, host.pool.nbytes)
    there, clock = bench.pool.data[:nbytes], bench.clock

    def both_ways(here: Tensor, pinned: bool) -> Callable[[int], Figures]:
        up, down = LINKS[pinned]
        return lambda _: {
            up: here.nbytes / clock.of(lambda: there.copy_(here, non_blocking=True)),
            down: here.nbytes / clock.of(lambda: here.copy_(there, non_blocking=True)),
        }

    of_link = {True: page_locked.alloc(nbytes)[:nbytes], False: host.pool.data[:nbytes]}
    return [
        Subject(f"link, {'page-locked' if pinned else 'pageable'} memory", both_ways(here, pinned), of_rounds=max)
        for pinned, here in of_link.items()
    ]
