"""The bench of a profile: sizes, time, memory and a clock for what is measured, and the subjects that are measured on it."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor

from h2o_flexgen.core.buffer_layout import ALIGNMENT
from h2o_flexgen.core.units import format_bytes
from h2o_flexgen.memory.device import Device, DeviceTier
from h2o_flexgen.memory.host import HostTier

Now = Callable[[], float]  # the seconds that a clock shows
NOW: Now = time.perf_counter


@dataclass
class Stopwatch:
    """A clock that can be stopped."""

    now: Now = NOW
    left_out: float = 0.0

    def __call__(self) -> float:
        return self.now() - self.left_out

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """What is done here takes no time."""
        begun = self.now()
        try:
            yield
        finally:
            self.left_out += self.now() - begun


@dataclass(frozen=True)
class TimeLimit:
    seconds: float
    now: Now = NOW
    _begun: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_begun", self.now())

    @property
    def left(self) -> float:
        return max(0.0, self.seconds - (self.now() - self._begun))

    def share(self, weight: float, of: float) -> float:
        """The seconds for something of this weight, if all that is left to do has the weight `of`."""
        return self.left * weight / of


MIB = 1 << 20
SHRINKS = 6  # at most, each halving the sizes, if memory is short


@dataclass(frozen=True)
class ProfileSizes:
    budget_seconds: float = 110.0  # for everything, with what has to be made ready
    rounds: int = 9  # everything is measured once in each, since a machine changes from minute to minute
    seconds: float = 0.05  # per measurement, or longer if a single call takes longer
    disk_seconds: float = 0.3
    disk_bytes: int = 1024 * MIB
    pool_bytes: int = 256 * MIB  # of weights and KV that are used in turn, more than a cache holds
    copied_bytes: int = 128 * MIB  # over a link
    side: int = 4096  # of a weight
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    heads: int = 32
    head_dim: int = 128
    kv_rows: int = 32
    slots: int = 512
    queries_per_key: int = 4  # for decode attention bound by computing
    prompt_len: int = 512
    prompt_tokens: int = 1024  # of prompts at once
    width: int = 2048  # of the layers for which values are counted
    steps: int = 12  # of the tiny model

    def time_on(self, accelerator: bool) -> str:
        """How long a profile takes, for people."""
        return f"{self.budget_seconds:.0f} s at most" + ", and the time to compile kernels for the GPU" * accelerator

    @property
    def memory_bytes(self) -> int:
        """The most memory held at once, roughly: the pool, the rows of a product and what comes of them, prompts, layers of
        values, KV on its way to the disk, page-locked memory, and what is read from disk."""
        rows = 3 * 4 * max(self.rows) * self.side
        prompts = 4 * 4 * self.prompt_tokens * self.heads * self.head_dim
        values = 24 * 4 * self.prompt_tokens * self.width
        kv = 4 * 2 * 4 * self.kv_rows * self.slots // 2 * self.width
        return self.pool_bytes + max(rows, prompts, values, kv) + self.copied_bytes + min(self.disk_bytes, 64 * MIB)

    def within(self, nbytes: int) -> ProfileSizes:
        """Smaller sizes, if there is little memory."""
        sizes = self
        for _ in range(SHRINKS):
            if sizes.memory_bytes <= nbytes:
                return sizes
            sizes = replace(
                sizes,
                pool_bytes=sizes.pool_bytes // 2,
                copied_bytes=sizes.copied_bytes // 2,
                kv_rows=max(1, sizes.kv_rows // 2),
                side=max(64, sizes.side // 2),
                width=max(64, sizes.width // 2),
            )
        raise ValueError(
            f"a profile needs {format_bytes(sizes.memory_bytes)} of memory, but {format_bytes(nbytes)} may be taken; free some"
        )

    def in_pool(self, nbytes: int, itemsize: int) -> ProfileSizes:
        """Sizes of matrices and of KV for which a pool of so many bytes is large enough."""
        side, rows = self.side, self.kv_rows
        while side > 64 and 2 * itemsize * side**2 > nbytes:
            side //= 2
        while rows > 1 and 2 * itemsize * self.heads * self.head_dim * self.slots * rows > nbytes:
            rows //= 2
        return replace(self, side=side, kv_rows=rows)


FULL = ProfileSizes()
QUICK = ProfileSizes(25.0, rounds=2, seconds=0.03, disk_seconds=0.2, disk_bytes=256 * MIB, rows=(1, 4, 16, 64, 256, 1024))


LEAST_BYTES = 1 << 20
SMALLEST, LARGEST = 0.02, 0.5  # of the values: far from what a type with few bits takes for zero or for infinity


@dataclass(frozen=True, eq=False)
class BytePool:
    """The memory that everything is measured with. It is filled once, with bytes that are sound values of every type
    and of every packed format, and each measurement takes them for what it needs. Memory that a process touches for the
    first time is ten times as slow as any other, so a part of its own for each measurement would take longer than all
    measurements."""

    data: Tensor  # (bytes,)

    @classmethod
    def filled(cls, memory: HostTier | DeviceTier, nbytes: int, limit: TimeLimit) -> BytePool:
        """As many bytes as can be filled in the limit, `nbytes` at most."""
        data, done = memory.alloc(nbytes)[:nbytes], min(nbytes, LEAST_BYTES)
        data[:done].copy_(sound_bytes(done))
        while done < nbytes:
            before, step = limit.left, min(done, nbytes - done)
            data[done : done + step].copy_(data[:step])
            done, after = done + step, limit.left
            if 2 * (before - after) > after:
                break
        return cls(data[:done])

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def view(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The first bytes as values."""
        return self.data[: prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def in_turn(self, nbytes: int) -> Iterator[Tensor]:
        """An endless series of ranges of so many bytes, each after the last; together they are more than a cache holds."""
        step = -(-nbytes // ALIGNMENT) * ALIGNMENT
        starts = range(0, max(step, self.nbytes - nbytes + 1), step)
        return itertools.cycle([self.data[start : start + nbytes] for start in starts])

    def halves(self) -> tuple[Tensor, Tensor]:
        half = self.nbytes // 2 // ALIGNMENT * ALIGNMENT
        return self.data[:half], self.data[half : 2 * half]


def sound_bytes(nbytes: int) -> Tensor:
    """Random values in bfloat16. Two neighbours are a value in float32 with the size of the second, and in float16 they
    are values about 1."""
    count = -(-nbytes // 2)
    sizes = torch.rand(count).mul_(LARGEST - SMALLEST).add_(SMALLEST)
    signs = torch.randint(0, 2, (count,)).mul_(2).sub_(1)
    return (sizes * signs).to(torch.bfloat16).view(torch.uint8)[:nbytes]


CALLS_AT_ONCE = 8  # given to an accelerator before it is awaited
ENOUGH = 0.5  # seconds of a measurement that does not have to be longer
OnSubject = Callable[[str, int, int], None]  # subject, measurements done, measurements in all
Figures = Mapping[str, float]
OfRounds = Callable[[Sequence[float]], float]


@dataclass(frozen=True)
class Subject:
    """It is measured at the largest of its sizes for which there is time. A point of a curve has one size: if there is no time
    for it, its figure stays unknown. All others, and the first point of a curve, are measured whatever it takes.

    Of several rounds the best counts where other processes can only make a figure worse: rates of computing and copying. The
    middle counts for a disk, as its rate changes, and for differences and ratios, which a disturbance changes either way."""

    title: str  # for people
    measure: Callable[[int], Figures]  # figures by name, at a size
    sizes: tuple[int, ...] = (1,)  # smallest first; what is measured takes longer in proportion
    enough: float = ENOUGH  # seconds of a measurement above which no larger size is tried
    weight: float = 1.0  # its part of the time of a profile, as against others'
    figure: str = ""  # of a point
    behind: str = ""  # the title of the point before it, which tells how long this one will take
    of_rounds: OfRounds = statistics.median  # what counts of several rounds


@dataclass
class ProfileWatch:
    """Reports how far a profile is; a long subject also reports progress inside it."""

    on_subject: OnSubject | None = None
    total: int = 0  # measurements
    done: int = 0
    title: str = ""

    def begin(self, title: str) -> None:
        self.title = title
        self._tell(title)

    def inside(self, text: str) -> None:
        self._tell(f"{self.title}, {text}" if self.title else text)

    def _tell(self, text: str) -> None:
        if self.on_subject is not None:
            self.on_subject(text, self.done, self.total)


@dataclass(frozen=True)
class Clock:
    """Measures a call: the median of calls in a row, or on an accelerator of groups of calls."""

    device: Device
    seconds: float
    now: Stopwatch = field(default_factory=Stopwatch)

    def of(self, action: Callable[[], object]) -> float:
        at_once = CALLS_AT_ONCE if self.device.accelerator else 1
        taken: list[float] = []
        if self.device.accelerator:
            self.make_ready(action)
        self.device.settle()
        ends = self.now() + self.seconds
        while not taken or self.now() < ends:
            begun = self.now()
            for _ in range(at_once):
                action()
            self.device.settle()
            taken.append((self.now() - begun) / at_once)
        return statistics.median(taken)

    def make_ready(self, action: Callable[[], object]) -> None:
        """A first call on an accelerator, which takes seconds where its kernels have to be compiled: once for all runs to come,
        so that it counts neither as what a call takes nor as time of the profile."""
        with self.now.stopped():
            action()
            self.device.settle()


@dataclass(frozen=True)
class Bench:
    """A place to measure at: a device, with a clock for it, and memory there."""

    clock: Clock
    pool: BytePool

    @property
    def device(self) -> Device:
        return self.clock.device

    def rate(self, title: str, figure: str, work: float, action: Callable[[], object]) -> Subject:
        """A subject with one figure: so much work by the seconds of a call."""
        return Subject(title, lambda _: {figure: work / self.clock.of(action)}, of_rounds=max)
