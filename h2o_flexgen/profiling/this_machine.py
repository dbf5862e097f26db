"""This machine, for who plans for it: as its profile says, or as far as it is known without one."""

from __future__ import annotations

import shutil
from math import inf
from pathlib import Path

from h2o_flexgen.core.allowed_values import AUTO
from h2o_flexgen.core.folders import existing_folder
from h2o_flexgen.core.model_spec import DTYPE_BYTES
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.memory.device import Device
from h2o_flexgen.memory.host import available_bytes
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.profiling import kept


def this_machine(device: Device, offload_folder: Path, dtype: str, progress: Progress) -> Machine:
    """This machine as its profile was kept, or as it is measured now, which is shown. `dtype` is as it was asked for."""
    progress.stage("profiling this machine, once")
    return kept.profiled(
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
