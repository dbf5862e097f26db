"""A whole profile: measures every subject in rounds and makes a Machine of the figures.

Every subject is measured once per round, and the median over the rounds counts, or the best round, as the subject says. The
first round finds the sizes; it counts only for what is too slow to be measured again. Measurements are saved as they are made,
so that a stopped profile can continue.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, field, replace
from math import inf
from pathlib import Path

import torch

from h2o_flexgen.core.model_spec import DTYPE_BYTES
from h2o_flexgen.core.site import DEVICE, HOST, Site
from h2o_flexgen.formats.kernel_table import PRODUCT_OPS, measured_formats, prices
from h2o_flexgen.formats.table import ROW_FORMATS
from h2o_flexgen.memory.device import Device, DeviceTier
from h2o_flexgen.memory.host import HostTier, available_bytes, give_back_freed
from h2o_flexgen.memory.memories import Memories, own_site
from h2o_flexgen.planning.machine import BORROWED, CHOOSING, CHOSEN, PLAIN_SCORES, VISITS, WHOLE, WITH_SCORES, Curve, Machine
from h2o_flexgen.profiling import attention_rates, moving, products, visits
from h2o_flexgen.profiling.bench import (
    FULL,
    NOW,
    Bench,
    BytePool,
    Clock,
    Figures,
    Now,
    OnSubject,
    ProfileSizes,
    ProfileWatch,
    Stopwatch,
    Subject,
    TimeLimit,
)

FIRST = 0  # the round that finds the sizes
SLOW = 0.04  # the share of the whole time above which a measurement is not repeated
SHARE_OF_MEMORY = 2  # at most half of the free memory is used
SHARE_OF_DEVICE = 4  # a device's allocator also keeps what was freed, up to three times as much
SHARE_TO_FILL = 0.1  # of the time, for the memory that is measured with
UNSTEADY = 1.5  # times that figures of a round may be better than those of another, before the machine counts as disturbed
Mark = tuple[int, str]  # the round, and the title of the subject


@dataclass(frozen=True)
class Measurement:
    figures: Figures
    size: int
    seconds: float  # that it took, with all that had to be made ready


@dataclass
class RoundsTaken:
    """Measurements by round and subject, including those of a stopped profile if there is a file. Each is written at once, so
    that only the measurement under way is lost however the process ends."""

    file: Path | None = None
    asked: str = ""  # sizes and everything else that figures depend on; lines with another value are ignored
    known: dict[Mark, Measurement] = field(default_factory=dict)

    @classmethod
    def kept_in(cls, file: Path, asked: str) -> RoundsTaken:
        return cls(file, asked, dict(_read(file, asked)))

    def add(self, number: int, title: str, measurement: Measurement) -> None:
        self.known[number, title] = measurement
        if self.file is None:
            return
        line = json.dumps([self.asked, number, title, {**asdict(measurement), "figures": dict(measurement.figures)}])
        with suppress(OSError):  # a folder that cannot be written is reported when the profile is saved
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a", encoding="utf-8") as out:
                out.write(line + "\n")

    def forget(self) -> None:
        """Removes the file when the profile is complete."""
        if self.file is not None:
            with suppress(OSError):
                self.file.unlink()

    def unsteadiness(self, titles: Iterable[str]) -> float:
        """How many times better figures were in their best round than in their worst: of those measured more than once, the
        tenth that changed most changed by so much or more."""
        found = []
        for each in ([*self.figures(title)] for title in titles):
            if len(each) > 1:
                shared = set(each[0]).intersection(*each)  # an earlier version may have measured less
                found += [max(values) / min(values) for name in shared if min(values := [one[name] for one in each]) > 0]
        return sorted(found)[len(found) * 9 // 10] if found else 1.0

    def figures(self, title: str) -> Iterator[Figures]:
        """The figures that count: those of the first round only if there are no others."""
        rounds = sorted(number for number, known in self.known if known == title)
        yield from (self.known[number, title].figures for number in (rounds[1:] if rounds[1:] else rounds))


def _read(file: Path, asked: str) -> Iterator[tuple[Mark, Measurement]]:
    """Reads measurements, skipping a last line that was cut off."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in lines:
        with suppress(ValueError, TypeError, AttributeError, KeyError):
            of, number, title, found = json.loads(line)
            if of == asked:
                figures = {str(name): float(value) for name, value in found["figures"].items()}
                yield (int(number), str(title)), Measurement(figures, int(found["size"]), float(found["seconds"]))


