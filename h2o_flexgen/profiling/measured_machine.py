"""A whole profile: measures every subject in turns and makes a Machine of the figures."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
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
from h2o_flexgen.planning.machine import PLAIN_SCORES, VISITS, WITH_SCORES, Curve, Machine
from h2o_flexgen.profiling import attention_rates, moving, products, visits
from h2o_flexgen.profiling.bench import (
    FULL,
    NOW,
    Bench,
    BytePool,
    Clock,
    Now,
    OnSubject,
    ProfileSizes,
    ProfileWatch,
    Stopwatch,
    Subject,
    TimeLimit,
)
from h2o_flexgen.profiling.rounds import RoundsTaken, measured, missing

SHARE_OF_MEMORY = 2  # at most half of the free memory is used
SHARE_OF_DEVICE = 4  # a device's allocator also keeps what was freed, up to three times as much
SHARE_TO_FILL = 0.1  # of the time, for the memory that is measured with
UNSTEADY = 1.5  # times that figures of a round may be better than those of another, before the machine counts as disturbed


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
        host_read_per_s=figures[moving.SUM],
        packed_flops_per_s=_curves(figures, products.PACKED_PRODUCTS, prices(*PRODUCT_OPS)),
        decoded_values_per_s=_rates(figures, products.DECODING, measured_formats()),
        attention_flops_per_s=_rates(figures, attention_rates.COMPUTING, (*DTYPE_BYTES, *ROW_FORMATS)),
        unpacked_values_per_s=_rates(figures, attention_rates.UNPACKING, ROW_FORMATS),
        head_seconds=figures[attention_rates.HEAD],
        prompt_flops_per_s=_rates(figures, attention_rates.PROMPTS, (PLAIN_SCORES, WITH_SCORES)),
        values_per_s=figures.get(products.VALUES, inf),
        visit_seconds=_rates(figures, visits.VISIT, VISITS),
        part_seconds=_rates(figures, visits.PART, VISITS),
        not_measured=not_measured,
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
