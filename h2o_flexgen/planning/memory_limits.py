"""MemoryLimits: the bytes that may be held on every tier; and what of a machine's memory is not planned with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf

from h2o_flexgen.core.site import DEVICE, DISK, HOST, TIERS
from h2o_flexgen.planning.footprint import WEIGHTS, Footprint
from h2o_flexgen.planning.machine import Machine


@dataclass(frozen=True)
class MemoryLimits:
    """Bytes that may be held per tier; None is no limit. `host_base` is what the process holds before anything is loaded.
    `processes`: how many of them run the plan on this machine, each with a device of its own, over weights of host memory that
    they share; one more process supervises them."""

    device: int | None = None
    host: int | None = None
    disk: int | None = None
    host_base: int = 0
    processes: int = 1

    def of(self, tier: str) -> int | None:
        return {DEVICE: self.device, HOST: self.host, DISK: self.disk}[tier]

    def needs(self, footprint: Footprint, tier: str) -> int:
        return sum(self.held(footprint, tier).values())

    def room(self, footprint: Footprint, tier: str) -> float:
        """Bytes that a plan leaves of a limit."""
        limit = self.of(tier)
        return inf if limit is None else limit - self.needs(footprint, tier)

    def held(self, footprint: Footprint, tier: str) -> dict[str, int]:
        """Bytes by what they hold on a tier, of all processes."""
        parts = {name: nbytes * self.copies(tier, name) for name, nbytes in footprint.parts.get(tier, {}).items()}
        return {**parts, "process": self.base(tier)}

    def base(self, tier: str) -> int:
        """Bytes that processes hold by themselves."""
        return (self.host_base if tier == HOST else 0) * (self.processes + 1 if self.processes > 1 else 1)

    def copies(self, tier: str, part: str) -> int:
        """How many processes hold such bytes on a tier: each has a device of its own, and all of them one copy of weights in
        host memory."""
        return 1 if tier == DEVICE or (tier, part) == (HOST, WEIGHTS) else self.processes

    def first_exceeded(self, footprint: Footprint) -> str | None:
        for tier in TIERS:
            limit = self.of(tier)
            if limit is not None and self.needs(footprint, tier) > limit:
                return tier
        return None

    def exceeded_by(self, peak_bytes: Mapping[str, int]) -> dict[str, int]:
        """Bytes by which peaks exceed the limits, by tier."""
        limits = {tier: self.of(tier) for tier in peak_bytes}
        return {tier: 0 if (most := limits[tier]) is None else max(0, peak - most) for tier, peak in peak_bytes.items()}

    def with_half_free(self) -> MemoryLimits:
        """Limits so much smaller that a plan leaves half of the memory beside the process free."""
        base = self.base(HOST)
        host = None if self.host is None else base + max(0, self.host - base) // 2
        return replace(self, device=None if self.device is None else self.device // 2, host=host)


HOST_SHARE = 0.05  # the kernel, its page tables, other processes
HOST_LEAST, HOST_MOST = 10**9, 8 * 10**9
DEVICE_SHARE = 0.02  # what a driver keeps, error correction included: a T4 of 16 GB has 15.8
CONTEXT_BYTES = 500 * 10**6  # a CUDA context, with the libraries for products


def left_to_system(machine: Machine) -> Mapping[str, int]:
    """Bytes per tier left to the system: a machine's figures are those of the whole; the system, the driver of a GPU and other
    programs need a share. A disk needs none: its figure is what is free there."""
    host = min(max(int(HOST_SHARE * machine.host_bytes), HOST_LEAST), HOST_MOST)
    device = int(DEVICE_SHARE * machine.device_bytes) + CONTEXT_BYTES if machine.has_accelerator else 0
    return {DEVICE: min(device, machine.device_bytes), HOST: min(host, machine.host_bytes)}