def measured(
    subjects: Sequence[Subject],
    rounds: int,
    limit: TimeLimit | None = None,
    watch: ProfileWatch | None = None,
    taken: RoundsTaken | None = None,
) -> dict[str, float]:
    """Measures all subjects in turns, as often as the limit allows, and so many rounds at most. Measurements in `taken` are
    not repeated. Points of curves for which there was no time are missing."""
    return Rounds(
        subjects, rounds, limit or TimeLimit(float("inf")), watch or ProfileWatch(), taken or RoundsTaken()
    ).measured()


@dataclass(eq=False)
class Rounds:
    subjects: Sequence[Subject]
    rounds: int
    limit: TimeLimit
    watch: ProfileWatch
    taken: RoundsTaken
    _warm: set[str] = field(default_factory=set)  # titles of what this process has measured
    _last: dict[str, Measurement] = field(default_factory=dict)

    def measured(self) -> dict[str, float]:
        self.watch.total = (1 + self.rounds) * len(self.subjects)
        for number in range(1 + self.rounds):
            self._round(number)
        figures: dict[str, float] = {}
        for subject in self.subjects:
            each = defaultdict[str, list[float]](list)
            for one in self.taken.figures(subject.title):
                for name, value in one.items():
                    each[name].append(value)
            figures |= {name: subject.of_rounds(values) for name, values in each.items()}
        return figures

    def _round(self, number: int) -> None:
        whole = sum(subject.weight for subject in self.subjects)
        to_do = whole
        for place, subject in enumerate(self.subjects):
            self.watch.done = number * len(self.subjects) + place
            share = self.limit.share(subject.weight, to_do + whole * (self.rounds - number) * (number > FIRST))
            if number == FIRST:
                self._first(subject, share)
            else:
                self._again(number, subject, self.limit.left if self._rest_fits(place) else share)
            to_do -= subject.weight

    # -- the first round -------------------------------------------------------------------------------------------------

    def _first(self, subject: Subject, seconds: float) -> None:
        known = self.taken.known.get((FIRST, subject.title))
        if known is None and self._has_time(subject, seconds):
            self.watch.begin(subject.title)
            known = self._at_its_size(subject, seconds)
            self.taken.add(FIRST, subject.title, known)
        if known is not None:
            self._last[subject.title] = known

    def _has_time(self, subject: Subject, seconds: float) -> bool:
        """Points take as long as the point before tells, and without that one they are not tried."""
        if not subject.behind:
            return True
        before = self._last.get(subject.behind)
        return before is not None and before.seconds * subject.sizes[0] / before.size <= seconds

    def _at_its_size(self, subject: Subject, seconds: float) -> Measurement:
        """Measures at the smallest size, and then at the largest that should fit in what is left of the seconds."""
        ends = self.limit.now() + seconds
        found = self._measured(subject, subject.sizes[0])
        if len(subject.sizes) > 1 and 2 * found.seconds <= seconds:
            found = self._measured(subject, found.size)  # without what only a first call takes
        while True:
            left = min(ends - self.limit.now(), subject.enough)
            larger = [size for size in subject.sizes if size > found.size and found.seconds * size / found.size <= left]
            if not larger:
                return found
            found = self._measured(subject, larger[-1])

    # -- the others ------------------------------------------------------------------------------------------------------

    def _rest_fits(self, place: int) -> bool:
        """Whether there is time for all that is not slow and still to come in this round."""
        last = (self._last.get(subject.title) for subject in self.subjects[place:])
        return sum(2 * one.seconds for one in last if one is not None and one.seconds <= self._slow) <= self.limit.left

    @property
    def _slow(self) -> float:
        return SLOW * self.limit.seconds

    def _again(self, number: int, subject: Subject, seconds: float) -> None:
        last = self._last.get(subject.title)
        if last is None or (number, subject.title) in self.taken.known:
            return
        cold = subject.title not in self._warm  # what another process has measured: threads and libraries start here once more
        if (1 + cold) * last.seconds > min(seconds, self._slow):
            return
        self.watch.begin(subject.title)
        if cold:
            self._measured(subject, last.size)
        self._last[subject.title] = found = self._measured(subject, last.size)
        self.taken.add(number, subject.title, found)

    def _measured(self, subject: Subject, size: int) -> Measurement:
        begun = self.limit.now()
        figures = subject.measure(size)
        self._warm.add(subject.title)
        return Measurement(figures, size, self.limit.now() - begun)


def missing(subjects: Sequence[Subject], figures: Mapping[str, float]) -> list[str]:
    """The figures of points for which there was no time."""
    return [subject.figure for subject in subjects if subject.figure and subject.figure not in figures]


