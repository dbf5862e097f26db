"""The memory of a machine that is not planned with. A machine's figures are those of the whole; the system, the driver of a GPU
and other programs need a share."""

from __future__ import annotations

from collections.abc import Mapping

from h2o_flexgen.core.site import DEVICE, HOST
from h2o_flexgen.planning.machine import Machine

HOST_SHARE = 0.05  # the kernel, its page tables, other processes
HOST_LEAST, HOST_MOST = 10**9, 8 * 10**9
DEVICE_SHARE = 0.02  # what a driver keeps, error correction included: a T4 of 16 GB has 15.8
CONTEXT_BYTES = 500 * 10**6  # a CUDA context, with the libraries for products


def left_to_system(machine: Machine) -> Mapping[str, int]:
    """Bytes per tier left to the system. A disk needs none: its figure is what is free there."""
    host = min(max(int(HOST_SHARE * machine.host_bytes), HOST_LEAST), HOST_MOST)
    device = int(DEVICE_SHARE * machine.device_bytes) + CONTEXT_BYTES if machine.has_accelerator else 0
    return {DEVICE: min(device, machine.device_bytes), HOST: min(host, machine.host_bytes)}
