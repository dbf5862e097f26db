"""Saved profiles: a machine is measured once, and every later request gets the saved result, wherever the fingerprint is the
same: all that a profile depends on.

Profiles are measured in a process of their own. Measuring takes gigabytes and leaves a heap that the C library does not
free: it should neither count as memory of the run that comes next, nor change what fits beside it. The process reads its
task as JSON, reports progress line by line, and ends with the machine or with an error.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from math import inf
from pathlib import Path
from typing import IO, Any

import psutil
import torch

from h2o_flexgen.core.environment import existing_folder
from h2o_flexgen.core.files import local_path
from h2o_flexgen.core.interrupted import raised_again
from h2o_flexgen.core.model_spec import DTYPE_BYTES
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.formats.kernel_sizes import shared
from h2o_flexgen.formats.kernel_table import CPU
from h2o_flexgen.kernels.native import in_use, processor
from h2o_flexgen.memory.device import Device, open_device
from h2o_flexgen.memory.host import available_bytes, shortage_of
from h2o_flexgen.memory.memories import own_site
from h2o_flexgen.planning.machine import Machine, machine_file, save_machine, saved_machine
from h2o_flexgen.profiling.bench import QUICK, OnSubject, ProfileSizes
from h2o_flexgen.profiling.busy_cores import Others, is_quiet
from h2o_flexgen.profiling.measure import describe_machine
from h2o_flexgen.profiling.measured_machine import profile

START = """\
import json, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches both processes; this one ends when told to
asked = json.loads(sys.stdin.readline())
sys.path[:] = asked.pop("path")
from h2o_flexgen.profiling.profile_cache import answer
sys.exit(answer(**asked))
"""
SECONDS_BETWEEN_LINES = 0.2  # inside a measurement, so that reading them does not disturb it
TOLD_ERRORS: dict[str, type[Exception]] = {"ValueError": ValueError, "MemoryError": MemoryError, "OSError": OSError}
STOPPED = 1


def profile_apart(
    device: Device,
    offload_folder: Path,
    name: str,
    dtype: str | None,
    sizes: ProfileSizes,
    on_subject: OnSubject | None = None,
    partial: Path | None = None,
) -> Machine:
    """Profiles in another process, which ends when this call does, also if this call fails."""
    asked = {
        "path": sys.path,
        "device": str(device.torch_device),
        "folder": str(offload_folder.absolute()),
        "name": name,
        "dtype": dtype,
        "sizes": asdict(sizes),
        "threads": torch.get_num_threads(),
        "partial": None if partial is None else str(partial),
    }
    with _started(asked) as process:
        assert process.stdout is not None
        for line in process.stdout:
            kind, *words = json.loads(line)
            if kind == "machine":
                return Machine.create(words[0])
            if kind == "error":
                raise TOLD_ERRORS[words[0]](words[1])
            if on_subject is not None:
                on_subject(*words)
        status = process.wait()
    raise ValueError(
        f"measuring this machine ended with status {status}; free some memory, or name a machine with --machine "
        "(what was measured is kept, and the next call continues from there)"
    )


@contextmanager
def _started(asked: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", START]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8") as process:
        try:
            assert process.stdin is not None
            with suppress(BrokenPipeError), process.stdin as stdin:
                stdin.write(json.dumps(asked) + "\n")
            yield process
        finally:
            process.terminate()  # has no effect on one that has ended
            process.wait()


def answer(
    device: str, folder: str, name: str, dtype: str | None, sizes: dict[str, Any], threads: int, partial: str | None
) -> int:
    """The other process's work. It ends when told to, or when its output is no longer read."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    out = sys.stdout
    sys.stdout = sys.stderr  # for anything that libraries print
    torch.set_num_threads(threads)
    given: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in sizes.items()}
    place = None if partial is None else Path(partial)
    try:
        with raised_again():
            machine = profile(open_device(device), Path(folder), name, dtype, ProfileSizes(**given), _telling(out), place)
        _tell_the_last(out, "machine", machine.as_plain())
        return 0
    except (KeyboardInterrupt, BrokenPipeError):
        pass
    except tuple(TOLD_ERRORS.values()) as error:
        _tell_the_last(out, "error", next(kind for kind, one in TOLD_ERRORS.items() if isinstance(error, one)), str(error))
    except RuntimeError as error:  # torch's lack of memory is none of these
        if (shortage := shortage_of(error)) is None:
            raise
        _tell_the_last(out, "error", MemoryError.__name__, shortage.reason)
    return STOPPED