def profile(
    device: Device,
    offload_folder: Path,
    name: str,
    dtype: str | None = None,
    sizes: ProfileSizes = FULL,
    on_subject: OnSubject | None = None,
    partial: Path | None = None,
    now: Now = NOW,
) -> Machine:
    """Measures everything for one type of values, in the seconds that the sizes allow. Nothing stays in the folder. The file
    `partial` holds measurements until the end: if the profile is stopped, the next call continues from there."""
    stopwatch = Stopwatch(now)
    limit = TimeLimit(sizes.budget_seconds, stopwatch)
    host_bytes, device_bytes = available_bytes(), device.free_bytes() or 0
    sizes = sizes.within(host_bytes // SHARE_OF_MEMORY)
    if device_bytes:
        sizes = sizes.within(device_bytes // SHARE_OF_DEVICE)
    dtype = dtype or own_site(device.kind, device.accelerator).usual_dtype()
    watch = ProfileWatch(on_subject)
    taken = RoundsTaken() if partial is None else RoundsTaken.kept_in(partial, f"{dtype} {sizes}")
    try:
        with closing(Memories(device, offload_folder)) as memories, ExitStack() as opened, torch.inference_mode():
            disk_bytes = shutil.disk_usage(offload_folder).free
            disk = opened.enter_context(moving.disk(memories, sizes, stopwatch, watch))
            watch.inside("making ready what is measured")
            subjects = [disk, *_subjects(memories, dtype, sizes, stopwatch, limit, watch)]
            figures = {kind: _rounded(value) for kind, value in measured(subjects, sizes.rounds, limit, watch, taken).items()}
            not_measured = _told(missing(subjects, figures), figures)
            unsteadiness = taken.unsteadiness(subject.title for subject in subjects)
            del subjects
    finally:
        device.give_back_freed()
        give_back_freed()
    taken.forget()
    machine = _machine(name, device, (device_bytes, host_bytes, disk_bytes), figures, not_measured)
    disturbed = f"figures changed by a factor of {unsteadiness:.1f} from one round to the next"
    return replace(machine, disturbed=(disturbed,)) if unsteadiness > UNSTEADY else machine


def _subjects(
    memories: Memories, dtype: str, sizes: ProfileSizes, stopwatch: Stopwatch, limit: TimeLimit, watch: ProfileWatch
) -> Iterator[Subject]:
    """Products come last, since those of many rows take what is left of the time."""
    device, folder = memories.device, memories.disk.folder
    bench, host = _benches(device, sizes, stopwatch, limit)
    dtypes = measured_dtypes(dtype, own_site(device.kind, device.accelerator))
    sizes = sizes.in_pool(min(bench.pool.nbytes, host.pool.nbytes), max(DTYPE_BYTES[each] for each in dtypes))
    yield from moving.copies(bench, host, sizes, memories.host)
    yield from visits.visits(bench, host, folder, dtype, sizes, watch)
    yield from attention_rates.decode_reading({HOST: host, **({DEVICE: bench} if device.accelerator else {})}, dtype, sizes)
    yield from attention_rates.decode_computing(bench, dtypes, dtype, sizes)
    yield attention_rates.decode_of_short_texts(bench, dtype, sizes)
    yield from attention_rates.latents(bench, dtype, sizes)
    yield from attention_rates.prompts(bench, dtype, sizes)
    yield products.values(bench, dtype, sizes)
    yield from products.decoding(bench, dtype, sizes)
    yield from products.curves(bench, dtypes, dtype, sizes)


def _benches(device: Device, sizes: ProfileSizes, stopwatch: Stopwatch, limit: TimeLimit) -> tuple[Bench, Bench]:
    """Those of the device that computes and of the CPU, which may be the same."""
    host = _bench(Device(), HostTier(), sizes, stopwatch, limit)
    return (_bench(device, device.memory(HostTier()), sizes, stopwatch, limit) if device.accelerator else host), host


def _bench(device: Device, memory: HostTier | DeviceTier, sizes: ProfileSizes, stopwatch: Stopwatch, limit: TimeLimit) -> Bench:
    filling = TimeLimit(limit.left * SHARE_TO_FILL, stopwatch)
    return Bench(Clock(device, sizes.seconds, stopwatch), BytePool.filled(memory, sizes.pool_bytes, filling))


def measured_dtypes(dtype: str, site: Site) -> tuple[str, ...]:
    """The types of products: that of the job alone; on an accelerator all types of 16 bits that it has instructions for, as
    which of them is taken there by itself depends on the checkpoint."""
    return tuple(dict.fromkeys((dtype, *(site.processor.instructions if site.accelerator else ()))))


def _told(unknown: Sequence[str], figures: Mapping[str, float]) -> tuple[str, ...]:
    """What is said of products for which there was no time. Pricing takes the rate of the most rows for all that are more."""
    lines = []
    for kind, of in ((products.PRODUCTS, tuple(DTYPE_BYTES)), (products.PACKED_PRODUCTS, prices(*PRODUCT_OPS))):
        known = _curves(figures, kind, of)
        for each in _curves(dict.fromkeys(unknown, 0.0), kind, of):
            rows = known[each][-1][0]
            lines.append(
                f"products of {each} with more rows than {rows}: too slow to be measured in time, taken as with {rows}"
            )
    return tuple(lines)


def _machine(
    name: str, device: Device, free: tuple[int, int, int], figures: Mapping[str, float], not_measured: tuple[str, ...]
) -> Machine:
    device_bytes, host_bytes, disk_bytes = free
    copy = figures[moving.COPY]
    rate = {field: figures.get(field, copy) for pair in moving.LINKS.values() for field in pair}  # without a link: a host copy
    return Machine(
        name=name,
        device=device.kind,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
        disk_read_per_s=figures[moving.READ],
        disk_write_per_s=figures[moving.WRITE],
        host_copy_per_s=copy,
        host_to_device_per_s=rate["host_to_device_per_s"],
        device_to_host_per_s=rate["device_to_host_per_s"],
        unpinned_to_device_per_s=rate["unpinned_to_device_per_s"],
        unpinned_to_host_per_s=rate["unpinned_to_host_per_s"],
        flops_per_s=_curves(figures, products.PRODUCTS, DTYPE_BYTES),
        attention_bytes_per_s=_rates(figures, attention_rates.READING, (HOST, DEVICE)),
        task_seconds=figures[visits.TASK],
        disk_both=min(2.0, max(1.0, figures[moving.BOTH])),
        reads_beside_computing=figures.get(moving.READS_BESIDE, 1.0),
        computing_beside_reads=figures.get(moving.COMPUTING_BESIDE, 1.0),
        kv_read_per_s=figures["kv_read_per_s"],
        kv_write_per_s=figures["kv_write_per_s"],
        small_reads_per_s=figures.get(moving.SMALL_READS, Machine.small_reads_per_s),  # a profile that goes on may lack them
        small_writes_per_s=figures.get(moving.SMALL_WRITES, Machine.small_writes_per_s),
        host_read_per_s=figures[moving.SUM],
        packed_flops_per_s=_curves(figures, products.PACKED_PRODUCTS, prices(*PRODUCT_OPS)),
        decoded_values_per_s=_rates(figures, products.DECODING, measured_formats()),
        attention_flops_per_s=_rates(figures, attention_rates.COMPUTING, (*DTYPE_BYTES, *ROW_FORMATS)),
        unpacked_values_per_s=_rates(figures, attention_rates.UNPACKING, ROW_FORMATS),
        latents_flops_per_s=_curves(figures, attention_rates.LATENTS, (WHOLE, CHOOSING, CHOSEN)),
        head_seconds=figures[attention_rates.HEAD],
        prompt_flops_per_s=_rates(figures, attention_rates.PROMPTS, (PLAIN_SCORES, WITH_SCORES)),
        values_per_s=figures.get(products.VALUES, inf),
        visit_seconds=_rates(figures, visits.VISIT, VISITS),
        part_seconds=_rates(figures, visits.PART, VISITS),
        not_measured=not_measured,
        borrowed=tuple(name for name in BORROWED if name not in figures),
    )


def _rates(figures: Mapping[str, float], kind: str, of: Iterable[str]) -> dict[str, float]:
    return {each: figures[f"{kind} {each}"] for each in of if f"{kind} {each}" in figures}


def _curves(figures: Mapping[str, float], kind: str, of: Iterable[str]) -> dict[str, Curve]:
    curves = {}
    for each in of:
        start = f"{kind} {each} "
        points = {int(figure[len(start) :]): rate for figure, rate in figures.items() if figure.startswith(start)}
        if points:
            curves[each] = tuple((rows, points[rows]) for rows in sorted(points))
    return curves


def _rounded(value: float) -> float:
    """Rounds to as many digits as a measurement is worth."""
    return float(f"{value:.4g}")
