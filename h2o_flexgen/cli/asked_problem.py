"""The problem that the plan command is asked to solve: a machine, what may be held there, and the shapes of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import psutil

from h2o_flexgen.cli.common_requests import SiteRequest, check_device
from h2o_flexgen.cli.plan_request import PlanRequest
from h2o_flexgen.core.allowed_values import AUTO
from h2o_flexgen.core.environment import default_offload_folder
from h2o_flexgen.core.site import DEVICE, HOST, Site
from h2o_flexgen.core.units import parse_bytes
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.formats.kernel_table import TRITON, Processor
from h2o_flexgen.memory.device import Device, open_device
from h2o_flexgen.memory.memories import site_of
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.memory_limits import MemoryLimits, left_to_system
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.plan_requirements import PlanRequirements
from h2o_flexgen.planning.search import SearchProblem
from h2o_flexgen.profiling.profile_cache import is_profiled, machine_before_profile, this_machine
from h2o_flexgen.session.opened_model import OpenedModel

PROCESS_STEP = 64 << 20  # what a process holds varies a little; plans should not. One step more is for a tokenizer


def machine_of(named: Machine | None, site: SiteRequest, dtype: str, progress: Progress) -> Machine:
    """The named machine; otherwise this one, from its kept profile or measured now."""
    return (named or this_machine(*_here(site), dtype, progress)).shared_by(site.gpus)


def machine_to_run_on(named: Machine | None, site: SiteRequest, dtype: str, device: str) -> Machine:
    """The same for a model that is open on a device, on which the machine must compute."""
    with Progress(0, "this machine", late=True) as progress:
        machine = machine_of(named, site, dtype, progress)
    check_device(machine, device)
    return machine


def has_profile(site: SiteRequest, dtype: str) -> bool:
    """Whether this machine's profile is kept."""
    return is_profiled(*_here(site), None if dtype == AUTO else dtype)


def machine_before_measuring(site: SiteRequest) -> Machine:
    """This machine, as far as it is known without measuring it."""
    return machine_before_profile(*_here(site))


def _here(site: SiteRequest) -> tuple[Device, Path]:
    """The device that would compute, and the folder for offloaded data."""
    return open_device(site.device), Path(site.offload_dir or default_offload_folder()).expanduser()


def opened_for(request: PlanRequest, machine: Machine) -> OpenedModel:
    """The model from shapes alone: no weights are fetched or converted for it."""
    seen = request.model.without_weights()
    return OpenedModel.of(seen.source, seen.dummy_weights, seen.dtype, _site(request, machine))


def _site(request: PlanRequest, machine: Machine) -> Site:
    site = site_of(machine.device, machine.has_accelerator, request.model.dummy_weights)
    if request.machine is not None and machine.has_accelerator:  # another machine's, where torch brings Triton
        site = replace(site, processor=Processor(machine.device, TRITON, machine.multiplies))
    return site


def problem_of(request: PlanRequest, machine: Machine, opened: OpenedModel) -> SearchProblem:
    asked, whole = request.plan, request.num_prompts
    number = None if whole is None else -(-whole // request.site.gpus)  # of the process with most to do
    return (PlanRequirements(asked, attend_on=(asked.attend_on,)) if isinstance(asked, Plan) else asked).problem(
        machine,
        model=opened.spec,
        workload=None if number is None else Workload.uniform(number, request.prompt_len, request.gen_len),
        prompt_len=request.prompt_len,
        gen_len=request.gen_len,
        limits=_limits(request, machine),
        site=_site(request, machine),
    )


def _limits(request: PlanRequest, machine: Machine) -> MemoryLimits:
    site = request.site
    if site.gpu_mem is not None and not machine.has_accelerator:
        raise ValueError(f"--gpu-mem {site.gpu_mem} is for a machine with a GPU, and {machine.name} has none; leave it out")
    left = system_share(request.machine, site)
    return MemoryLimits(
        device=_size(site.gpu_mem, machine.device_bytes - left.get(DEVICE, 0)) if machine.has_accelerator else None,
        host=_size(site.cpu_mem, machine.host_bytes - left.get(HOST, 0)),
        disk=_size(request.disk, machine.disk_bytes),
        host_base=process_bytes(),
        processes=site.gpus,
    )


def system_share(named: Machine | None, site: SiteRequest) -> Mapping[str, int]:
    """Bytes per tier that the plan must leave free. A named machine is described whole, so its system needs a share. A profile
    of this machine has only what was free, and memory that the user gave as a size is used in full."""
    if named is None:
        return {}
    asked = {DEVICE: site.gpu_mem, HOST: site.cpu_mem}
    return {tier: nbytes for tier, nbytes in left_to_system(named).items() if nbytes and asked[tier] is None}


def _size(asked: str | None, of_machine: int) -> int:
    return of_machine if asked is None else parse_bytes(asked)


def process_bytes() -> int:
    """Bytes that a run's process holds before anything is loaded: about as many as this one."""
    held = int(psutil.Process().memory_info().rss)
    return (held // PROCESS_STEP + 2) * PROCESS_STEP
