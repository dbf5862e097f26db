"""Quick measurements of this machine, by the same means that a run uses: disk reads and writes past the page cache, copies, and
matrix products. Each takes a fraction of a second; `repetitions` and `seconds` make a benchmark of it. The best repetition
counts, since a bound is what the machine can do without disturbance."""

from __future__ import annotations

import platform
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

import psutil
import torch
from torch import Tensor

from h2o_flexgen.core.buffer_layout import ALIGNMENT, CHUNK_BYTES
from h2o_flexgen.core.environment import cores, existing_folder
from h2o_flexgen.core.site import DEVICE, HOST
from h2o_flexgen.core.units import format_bytes
from h2o_flexgen.formats.int4 import Int4
from h2o_flexgen.formats.kernel_table import PRODUCT, choose
from h2o_flexgen.formats.table import FORMATS, PLAIN, STORED
from h2o_flexgen.kernels.native import processor, processor_facts
from h2o_flexgen.kernels.operations import encode
from h2o_flexgen.memory.device import Device
from h2o_flexgen.memory.disk import DiskFiles, DiskTier, FilePiece, OffloadFolder
from h2o_flexgen.memory.host import HostTier
from h2o_flexgen.memory.pack import TORCH_DTYPES
from h2o_flexgen.planning.footprint import MemoryLimits
from h2o_flexgen.planning.machine import Curve, Machine
from h2o_flexgen.profiling.bench import sound_bytes
from h2o_flexgen.profiling.products import multiplied

SECONDS = 0.25  # for one rate
READ_BYTES_AT_ONCE = 8 * CHUNK_BYTES
READ_FROM_MEMORY_BYTES = 512 << 20  # more than any cache holds
ROWS_AT_MOST = 2048  # of a matrix product: its rate then no longer changes
POINTS_AT_MOST = 4  # of all curves over rows, but the ends of each
DECODED = ""  # no price: packed matrices are decoded first
CALLS_IN_A_ROW = 4
# memory for measuring: for disk reads, besides the buffers of their threads; only a share of what is left is surely available
LEAST_BYTES, MOST_BYTES, SHARE_OF_ROOM = READ_BYTES_AT_ONCE + (16 << 20), 512 << 20, 0.75
WEIGHT_BYTES_AT_LEAST = 96 << 20  # products take turns over as many weights, more than caches hold, as a run does


@dataclass(frozen=True)
class Needs:
    """What a run needs of the machine. Anything else is not measured and counts as infinitely fast."""

    dtype: str
    weight_shape: tuple[int, int]  # of a typical matrix of the model
    rows: tuple[int, ...]  # of the activations multiplied with it
    format: str = PLAIN  # in which matrices are kept
    product: str = PRODUCT  # the op by which packed ones are multiplied
    read_files: tuple[Path, ...] = ()  # from which the run reads weights
    offload_folder: Path | None = None  # where the run reads and writes KV or activations
    offload_bytes: int = 0  # the most that is written there to measure
    links: bool = False  # between host and device
    pin_weight: bool = True  # whether all that crosses links is page-locked; else pageable memory is measured, too
    memory_bytes: int = 256 << 20  # the most that is used to measure


def room_to_measure(limits: MemoryLimits) -> int:
    """Bytes that measuring may use without breaking a limit that the run has promised to keep."""
    held = {HOST: psutil.Process().memory_info().rss, DEVICE: 0}
    left = [limit - nbytes for tier, nbytes in held.items() if (limit := limits.of(tier)) is not None]
    free = int(min([MOST_BYTES, *left]) * SHARE_OF_ROOM)
    if free < LEAST_BYTES:
        raise MemoryError(f"it takes {format_bytes(LEAST_BYTES)}, and the limit leaves {format_bytes(max(0, free))}")
    return free


