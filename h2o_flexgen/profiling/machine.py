"""A whole profile: measures every subject in turns and makes a Machine of the figures."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from math import inf
from pathlib import Path

import torch

from h2o_flexgen.core.model_spec import DTYPE_BYTES, usual_dtype
from h2o_flexgen.core.tiers import DEVICE, HOST
from h2o_flexgen.kernels.table import PRODUCT_OPS, prices
from h2o_flexgen.memory.device import Device
from h2o_flexgen.memory.host import available_bytes, give_back_freed
from h2o_flexgen.memory.memories import Memories
from h2o_flexgen.planning.machine import PLAIN_SCORES, VISITS, WITH_SCORES, Curve, Machine
from h2o_flexgen.profiling import attention, moving, products, visits
from h2o_flexgen.profiling.rounds import Taken, measured
from h2o_flexgen.profiling.sizes import FULL, Sizes
from h2o_flexgen.profiling.subject import Clock, OnSubject, Subject, Watch
from h2o_flexgen.quant.codec import MATRIX_FORMS, ROW_FORMS

SLOW_ON_CPU = "float16"
SHARE_OF_MEMORY = 2  # at most half of the free memory is used


def profile(
    device: Device,
    offload_folder: Path,
    name: str,
    dtype: str | None = None,
    sizes: Sizes = FULL,
    on_subject: OnSubject | None = None,
    partial: Path | None = None,
) -> Machine:
    """Measures everything with `dtype`, except for products, which have a curve for every dtype. Nothing stays in the folder.
    The file `partial` holds measurements until the end: if the profile is stopped, the next call continues from there."""
    host_bytes, device_bytes = available_bytes(), device.free_bytes() or 0
    sizes = sizes.within(host_bytes // SHARE_OF_MEMORY)
    dtype = dtype or usual_dtype(device.accelerator)
    watch = Watch(on_subject)
    taken = Taken() if partial is None else Taken.kept_in(partial, f"{dtype} {sizes}")
    try:
        with closing(Memories(device, offload_folder, False)) as memories, ExitStack() as opened, torch.inference_mode():
            disk_bytes = shutil.disk_usage(offload_folder).free
            disk = opened.enter_context(moving.disk(memories, sizes, watch))
            watch.inside("making ready what is measured")
            subjects = [disk, *_subjects(device, offload_folder, dtype, sizes, watch)]
            figures = {kind: _rounded(value) for kind, value in measured(subjects, sizes.rounds, watch, taken).items()}
            del subjects
    finally:
        give_back_freed()
    taken.forget()
    return _machine(name, device, (device_bytes, host_bytes, disk_bytes), figures)


def _subjects(device: Device, folder: Path, dtype: str, sizes: Sizes, watch: Watch) -> Iterator[Subject]:
    clock = Clock(device, sizes.seconds)
    yield from moving.copies(clock, sizes)
    for each in DTYPE_BYTES:
        is_slow = each == SLOW_ON_CPU != dtype and not device.accelerator
        yield from products.plain_products(clock, each, sizes.slow_rows if is_slow else sizes.rows, sizes)
    yield from products.packed_products(clock, dtype, sizes)
    yield products.values(clock, dtype, sizes)
    yield from attention.decode_reading(clock, dtype, sizes)
    plain = [each for each in DTYPE_BYTES if each == dtype or device.accelerator or each != SLOW_ON_CPU]
    yield from attention.decode_computing(clock, tuple(plain), dtype, sizes)
    yield attention.decode_of_short_texts(clock, dtype, sizes)
    yield from attention.prompts(clock, dtype, sizes)
    yield from visits.visits(device, folder, dtype, sizes, watch)


def _machine(name: str, device: Device, free: tuple[int, int, int], figures: Mapping[str, float]) -> Machine:
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
        flops_per_s=_curves(figures, products.PRODUCTS, DTYPE_BYTES),
        attention_bytes_per_s=_rates(figures, attention.READING, (HOST, DEVICE)),
        task_seconds=figures[visits.TASK],
        disk_both=min(2.0, max(1.0, figures[moving.BOTH])),
        **{name: figures[name] for name in visits.KV},
        host_read_per_s=figures[moving.SUM],
        packed_flops_per_s=_curves(figures, products.PACKED_PRODUCTS, prices(*PRODUCT_OPS)),
        decoded_values_per_s=_rates(figures, products.DECODING, MATRIX_FORMS),
        attention_flops_per_s=_rates(figures, attention.COMPUTING, (*DTYPE_BYTES, *ROW_FORMS)),
        unpacked_values_per_s=_rates(figures, attention.UNPACKING, ROW_FORMS),
        head_seconds=figures[attention.HEAD],
        prompt_flops_per_s=_rates(figures, attention.PROMPTS, (PLAIN_SCORES, WITH_SCORES)),
        values_per_s=figures.get(products.VALUES, inf),
        visit_seconds=_rates(figures, visits.VISIT, VISITS),
        **rate,
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
