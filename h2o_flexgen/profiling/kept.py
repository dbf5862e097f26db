"""Saved profiles: a machine is measured once, and every later request gets the saved result. Without one, a machine is known as
far as its memory and its disk say."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path

from h2o_flexgen.core.allowed_values import AUTO
from h2o_flexgen.core.folders import existing_folder
from h2o_flexgen.core.model_spec import DTYPE_BYTES
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.memory.device import Device
from h2o_flexgen.memory.host import available_bytes
from h2o_flexgen.memory.site import site_of
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.machines import machine_file, save_machine, saved_machine
from h2o_flexgen.profiling.apart import profile_apart
from h2o_flexgen.profiling.fingerprint import Fingerprint
from h2o_flexgen.profiling.others import WARNING, Others
from h2o_flexgen.profiling.sizes import QUICK
from h2o_flexgen.profiling.subject import OnSubject

OnNote = Callable[[str], None]


def profiled(
    device: Device,
    offload_folder: Path,
    dtype: str | None = None,
    on_note: OnNote | None = None,
    on_subject: OnSubject | None = None,
) -> Machine:
    """This machine's saved profile, however old: the file says when it was made. Without one, the machine is measured now."""
    note, mark = on_note or (lambda line: None), fingerprint_of(device, offload_folder, dtype)
    try:
        found = saved_machine(mark.name)
    except ValueError as error:
        note(f"{error}; the machine is measured anew")
        found = None
    if found is not None:
        for line in _warnings_of(machine_file(mark.name)):
            note(f"this machine's profile may be off: {line}")
        return found
    note_partial(mark, note)
    note(f"this machine was not measured yet; that takes {QUICK.time_on(device.accelerator)}, once")
    others, host_bytes, device_bytes = Others(), available_bytes(), device.free_bytes() or 0
    machine = profile_apart(device, offload_folder, mark.name, dtype, QUICK, on_subject, partial_file(mark))
    machine = replace(machine, host_bytes=host_bytes, device_bytes=device_bytes)  # without the measuring process's share
    warning = others.warning()
    keep(machine, mark, warning)
    if warning:
        note(warning)
    note(f"this machine's profile is kept in {machine_file(mark.name)}; `python -m h2o_flexgen.profile` measures it at length")
    return machine


def is_profiled(device: Device, offload_folder: Path, dtype: str | None = None) -> bool:
    """True if a profile is saved, so that nobody has to wait for one."""
    return profile_at_hand(device, offload_folder, dtype) is not None


def profile_at_hand(device: Device, offload_folder: Path, dtype: str | None = None) -> Machine | None:
    """This machine's saved profile; None if there is none, or none that can be read."""
    try:
        return saved_machine(fingerprint_of(device, offload_folder, dtype).name)
    except ValueError:  # it is measured anew where one is needed
        return None


def partial_file(mark: Fingerprint) -> Path:
    """The file for measurements of a profile that is not complete."""
    return machine_file(mark.name).with_suffix(".partial")


def note_partial(mark: Fingerprint, note: OnNote) -> None:
    if partial_file(mark).exists():
        note("a profile of this machine was stopped; what it measured at the same sizes is not measured again")


def _warnings_of(file: Path) -> list[str]:
    """The warnings written above a profile when it was made."""
    head = (line.removeprefix("#").strip() for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("#"))
    return [line for line in head if line.startswith(WARNING)]


def fingerprint_of(device: Device, offload_folder: Path, dtype: str | None) -> Fingerprint:
    return Fingerprint.of(device, offload_folder, dtype or site_of(device.kind, device.accelerator).usual_dtype())


def keep(machine: Machine, mark: Fingerprint, warning: str = "") -> Path:
    return save_machine(mark.name, machine, about(mark, warning))


def about(mark: Fingerprint, warning: str = "") -> str:
    """The text above a profile: when it was measured, on what, and how far it can be trusted."""
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime())
    head = f"Measured {when} by `python -m h2o_flexgen.profile`, or by who needed it. Of this machine:"
    return "\n".join([head, *(f"{name}: {value}" for name, value in mark.parts.items()), *filter(None, [warning])])


def this_machine(device: Device, offload_folder: Path, dtype: str, progress: Progress) -> Machine:
    """This machine as its profile was kept, or as it is measured now, which is shown. `dtype` is as it was asked for."""
    progress.stage("profiling this machine, once")
    return profiled(
        device,
        offload_folder,
        None if dtype == AUTO else dtype,
        on_note=progress.note,
        on_subject=lambda title, done, total: progress.stage(title, f"{done}/{total}" if total else ""),
    )


def machine_before_profile(device: Device, offload_folder: Path) -> Machine:
    """This machine as far as it is known without measuring it: its memory. It stands in until a problem is known to make
    sense."""
    return Machine(
        name="this machine",
        device=device.kind,
        device_bytes=device.free_bytes() or 0,
        host_bytes=available_bytes(),
        disk_bytes=shutil.disk_usage(existing_folder(offload_folder)).free,
        disk_read_per_s=inf,
        disk_write_per_s=inf,
        host_copy_per_s=inf,
        host_to_device_per_s=inf,
        device_to_host_per_s=inf,
        flops_per_s=dict.fromkeys(DTYPE_BYTES, ((1, inf),)),
        attention_bytes_per_s={},
        task_seconds=0.0,
    )
