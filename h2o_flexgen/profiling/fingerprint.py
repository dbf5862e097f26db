"""Fingerprint: everything that a profile depends on. A profile is valid wherever its fingerprint is the same."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import psutil
import torch

from h2o_flexgen.core.folders import existing_folder
from h2o_flexgen.formats.kernel_sizes import shared
from h2o_flexgen.formats.kernel_table import CPU
from h2o_flexgen.kernels.native import in_use, processor
from h2o_flexgen.memory.device import Device
from h2o_flexgen.profiling.measure import describe_machine

GB = 10**9
VERSION = 2  # of what is measured, and of what a profile says of it: profiles of another version are measured anew
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
    place = existing_folder(folder.expanduser()).resolve()
    mounts = [one for one in psutil.disk_partitions(all=True) if place.is_relative_to(one.mountpoint)]
    if not mounts:
        return UNKNOWN
    deepest = max(reversed(mounts), key=lambda one: len(one.mountpoint))  # of those at one place, the one mounted last
    return f"{deepest.device} ({deepest.fstype}) at {deepest.mountpoint}"
