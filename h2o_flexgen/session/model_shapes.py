"""ModelShapes: a model of which only the shapes are known, with the memory that a machine would have for it. It can be planned
for, and not run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import psutil

from h2o_flexgen.core.site import DEVICE, HOST, Site
from h2o_flexgen.core.units import parse_bytes
from h2o_flexgen.formats.kernel_table import TRITON, Processor
from h2o_flexgen.memory.memories import own_site
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.memory_limits import MemoryLimits, left_to_system
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.plan_requirements import PlanSubject
from h2o_flexgen.profiling.gpu_checks import kept_graph_bytes
from h2o_flexgen.session.open_request import ModelRequest, SiteRequest
from h2o_flexgen.session.opened_model import OpenedModel

PROCESS_STEP = 64 << 20  # what a process holds varies a little; plans should not. One step more is for a tokenizer


@dataclass(frozen=True)
class ModelShapes:
    model: ModelRequest
    site: SiteRequest
    named: Machine | None  # None: this machine
    disk: str | None  # the most that is held there; None: all that is free
    _opened: dict[Site, OpenedModel] = field(default_factory=dict, compare=False, repr=False)

    @property
    def name(self) -> str:
        return self.model.name

    def adopt(self, plan: Plan) -> None:
        """A model that is not open has no plan."""

    def subject_on(self, machine: Machine) -> PlanSubject:
        return PlanSubject(self.opened_on(machine).spec, self._limits(machine), self._site(machine))

    def opened_on(self, machine: Machine) -> OpenedModel:
        """The model from shapes alone, in the type that is usual there: no weights are fetched or converted for it."""
        site, seen = self._site(machine), self.model.without_weights()
        if site not in self._opened:
            opened = OpenedModel.of(seen.source, seen.dummy_weights, seen.dtype, site, adapters=seen.adapter)
            self._opened[site] = opened
        return self._opened[site]

    def _site(self, machine: Machine) -> Site:
        site = own_site(machine.device, machine.has_accelerator, self.model.dummy_weights)
        if not machine.has_accelerator:
            return site
        if self.named is not None:  # another machine's, where torch brings Triton
            return replace(site, processor=Processor(machine.device, TRITON, machine.multiplies))
        return replace(site, graph_bytes=kept_graph_bytes(machine.device))

    # -- what may be held ------------------------------------------------------------------------------------------------

    def _limits(self, machine: Machine) -> MemoryLimits:
        site = self.site
        site.refuse_memory_of_no_gpu(machine.has_accelerator, f"{machine.name} has none")
        left = system_share(self.named, site)
        return MemoryLimits(
            device=_size(site.gpu_mem, machine.device_bytes - left.get(DEVICE, 0)) if machine.has_accelerator else None,
            host=_size(site.cpu_mem, machine.host_bytes - left.get(HOST, 0)),
            disk=_size(self.disk, machine.disk_bytes),
            host_base=self._process_bytes,
            processes=site.gpus,
        )

    @cached_property
    def _process_bytes(self) -> int:
        return process_bytes()


def system_share(named: Machine | None, site: SiteRequest) -> Mapping[str, int]:
    """Bytes per tier that the plan must leave free. A named machine is described whole, so its system needs a share. A profile
    of this machine has only what was free, and memory that the user gave as a size is used in full."""
    if named is None:
        return {}
    asked = {DEVICE: site.gpu_mem, HOST: site.cpu_mem}
    return {tier: nbytes for tier, nbytes in left_to_system(named).items() if nbytes and asked[tier] is None}


def process_bytes() -> int:
    """Bytes that a run's process holds before anything is loaded: about as many as this one."""
    held = int(psutil.Process().memory_info().rss)
    return (held // PROCESS_STEP + 2) * PROCESS_STEP


def _size(asked: int | str | None, of_machine: int) -> int:
    return of_machine if asked is None else parse_bytes(asked)