def measure(device: Device, needs: Needs, repetitions: int = 1, seconds: float = SECONDS) -> Machine:
    read = write = copy = up = down = pageable_up = pageable_down = inf
    if needs.offload_folder is not None and needs.offload_bytes:
        write, read = offload_rates(needs.offload_folder, needs.offload_bytes, repetitions, seconds)
    if needs.read_files:
        read = disk_read_rate(needs.read_files, repetitions, seconds)
    if needs.links and device.accelerator:
        copy = host_copy_rate(needs.memory_bytes // 4, repetitions)
        up, down = link_rates(device, HostTier(device), needs.memory_bytes // 2, repetitions)
        if not needs.pin_weight:
            pageable_up, pageable_down = link_rates(device, HostTier(), needs.memory_bytes // 2, repetitions)
    plain, packed = Products(device, needs, repetitions, seconds).rates()
    return Machine(
        name=platform.node() or device.kind,
        device=device.kind,
        device_bytes=device.free_bytes() or 0,
        host_bytes=psutil.virtual_memory().total,
        disk_bytes=shutil.disk_usage(existing_folder(needs.offload_folder or Path.cwd())).free,
        disk_read_per_s=read,
        disk_write_per_s=write,
        host_copy_per_s=copy,
        host_to_device_per_s=up,
        device_to_host_per_s=down,
        unpinned_to_device_per_s=pageable_up,
        unpinned_to_host_per_s=pageable_down,
        flops_per_s=plain,
        attention_bytes_per_s={},
        task_seconds=0.0,
        packed_flops_per_s=packed,
    )


# -- disk ----------------------------------------------------------------------------------------------------------------


def disk_read_rate(files: Sequence[Path], repetitions: int = 1, seconds: float = SECONDS) -> float:
    """Bytes per second read from existing files: whole chunks from all over them, several in flight, into one buffer."""
    starts = [(file, start) for file in files for start in range(0, _whole_pages(file), READ_BYTES_AT_ONCE)]
    if not starts:
        return inf  # no file fills a page, so reading costs no time worth a bound
    buffer = HostTier().alloc(READ_BYTES_AT_ONCE)
    with DiskFiles() as disk:

        def read(place: int) -> int:
            file, start = starts[place % len(starts)]
            nbytes = min(READ_BYTES_AT_ONCE, _whole_pages(file) - start)
            return disk.read([FilePiece(file, start, buffer[:nbytes], torch.uint8)])

        read(0)  # opens the file and starts the threads
        return max(_per_second(read, seconds) for _ in range(repetitions))


def offload_rates(folder: Path, nbytes: int, repetitions: int = 1, seconds: float = SECONDS) -> tuple[float, float]:
    """Bytes per second written to, and read from, a temporary file of at most `nbytes` in this folder."""
    chunks = max(1, nbytes // CHUNK_BYTES)
    chunk = min(CHUNK_BYTES, max(ALIGNMENT, nbytes // ALIGNMENT * ALIGNMENT))
    source = HostTier().alloc(chunk).random_(256)
    with closing(OffloadFolder(folder)), DiskFiles() as files, closing(DiskTier(files, folder)) as disk:
        region = disk.alloc(chunks * chunk)

        def all_with(action: Callable[[int], None]) -> Callable[[int], int]:
            group = min(chunks, files.readers)

            def act(number: int) -> int:
                files.each(action, [(number * group + member) % chunks * chunk for member in range(group)])
                return group * chunk

            return act

        def write(start: int) -> None:
            disk.write_from(region, start, source)

        def read(start: int) -> None:
            disk.read_into(region, start, disk.scratch(chunk))

        files.each(write, [number * chunk for number in range(min(chunks, files.readers))])  # starts the threads
        rates = [max(_per_second(all_with(action), seconds) for _ in range(repetitions)) for action in (write, read)]
    return rates[0], rates[1]


def _whole_pages(file: Path) -> int:
    return file.stat().st_size // ALIGNMENT * ALIGNMENT


# -- copies --------------------------------------------------------------------------------------------------------------


def host_copy_rate(nbytes: int, repetitions: int = 1) -> float:
    memory = HostTier()
    source, target = memory.alloc(nbytes), memory.alloc(nbytes)
    return nbytes / _best_seconds(Device(), lambda: target.copy_(source), repetitions)


def memory_read_rate(nbytes: int = READ_FROM_MEMORY_BYTES) -> float:
    """Bytes per second read by a sum."""
    values = torch.ones(nbytes // 4)
    return nbytes / _best_seconds(Device(), values.sum, repetitions=5)


def link_rates(device: Device, memory: HostTier, nbytes: int, repetitions: int = 1) -> tuple[float, float]:
    """Bytes per second from host memory of this kind to the device and back."""
    host = memory.alloc(nbytes)
    there = device.memory(memory)
    region = there.alloc(host.nbytes)
    try:
        up = _best_seconds(device, lambda: region.copy_(host, non_blocking=True), repetitions)
        down = _best_seconds(device, lambda: host.copy_(region, non_blocking=True), repetitions)
    finally:
        there.free(region)
        memory.free(host)
        memory.trim()
    return host.nbytes / up, host.nbytes / down


# -- matrix products -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Products:
    """The products that a run makes. Packed matrices that no kernel reads count as plain, for a run decodes them."""

    device: Device
    needs: Needs
    repetitions: int = 1
    seconds: float = SECONDS

    def rates(self) -> tuple[dict[str, Curve], dict[str, Curve]]:
        """Flops per second by rows: with plain matrices by type, with packed ones by the price of their kernel."""
        most_rows, by_price = self._most_rows, defaultdict[str, set[int]](set)
        for rows in self.needs.rows:
            fitting = max(1, min(rows, most_rows))
            by_price[self._price(rows) and self._price(fitting)].add(fitting)
        most = max(2, POINTS_AT_MOST // len(by_price))
        format = in_order(self.needs.format)
        curves = {price: self._curve(format if price else PLAIN, few(rows, most)) for price, rows in by_price.items()}
        plain = curves.pop(DECODED, None)
        return ({} if plain is None else {self.needs.dtype: plain}), curves

    def _price(self, rows: int) -> str:
        """The price of the kernel that multiplies so many rows with packed matrices as they are."""
        needs, runs = self.needs, processor(self.device.torch_device.type).runs
        kernel = None if needs.format == PLAIN else choose(needs.product, needs.format, needs.dtype, runs, rows)
        return DECODED if kernel is None else kernel.price

    def _curve(self, format: str, rows: Iterable[int]) -> Curve:
        matrices = self._matrices(format)
        return tuple((each, self._rate(format, matrices, each)) for each in rows)

    def _rate(self, format: str, matrices: Sequence[Tensor], rows: int) -> float:
        """Flops per second of rows times each of the matrices in turn."""
        outputs, inputs = self._shape
        x = torch.full((rows, inputs), 0.5, dtype=self._dtype, device=self.device.torch_device)

        def multiply(number: int) -> int:
            multiplied(self.needs.product, format, x, matrices[number % len(matrices)], outputs)
            return 2 * rows * outputs * inputs

        with torch.inference_mode():
            multiply(0)
            return max(_best_per_second(self.device, multiply, self.seconds) for _ in range(self.repetitions))

    def _matrices(self, format: str) -> list[Tensor]:
        """The bytes of each."""
        one = sound_bytes(FORMATS[format].nbytes(self._shape, self._dtype.itemsize)).to(self.device.torch_device)
        if FORMATS[format] not in STORED:
            encode(format, torch.empty(self._shape, dtype=self._dtype, device=one.device).uniform_(-0.5, 0.5), one)
        count = max(1, min(2 * self._quarter, WEIGHT_BYTES_AT_LEAST) // one.nbytes)
        return [one, *(one.clone() for _ in range(count - 1))]

    # -- sizes ---------------------------------------------------------------------------------------------------------

    @property
    def _dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.needs.dtype]

    @property
    def _quarter(self) -> int:
        """Bytes for one weight, for the copy that libraries make of it, for activations, and for other weights."""
        return self.needs.memory_bytes // 4

    @property
    def _shape(self) -> tuple[int, int]:
        outputs, inputs = self.needs.weight_shape
        return max(1, min(outputs, self._quarter // (inputs * self._dtype.itemsize))), inputs

    @property
    def _most_rows(self) -> int:
        return min(ROWS_AT_MOST, self._quarter // (sum(self._shape) * self._dtype.itemsize))


def in_order(format: str) -> str:
    """The same format with columns in the order of the inputs: random bytes are no order, and it takes next to no time."""
    found = FORMATS[format]
    return replace(found, ordered=False).name if isinstance(found, Int4) and found.ordered else format


def few(rows: Iterable[int], most: int) -> list[int]:
    """The ends and evenly chosen points between: many prompt lengths make many sizes, and rates between are interpolated."""
    found = sorted(rows)
    return found if len(found) <= most else [found[round(place * (len(found) - 1) / (most - 1))] for place in range(most)]


# -- time ----------------------------------------------------------------------------------------------------------------


def _per_second(action: Callable[[int], int], seconds: float) -> float:
    """The action's returned amounts per second, called with 0, 1, 2 ... for the whole time: the sustained rate, not a burst."""
    begun, done, calls = time.perf_counter(), 0, 0
    while (passed := time.perf_counter() - begun) < seconds or not calls:
        done += action(calls)
        calls += 1
    return done / passed


def _best_per_second(device: Device, action: Callable[[int], int], seconds: float) -> float:
    """Like `_per_second`, but of the best few calls in a row: threads that share their cores with others are slowed down out of
    proportion. An accelerator's calls return early, so its work is awaited."""
    device.settle()
    in_a_row = CALLS_IN_A_ROW * (8 if device.accelerator else 1)
    ends, best, calls = time.perf_counter() + seconds, 0.0, 0
    while (begun := time.perf_counter()) < ends or not calls:
        done = sum(action(calls + call) for call in range(in_a_row))
        device.settle()
        best = max(best, done / (time.perf_counter() - begun))
        calls += in_a_row
    return best


def _best_seconds(device: Device, action: Callable[[], object], repetitions: int) -> float:
    def once() -> float:
        device.settle()
        begun = time.perf_counter()
        action()
        device.settle()
        return time.perf_counter() - begun

    once()
    return min(once() for _ in range(max(2, repetitions)))


# -- the machine in words ------------------------------------------------------------------------------------------------


def describe_machine(device: Device) -> dict[str, object]:
    words = {"cpu": cpu_name(), "cores": cores(), "torch": torch.__version__, "device": device.kind}
    name_of = getattr(torch.get_device_module(device.torch_device), "get_device_name", None)  # the CPU's has none
    return words if name_of is None else {**words, "device": name_of(device.torch_device)}


def cpu_name() -> str:
    """As the system calls it, if it does."""
    named = (name for fact in ("model name", "Hardware") for name in processor_facts(fact) if name)
    return next(named, platform.processor() or platform.machine())