def _tell_the_last(out: IO[str], *words: object) -> None:
    """Sends the last line, after which the reader may end this process: nothing has to be cleaned up."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _say(out, *words)


def _telling(out: IO[str]) -> Callable[[str, int, int], None]:
    last = [-1, 0.0]  # the count that was reported last, and when

    def tell(title: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done != last[0] or now - last[1] > SECONDS_BETWEEN_LINES:
            last[:] = done, now
            _say(out, "subject", title, done, total)

    return tell


def _say(out: IO[str], *words: object) -> None:
    print(json.dumps(words), file=out, flush=True)


GB = 10**9
VERSION = 4  # of what is measured, and of what a profile says of it: profiles of another version are measured anew
UNKNOWN = "unknown"
LIMITS = (
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "MKL_ENABLE_INSTRUCTIONS",
)  # read by the libraries that torch multiplies with


@dataclass(frozen=True)
class Fingerprint:
    """`name` tells people which machine it is; a digest of all parts ends it."""

    parts: Mapping[str, str]

    @classmethod
    def of(cls, device: Device, offload_folder: Path, dtype: str) -> Fingerprint:
        words = describe_machine(device)
        return cls(
            {
                "cpu": str(words["cpu"]),
                "cores": str(words["cores"]),
                "threads": str(torch.get_num_threads()),
                "memory": f"{round(psutil.virtual_memory().total / GB)} GB",
                "device": str(words["device"]),
                "torch": str(words["torch"]),
                "kernels": f"{in_use()}, version {shared().kernels_version}",
                "instructions": instructions(),
                "disk": file_system(offload_folder),
                "dtype": dtype,
                "profile": f"version {VERSION}",
            }
        )

    @property
    def name(self) -> str:
        parts = self.parts
        words = f"{parts['cpu']} {parts['cores']} cores {parts['memory']} {parts['device']}".lower()
        digest = blake2b(repr(sorted(parts.items())).encode(), digest_size=4).hexdigest()
        return f"{re.sub(r'[^a-z0-9.]+', '-', words).strip('-')}-{digest}"


def instructions() -> str:
    """What torch uses of the processor: it may be less than there is, if a setting says so."""
    limits = (f"{name}={os.environ[name]}" for name in LIMITS if name in os.environ)
    return ", ".join((torch.backends.cpu.get_cpu_capability(), *processor(CPU).instructions, *limits))


def file_system(folder: Path) -> str:
    """What the folder lies on: the device, its kind, and where it is mounted."""
    place = existing_folder(local_path(folder)).resolve()
    mounts = [one for one in psutil.disk_partitions(all=True) if place.is_relative_to(one.mountpoint)]
    if not mounts:
        return UNKNOWN
    deepest = max(reversed(mounts), key=lambda one: len(one.mountpoint))  # of those at one place, the one mounted last
    return f"{deepest.device} ({deepest.fstype}) at {deepest.mountpoint}"


MOST_MEASUREMENTS = 3  # without being asked for: on a machine that is never at rest, a profile would be measured for every plan
OnNote = Callable[[str], None]


def profiled(
    device: Device,
    offload_folder: Path,
    dtype: str | None = None,
    on_note: OnNote | None = None,
    on_subject: OnSubject | None = None,
) -> Machine:
    """This machine's saved profile, however old: the file says when it was made. Without one, the machine is measured now; also
    where the saved one was disturbed and other processes are quiet now."""
    note, mark = on_note or (lambda line: None), fingerprint_of(device, offload_folder, dtype)
    try:
        found = saved_machine(mark.name)
    except ValueError as error:
        note(f"{error}; the machine is measured anew")
        found = None
    if found is not None and not _is_to_be_repeated(found, offload_folder):
        _note_disturbed(found, note)
        return found
    note_partial(mark, note)
    what = "was not measured yet; that" if found is None else "is quiet now, but was not when it was measured; to repeat that"
    note(f"this machine {what} takes {QUICK.time_on(device.accelerator)}, once")
    try:
        machine = keep(_measured(device, offload_folder, mark, dtype, on_subject), mark)
    except (ValueError, MemoryError, OSError) as error:
        if found is None:
            raise
        note(f"{error}; the profile that is kept is used")
        return found
    _note_disturbed(machine, note)
    note(f"this machine's profile is kept in {machine_file(mark.name)}; `python -m h2o_flexgen.profile` measures it at length")
    return machine


def _measured(
    device: Device, offload_folder: Path, mark: Fingerprint, dtype: str | None, on_subject: OnSubject | None
) -> Machine:
    """This machine as it is now, measured in another process. Memory that the other process takes does not count."""
    others, host_bytes, device_bytes = Others(offload_folder), available_bytes(), device.free_bytes() or 0
    machine = profile_apart(device, offload_folder, mark.name, dtype, QUICK, on_subject, partial_file(mark))
    disturbed = (*machine.disturbed, *others.disturbances())
    return replace(machine, host_bytes=host_bytes, device_bytes=device_bytes, disturbed=disturbed)


def _is_to_be_repeated(found: Machine, offload_folder: Path) -> bool:
    return bool(found.disturbed) and found.measurements < MOST_MEASUREMENTS and is_quiet(offload_folder)


def _note_disturbed(machine: Machine, note: OnNote) -> None:
    """Says that a profile was disturbed, until as many were measured as are worth it: then the machine is like that."""
    if machine.disturbed and machine.measurements < MOST_MEASUREMENTS:
        note(f"this machine's profile may be off: {told_of_disturbance(machine)}")


def told_of_disturbance(machine: Machine) -> str:
    """What disturbed a profile and how to mend it, in a line."""
    return f"{' and '.join(machine.disturbed)}; `python -m h2o_flexgen.profile` measures again, and the better figures count"


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


def fingerprint_of(device: Device, offload_folder: Path, dtype: str | None) -> Fingerprint:
    return Fingerprint.of(device, offload_folder, dtype or own_site(device.kind, device.accelerator).usual_dtype())


def keep(machine: Machine, mark: Fingerprint) -> Machine:
    """Saves a new profile, and returns what is saved: if it or the one before was disturbed, the better figures of both."""
    try:
        before = saved_machine(mark.name)
    except ValueError:  # a damaged file, which is replaced
        before = None
    together = machine if before is None else _together(before, machine)
    save_machine(mark.name, together, about(mark))
    return together


def _together(before: Machine, now: Machine) -> Machine:
    """Puts two profiles together. If nothing disturbed them, the later one counts, for machines change. Ratios and differences
    are taken from the one that was measured at rest."""
    if not before.disturbed and not now.disturbed:
        return now
    found = before.at_best(now) if now.disturbed and not before.disturbed else now.at_best(before)
    return replace(found, host_bytes=now.host_bytes, device_bytes=now.device_bytes, disk_bytes=now.disk_bytes)


def about(mark: Fingerprint) -> str:
    """The text above a profile: when it was measured, and on what."""
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime())
    head = f"Measured {when} by `python -m h2o_flexgen.profile`, or by a run that needed it. This machine:"
    return "\n".join([head, *(f"{name}: {value}" for name, value in mark.parts.items())])


def this_machine(device: Device, offload_folder: Path, dtype: str | None, progress: Progress) -> Machine:
    """This machine as its profile was kept, or as it is measured now, which is shown."""
    progress.stage("measuring this machine, once")
    return profiled(
        device,
        offload_folder,
        dtype,
        on_note=progress.note,
        on_subject=lambda title, done, total: progress.stage(f"measuring: {title}", f"{done}/{total}" if total else ""),
    )


def machine_before_profile(device: Device, offload_folder: Path) -> Machine:
    """This machine as far as it is known without measuring it: its memory. It is used until a problem is known to make
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
