"""Budgets: the bytes that may be held on every tier."""

from __future__ import annotations

from dataclasses import dataclass, replace

from h2o_flexgen.core.tiers import DEVICE, DISK, HOST, TIERS
from h2o_flexgen.planning.footprint import Footprint


@dataclass(frozen=True)
class Budgets:
    """Bytes that may be held per tier; None is no limit. `host_base` is what the process holds before anything is loaded."""

    device: int | None = None
    host: int | None = None
    disk: int | None = None
    host_base: int = 0

    def of(self, tier: str) -> int | None:
        return {DEVICE: self.device, HOST: self.host, DISK: self.disk}[tier]

    def needs(self, footprint: Footprint, tier: str) -> int:
        return footprint.total(tier) + (self.host_base if tier == HOST else 0)

    def first_exceeded(self, footprint: Footprint) -> str | None:
        for tier in TIERS:
            budget = self.of(tier)
            if budget is not None and self.needs(footprint, tier) > budget:
                return tier
        return None

    def with_half_free(self) -> Budgets:
        """Budgets so much smaller that a plan leaves half of the memory beside the process free."""
        host = None if self.host is None else self.host_base + max(0, self.host - self.host_base) // 2
        return replace(self, device=None if self.device is None else self.device // 2, host=host)
