"""Budgets: what may be held on every tier. A budget is a promise: a plan that needs more is refused before anything is loaded,
with the tier, the need, the budget and what would fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.tiers import DEVICE, DISK, HOST, TIERS
from h2o_flexgen.core.units import format_bytes
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.planning.block_plan import plan_distinct_blocks
from h2o_flexgen.planning.footprint import Footprint, footprint
from h2o_flexgen.planning.plan import Plan, Shares


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
        """So much less that a plan leaves half of what there is beside the process."""
        host = None if self.host is None else self.host_base + max(0, self.host - self.host_base) // 2
        return replace(self, device=None if self.device is None else self.device // 2, host=host)


@dataclass(frozen=True)
class Request:
    """All that decides whether a plan fits."""

    spec: ModelSpec
    plan: Plan
    workload: Workload
    accelerator: bool
    writes_weights: bool = False
    kernel_threads: int = 0  # of the kernels for the CPU
    scored_at_once: int = 0  # positions of prompts that logits are made for together

    def footprint(self) -> Footprint:
        total = Footprint({})
        for planned in plan_distinct_blocks(self.spec, self.plan, self.workload, self.accelerator):
            total = total | footprint(planned, self.writes_weights, self.kernel_threads, self.scored_at_once)
        return total

    def fits(self, budgets: Budgets) -> bool:
        return budgets.first_exceeded(self.footprint()) is None


class DoesNotFit(ValueError):
    """A plan that needs more than may be held."""


def refuse_what_does_not_fit(request: Request, budgets: Budgets) -> Footprint:
    needed = request.footprint()
    tier = budgets.first_exceeded(needed)
    if tier is None:
        return needed
    budget = budgets.of(tier)
    assert budget is not None
    held = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in needed.parts[tier].items() if nbytes)
    if tier == HOST and budgets.host_base:
        held += f", process {format_bytes(budgets.host_base)}"
    raise DoesNotFit(
        f"plan needs {format_bytes(budgets.needs(needed, tier))} on {tier} ({held}), the budget is {format_bytes(budget)}; "
        + what_would_fit(request, budgets)
    )


def what_would_fit(request: Request, budgets: Budgets) -> str:
    """The nearest plans that fit: a smaller batch, or less of the weights and KV in memory."""
    found = []
    for size in _halves(request.plan.gpu_batch_size):
        plan = replace(request.plan, gpu_batch_size=size)
        if replace(request, plan=plan).fits(budgets):
            found.append(f"gpu_batch_size {size}")
            break
    tier = budgets.first_exceeded(request.footprint())
    with_less = (plan for kept in (0.75, 0.5, 0.25, 0.1, 0.0) for plan in _with_less(request.plan, tier, kept))
    for plan in with_less:
        if replace(request, plan=plan).fits(budgets):
            found.append("percent " + " ".join(f"{value:g}" for value in plan.percent))
            break
    if not found:
        found = [_smaller_with_less(request, budgets, tier)]
    return "would fit: " + " or ".join(found) if any(found) else f"no smaller batch or share fits: {MORE[tier or HOST]}"


MORE = {
    DEVICE: "give more memory of the device, or a smaller model",
    HOST: "give more memory",
    DISK: "free some space on the disk, or give an --offload-dir on a larger one",
}


def _smaller_with_less(request: Request, budgets: Budgets, tier: str | None) -> str:
    """Both at once, where neither alone is enough; nothing if that is not enough either."""
    for size in _halves(request.plan.gpu_batch_size) or [1]:
        for kept in (0.5, 0.0):
            for plan in _with_less(replace(request.plan, gpu_batch_size=size), tier, kept):
                if replace(request, plan=plan).fits(budgets):
                    return f"gpu_batch_size {size} with percent " + " ".join(f"{value:g}" for value in plan.percent)
    return ""


def _halves(size: int) -> list[int]:
    halves = []
    while size > 1:
        size //= 2
        halves.append(size)
    return halves


def _with_less(plan: Plan, tier: str | None, kept: float) -> Iterator[Plan]:
    """Plans that keep only a part of the weights and KV on a tier. What leaves a device goes to the host, or else to disk; what
    leaves the disk goes to the host."""

    def scaled(device_kept: float, host_kept: float, to_host: bool) -> Plan:
        def less(shares: Shares) -> Shares:
            device = round(shares.device * device_kept, 2)
            host = shares.host * host_kept + (shares.device - device if to_host else 0.0)
            return Shares(device, min(round(host, 2), 1.0 - device))

        return replace(plan, weights=less(plan.weights), kv=less(plan.kv))

    if tier == DEVICE:
        yield scaled(kept, 1.0, to_host=True)
        yield scaled(kept, 1.0, to_host=False)
        yield scaled(kept, kept, to_host=False)
    elif tier == HOST:
        yield scaled(1.0, kept, to_host=False)
    else:
        yield replace(
            plan, weights=_off_disk(plan.weights, kept), kv=_off_disk(plan.kv, kept), hidden=_off_disk(plan.hidden, kept)
        )


def _off_disk(shares: Shares, kept: float) -> Shares:
    """Only a part of what was meant for the disk stays there; the rest goes to host memory."""
    return Shares(shares.device, min(1.0 - shares.device, round(shares.host + (1.0 - kept) * shares.disk, 2)))
