"""The work of the profile command: measures this machine, keeps the profile, and reports it in lines, each figure with its
unit."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from math import isfinite

from h2o_flexgen.cli.profile_request import ProfileRequest
from h2o_flexgen.cli.terminal import say, say_document
from h2o_flexgen.core.site import on_tier
from h2o_flexgen.core.units import format_bytes
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.engine.resources import set_threads
from h2o_flexgen.memory.device import open_device
from h2o_flexgen.planning.machine import CHOOSING, CHOSEN, PLAIN_SCORES, WHOLE, WITH_SCORES, Curve, Machine, machine_file
from h2o_flexgen.profiling.bench import FULL, QUICK
from h2o_flexgen.profiling.busy_cores import Others
from h2o_flexgen.profiling.measured_machine import profile
from h2o_flexgen.profiling.profile_cache import about, fingerprint_of, keep, note_partial, partial_file, told_of_disturbance

WIDTH, COLUMN = 46, 10
SCORES = {PLAIN_SCORES: "all kept", WITH_SCORES: "scored, to evict"}
LATENTS = {WHOLE: "latents, all", CHOOSING: "latents, choosing", CHOSEN: "latents, the chosen"}


def work(request: ProfileRequest) -> None:
    request.site.refuse_unusable_folder()
    with Progress(0, "profile") as progress:
        set_threads(request.site.threads)
        folder = request.site.offload_folder
        device, dtype, file = open_device(request.site.device), request.dtype, request.file
        sizes = QUICK if request.quick else FULL
        mark, begun, others = fingerprint_of(device, folder, dtype), time.perf_counter(), Others(folder)
        note_partial(mark, progress.note)
        progress.note(f"measuring this machine takes {sizes.time_on(device.accelerator)}")
        machine = profile(
            device,
            folder,
            mark.name,
            dtype,
            sizes,
            lambda title, done, total: progress.stage(title, f"{done}/{total}" if total else ""),
            partial_file(mark),
        )
        seconds = time.perf_counter() - begun
        machine = keep(replace(machine, disturbed=(*machine.disturbed, *others.disturbances())), mark)
        kept = machine_file(mark.name)
        if file is not None:
            machine = replace(machine, name=file.stem)
            machine.save(file, about(mark))
    say(machine_lines(machine))
    say(["", f"measured in {seconds:.0f} s and kept in {kept}" + (f", and written to {file}" if file else "")])
    say([told_of_disturbance(machine)] if machine.disturbed else [])
    say_document({"profile": asdict(machine), "seconds": round(seconds, 1), "kept": str(kept)})


def machine_lines(machine: Machine) -> Iterator[str]:
    yield from (f"{what + ' ':.<{WIDTH}} {value}" for what, value in _figures(machine) if value)
    yield ""
    yield from _curve_lines({**machine.flops_per_s, **machine.packed_flops_per_s})
    yield from machine.not_measured


def _figures(machine: Machine) -> Iterator[tuple[str, str]]:
    yield "computes on", machine.device
    yield "GPU memory, free", format_bytes(machine.device_bytes) if machine.has_accelerator else ""
    yield "CPU memory, free", format_bytes(machine.host_bytes)
    yield "disk, free", format_bytes(machine.disk_bytes)
    yield "disk, reads", _bytes(machine.disk_read_per_s)
    yield "disk, writes", _bytes(machine.disk_write_per_s)
    yield "disk, reads and writes at once", f"{machine.disk_both:.2f} of the two rates' 2"
    if not machine.has_accelerator:
        yield "disk, reads beside computing", f"{machine.reads_beside_computing:.2f} of their rate"
        yield "computing beside reads", f"{machine.computing_beside_reads:.2f} of its rate"
    yield "KV on disk, reads", _bytes(machine.kv_read_per_s)
    yield "KV on disk, writes", _bytes(machine.kv_write_per_s)
    yield "disk, single pages read", f"{machine.small_reads_per_s:,.0f} a second"
    yield "disk, single pages written", f"{machine.small_writes_per_s:,.0f} a second"
    yield "CPU memory, copies", _bytes(machine.host_copy_per_s)
    yield "CPU memory, reads", _bytes(machine.host_read_per_s)
    if machine.has_accelerator:
        yield "CPU to GPU, page-locked", _bytes(machine.host_to_device_per_s)
        yield "CPU to GPU, pageable", _bytes(machine.unpinned_to_device_per_s)
        yield "GPU to CPU, page-locked", _bytes(machine.device_to_host_per_s)
        yield "GPU to CPU, pageable", _bytes(machine.unpinned_to_host_per_s)
    for tier, rate in machine.attention_bytes_per_s.items():
        yield f"attention of a step, {on_tier(tier)}, KV read", _bytes(rate)
    for kept, rate in machine.attention_flops_per_s.items():
        yield f"attention of a step, KV in {kept}", _flops(rate)
    for codec, rate in machine.unpacked_values_per_s.items():
        yield f"attention of a step, {codec} unpacked", _values(rate)
    for part, curve in machine.latents_flops_per_s.items():
        yield from ((f"{LATENTS[part]}, {queries} query heads", _flops(rate)) for queries, rate in curve)
    yield "attention of a step, a row's head beside it", _seconds(machine.head_seconds)
    for kind, rate in machine.prompt_flops_per_s.items():
        yield f"attention of prompts, {SCORES[kind]}", _flops(rate)
    for codec, rate in machine.decoded_values_per_s.items():
        yield f"decoding {codec}", _values(rate)
    yield "norms, activations, additions", _values(machine.values_per_s)
    for kind, seconds in machine.visit_seconds.items():
        yield f"a visit of {kind}, beside its work", _seconds(seconds)
    for kind, seconds in machine.part_seconds.items():
        yield f"a further part of {kind}, beside its work", _seconds(seconds)
    yield "a read, beside its bytes", _seconds(machine.task_seconds)


def _curve_lines(curves: Mapping[str, Curve]) -> Iterator[str]:
    """A line for each number of rows, with a column for each curve."""
    points = {kind: (dict(curve), max(COLUMN, 2 + len(kind))) for kind, curve in curves.items()}
    yield "products, GFLOP/s" + "".join(kind.rjust(width) for kind, (_, width) in points.items())
    for rows in sorted({rows for curve, _ in points.values() for rows in curve}):
        figures = (f"{curve[rows] / 1e9:.1f}" if rows in curve else "" for curve, _ in points.values())
        cells = (figure.rjust(width) for figure, (_, width) in zip(figures, points.values()))
        yield f"{rows:>6} row{'s' if rows > 1 else ' '}      " + "".join(cells).rstrip()


def _bytes(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s" if isfinite(rate) else ""


def _flops(rate: float) -> str:
    return f"{rate / 1e9:.1f} GFLOP/s" if isfinite(rate) else ""


def _values(rate: float) -> str:
    return f"{rate / 1e9:.2f} billion values/s" if isfinite(rate) else ""


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs"
