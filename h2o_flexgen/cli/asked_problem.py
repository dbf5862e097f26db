"""What flags ask of a search: a machine, what may be held there, and what a plan must be. The run command asks with a model
that is open, the plan command with shapes alone."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from h2o_flexgen.cli.choose_model import ChosenModel
from h2o_flexgen.core.allowed_values import AUTO
from h2o_flexgen.core.folders import default_offload_folder
from h2o_flexgen.core.tiers import DEVICE, HOST
from h2o_flexgen.core.units import parse_bytes
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.planning.asked import Asked
from h2o_flexgen.planning.budgets import Budgets
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.machines import find_machine
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.reserve import left_to_system
from h2o_flexgen.planning.search import Problem
from h2o_flexgen.quant.codec import BY_BITS

if TYPE_CHECKING:
    from h2o_flexgen.memory.device import Device

BITS = 4
PROCESS_STEP = 64 << 20  # what a process holds is a little different each time; plans should not be. And one for a tokenizer


def machine_of(args: Namespace, progress: Progress) -> Machine:
    """The one that is named; or this one, as its profile was kept, or measured now."""
    if (named := named_machine(args)) is not None:
        return named
    from h2o_flexgen.profiling.this_machine import this_machine  # imports torch, which takes a while

    return this_machine(*_here(args), args.dtype, progress)


def has_profile(args: Namespace) -> bool:
    """Whether this machine's profile is kept."""
    from h2o_flexgen.profiling.kept import is_profiled  # imports torch, which takes a while

    return is_profiled(*_here(args), None if args.dtype == AUTO else args.dtype)


def machine_before_measuring(args: Namespace) -> Machine:
    """This machine as far as it is known without measuring it."""
    from h2o_flexgen.profiling.this_machine import machine_before_profile  # as above

    return machine_before_profile(*_here(args))


def _here(args: Namespace) -> tuple[Device, Path]:
    """What would be computed on, and the folder that would be offloaded to."""
    from h2o_flexgen.memory.device import open_device  # as above

    return open_device(args.device), Path(args.offload_dir or default_offload_folder()).expanduser()


def named_machine(args: Namespace) -> Machine | None:
    if args.machine is None:
        return None
    machine = find_machine(args.machine)
    if args.device != "auto":
        check_device(machine, args.device)
    return machine


def check_device(machine: Machine, device: str) -> None:
    """A machine says nothing of a run on something else."""
    if device.partition(":")[0] != machine.device:
        raise ValueError(
            f"machine {machine.name!r} computes on {machine.device}, and not on {device}; "
            "leave --machine out or choose another --device; `python -m h2o_flexgen.plan` plans for other machines"
        )


def asked_of(args: Namespace) -> Asked:
    return Asked(
        plan=args.plan,
        batch_sizes=args.batch_sizes,
        batches=args.batches,
        codecs=_four_bits(args.plan) if args.allow_4bit else (),
        attend_on=(HOST,) if args.cpu_cache_compute else (DEVICE,),
        latency_limit=args.latency_limit,
        prefer=args.prefer,
    )


def problem_of(args: Namespace, chosen: ChosenModel, machine: Machine) -> Problem:
    """The problem that the plan command is asked to solve. Shapes say all: no weights are fetched or converted for it."""
    from h2o_flexgen.memory.site import site_of  # as above
    from h2o_flexgen.open import OpenedModel

    accelerator, seen = machine.has_accelerator, chosen.without_weights()
    return asked_of(args).problem(
        machine,
        model=OpenedModel.of(seen.source, seen.dummy_weights, args.dtype, accelerator).spec,
        workload=Workload.uniform(args.num_prompts, args.prompt_len, args.gen_len) if args.num_prompts else None,
        prompt_len=args.prompt_len,
        gen_len=args.gen_len,
        budgets=_budgets(args, machine),
        site=site_of(machine.device, accelerator, chosen.dummy_weights),
    )


def _four_bits(plan: Plan) -> tuple[tuple[str, str], ...]:
    """Codecs of weights and KV that may be taken beside the plan's own."""
    packed = BY_BITS[BITS]
    return (packed, plan.kv_codec), (plan.weight_codec, packed), (packed, packed)


def _budgets(args: Namespace, machine: Machine) -> Budgets:
    if args.gpu_mem is not None and not machine.has_accelerator:
        raise ValueError(f"--gpu-mem {args.gpu_mem} is for a machine with a GPU, and {machine.name} has none; leave it out")
    left = system_share(args, machine)
    return Budgets(
        device=_size(args.gpu_mem, machine.device_bytes - left.get(DEVICE, 0)) if machine.has_accelerator else None,
        host=_size(args.cpu_mem, machine.host_bytes - left.get(HOST, 0)),
        disk=_size(args.disk, machine.disk_bytes),
        host_base=process_bytes(),
    )


def system_share(args: Namespace, machine: Machine) -> Mapping[str, int]:
    """tier -> bytes that are not planned with. A machine that is named is taken whole, so that its system needs a share; a
    profile of this one has what was free, and what somebody has asked for is theirs."""
    if args.machine is None:
        return {}
    asked = {DEVICE: args.gpu_mem, HOST: args.cpu_mem}
    return {tier: nbytes for tier, nbytes in left_to_system(machine).items() if nbytes and asked[tier] is None}


def _size(asked: str | None, of_machine: int) -> int:
    return of_machine if asked is None else parse_bytes(asked)


def process_bytes() -> int:
    """What a run's process holds before anything is loaded: about as much as this one."""
    import psutil

    held = int(psutil.Process().memory_info().rss)
    return (held // PROCESS_STEP + 2) * PROCESS_STEP
