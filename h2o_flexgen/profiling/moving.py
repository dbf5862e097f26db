"""Rates of moving data: the offload folder's reads and writes past the page cache, copies, and an accelerator's links."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from h2o_flexgen.core.layout import ALIGNMENT, CHUNK_BYTES
from h2o_flexgen.core.units import format_bytes
from h2o_flexgen.memory.device import Device
from h2o_flexgen.memory.host import HostTier
from h2o_flexgen.memory.memories import Memories
from h2o_flexgen.profiling.sizes import Sizes
from h2o_flexgen.profiling.subject import Clock, Figures, Subject, Watch
from h2o_flexgen.schedule import ops

SHARE_OF_DISK = 4  # at most a quarter of the free space is written
LEAST_DISK_BYTES = 8 * CHUNK_BYTES  # with less, a rate says little
READ, WRITE, BOTH = "disk_read_per_s", "disk_write_per_s", "disk_both"
COPY, SUM = "host_copy_per_s", "host_read_per_s"
LINKS = {  # page-locked host memory: rate to the device, and back
    True: ("host_to_device_per_s", "device_to_host_per_s"),
    False: ("unpinned_to_device_per_s", "unpinned_to_host_per_s"),
}


# -- disk ----------------------------------------------------------------------------------------------------------------


@contextmanager
def disk(memories: Memories, sizes: Sizes, watch: Watch | None = None) -> Iterator[Subject]:
    """Uses a temporary file that is written first, so that there is something to read."""
    trial = DiskTrial(memories, _file_bytes(memories.disk.folder, sizes), watch or Watch())
    try:
        yield Subject("disk", lambda: trial.rates(sizes.disk_seconds))
    finally:
        memories.disk.free(trial.region)


def _file_bytes(folder: Path, sizes: Sizes) -> int:
    free = shutil.disk_usage(folder).free
    least = min(LEAST_DISK_BYTES, sizes.disk_bytes)
    if free // SHARE_OF_DISK < least:
        raise ValueError(
            f"offload folder {folder} has {format_bytes(free)} free; a profile needs {format_bytes(SHARE_OF_DISK * least)}: "
            "make room or give another --offload-dir"
        )
    return min(sizes.disk_bytes, free // SHARE_OF_DISK)


class DiskTrial:
    def __init__(self, memories: Memories, nbytes: int, watch: Watch) -> None:
        self._files, self._disk = memories.files, memories.disk
        self._chunk = min(CHUNK_BYTES, max(ALIGNMENT, nbytes // (2 * self._files.readers) // ALIGNMENT * ALIGNMENT))
        self._chunks = max(1, nbytes // self._chunk)
        self._source = HostTier().alloc(self._chunk)[: self._chunk].random_(256)
        # as a run reads weights: straight into memory on large pages, since reading into small ones is slower
        self._targets = self._files.readers
        self._target = HostTier().alloc(self._targets * self._chunk)
        self._next: Counter[tuple[str, int]] = Counter()  # chunk that each worker of a lane is at, in its part of the file
        self.region = self._disk.alloc(self._chunks * self._chunk)
        self._fill(watch)

    def _fill(self, watch: Watch) -> None:
        """Writes some chunks at a time, so that progress can be seen on a slow disk."""
        step = 4 * self._files.readers
        for first in range(0, self._chunks, step):
            written, total = (format_bytes(chunks * self._chunk) for chunks in (first, self._chunks))
            watch.inside(f"writing a file to read from, {written} of {total}")
            self._files.each(self._write, [chunk * self._chunk for chunk in range(first, min(first + step, self._chunks))])

    def rates(self, seconds: float) -> Figures:
        """Reads alone, writes alone, then both at once."""
        alone = {READ: self._rate(READ, seconds), WRITE: self._rate(WRITE, seconds)}
        with ThreadPoolExecutor(len(alone)) as pool:
            begun = [pool.submit(self._rate, way, seconds) for way in alone]
            shares = sum(one.result() / rate for one, rate in zip(begun, alone.values()))
        return {**alone, BOTH: shares}

    def _rate(self, way: str, seconds: float) -> float:
        """Uses as many threads as the lane has workers, so that no thread idles at the end of a task."""
        workers = ops.WORKERS[ops.READ if way == READ else ops.WRITE]
        begun = time.perf_counter()
        with ThreadPoolExecutor(workers) as pool:
            done = sum(pool.map(lambda place: self._moved(way, place, workers, begun + seconds), range(workers)))
        return done / (time.perf_counter() - begun)

    def _moved(self, way: str, place: int, workers: int, ends: float) -> int:
        """Moves as many chunks at once as there are threads, task by task, in its own part of the file."""
        action, done = self._read if way == READ else self._write, 0
        group, part = min(self._chunks, self._files.readers), max(1, self._chunks // workers)
        while time.perf_counter() < ends or not done:
            first = place * part + self._next[way, place]
            self._files.each(action, [(first + member) % self._chunks * self._chunk for member in range(group)])
            self._next[way, place] = (self._next[way, place] + group) % part
            done += group * self._chunk
        return done

    def _read(self, start: int) -> None:
        place = start // self._chunk % self._targets * self._chunk
        self._disk.read_into(self.region, start, self._target[place : place + self._chunk])

    def _write(self, start: int) -> None:
        self._disk.write_from(self.region, start, self._source)


# -- copies --------------------------------------------------------------------------------------------------------------


def copies(clock: Clock, sizes: Sizes) -> list[Subject]:
    memory, host = HostTier(), replace(clock, device=Device())
    source, target = (memory.alloc(sizes.copied_bytes)[: sizes.copied_bytes].fill_(1) for _ in range(2))
    values = source.view(torch.float32)
    subjects = [
        host.rate("host copy", COPY, source.nbytes, lambda: target.copy_(source)),
        host.rate("host read", SUM, source.nbytes, values.sum),
    ]
    return subjects + (links(clock, sizes) if clock.device.accelerator else [])


def links(clock: Clock, sizes: Sizes) -> list[Subject]:
    """The links between host and device, with page-locked and with pageable host memory."""
    there = clock.device.memory(HostTier()).alloc(sizes.copied_bytes)

    def both_ways(host: Tensor, pinned: bool) -> Callable[[], Figures]:
        up, down = LINKS[pinned]
        return lambda: {
            up: host.nbytes / clock.of(lambda: there.copy_(host, non_blocking=True)),
            down: host.nbytes / clock.of(lambda: host.copy_(there, non_blocking=True)),
        }

    subjects = []
    for pinned in LINKS:
        host = HostTier(pinned).alloc(there.nbytes)[: there.nbytes]
        subjects.append(Subject(f"link, {'page-locked' if pinned else 'pageable'} memory", both_ways(host, pinned)))
    return subjects
