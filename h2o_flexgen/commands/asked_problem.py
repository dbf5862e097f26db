"""What flags ask of a search: a machine, what may be held there, and the Problem. The run command asks with a model that is
open, the plan command with shapes alone."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from math import inf
from pathlib import Path

from h2o_flexgen.commands.choose_model import ChosenModel
from h2o_flexgen.commands.shapes import Shapes
from h2o_flexgen.planning.footprint import Budgets
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.machines import find_machine
from h2o_flexgen.planning.model_spec import DTYPE_BYTES, ModelSpec
from h2o_flexgen.planning.plan import DEVICE, HOST, Plan
from h2o_flexgen.planning.positions import check_positions, check_rolling
from h2o_flexgen.planning.search import Problem
from h2o_flexgen.planning.units import parse_bytes
from h2o_flexgen.planning.workload import Workload
from h2o_flexgen.quant.codec import PACKED
from h2o_flexgen.runtime.progress import Progress

BITS = 4
PROCESS_STEP = 64 << 20  # what a process holds is a little different each time; plans should not be. And one for a tokenizer


def machine_of(args: Namespace, progress: Progress) -> Machine:
    """The one that is named; or this one, as its profile was kept, or measured now."""
    if (named := named_machine(args)) is not None:
        return named
    from h2o_flexgen.llm import default_offload_folder  # imports torch, which takes a while
    from h2o_flexgen.memory.device import open_device
    from h2o_flexgen.runtime.profiling.kept import profiled
    from h2o_flexgen.runtime.threads import set_threads

    set_threads(args.threads)  # of whom figures are
    progress.stage("profiling this machine, once")
    dtype = None if args.dtype == "auto" else args.dtype
    folder = Path(args.offload_dir or default_offload_folder()).expanduser()
    return profiled(
        open_device(args.device),
        folder,
        dtype,
        on_note=progress.note,
        on_subject=lambda title, done, total: progress.stage(title, f"{done}/{total}" if total else ""),
    )


def machine_before_profile(args: Namespace) -> Machine:
    """This machine as far as it is known without measuring it: its memory. It stands in until a problem is known to make
    sense."""
    import shutil

    from h2o_flexgen.llm import default_offload_folder, existing_folder  # imports torch, which takes a while
    from h2o_flexgen.memory.device import open_device
    from h2o_flexgen.memory.host import available_bytes

    device = open_device(args.device)
    folder = existing_folder(Path(args.offload_dir or default_offload_folder()).expanduser())
    return Machine(
        name="this machine",
        device=device.kind,
        device_bytes=device.free_bytes() or 0,
        host_bytes=available_bytes(),
        disk_bytes=0 if folder is None else shutil.disk_usage(folder).free,
        disk_read_per_s=inf,
        disk_write_per_s=inf,
        host_copy_per_s=inf,
        host_to_device_per_s=inf,
        device_to_host_per_s=inf,
        flops_per_s=dict.fromkeys(DTYPE_BYTES, ((1, inf),)),
        attention_bytes_per_s={},
        task_seconds=0.0,
    )


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


def problem_of(args: Namespace, chosen: ChosenModel, machine: Machine) -> Problem:
    """Of the plan command."""
    return asked_problem(
        args,
        machine,
        model=Shapes.of(chosen, args.dtype, machine.has_accelerator),
        workload=Workload.uniform(args.num_prompts, args.prompt_len, args.gen_len) if args.num_prompts else None,
        prompt_len=args.prompt_len,
        gen_len=args.gen_len,
        budgets=_budgets(args, machine),
        writes_weights=chosen.dummy_weights,
    )


def asked_problem(
    args: Namespace,
    machine: Machine,
    model: Callable[[Plan], ModelSpec],
    workload: Workload | None,
    prompt_len: int,
    gen_len: int,
    budgets: Budgets,
    writes_weights: bool,
) -> Problem:
    """What can be seen to be wrong without a search is refused here."""
    from h2o_flexgen.kernels.native import kernel_threads

    accelerator = machine.has_accelerator
    plan = args.plan if accelerator else args.plan.folded()
    spec = model(plan)
    machine.flop_rate(spec.dtype, 1)  # a type that was not measured there is refused
    check_rolling(spec, plan)
    for row, length in enumerate((prompt_len,) if workload is None else workload.prompt_lens):
        check_positions(spec, plan, row, length, gen_len)
    return Problem(
        model=model,
        workload=workload,
        prompt_len=prompt_len,
        gen_len=gen_len,
        plan=plan,
        machine=machine,
        budgets=budgets,
        kernel_threads=0 if accelerator else kernel_threads(),
        writes_weights=writes_weights,
        codecs=_four_bits(plan) if args.allow_4bit else (),
        attend_on=(HOST,) if args.cpu_cache_compute else (DEVICE,),
        batch_sizes=args.batch_sizes,
        batches=args.batches,
        latency_limit=args.latency_limit,
        prefer=args.prefer,
    )


def _four_bits(plan: Plan) -> tuple[tuple[str, str], ...]:
    """Codecs of weights and KV that may be taken beside the plan's own."""
    packed = PACKED[BITS]
    return (packed, plan.kv_codec), (plan.weight_codec, packed), (packed, packed)


def _budgets(args: Namespace, machine: Machine) -> Budgets:
    if args.gpu_mem is not None and not machine.has_accelerator:
        raise ValueError(f"--gpu-mem {args.gpu_mem} is for a machine with a GPU, and {machine.name} has none; leave it out")
    return Budgets(
        device=_size(args.gpu_mem, machine.device_bytes) if machine.has_accelerator else None,
        host=_size(args.cpu_mem, machine.host_bytes),
        disk=_size(args.disk, machine.disk_bytes),
        host_base=process_bytes(),
    )


def _size(asked: str | None, of_machine: int) -> int:
    return of_machine if asked is None else parse_bytes(asked)


def process_bytes() -> int:
    """What a run's process holds before anything is loaded: about as much as this one."""
    import psutil

    held = int(psutil.Process().memory_info().rss)
    return (held // PROCESS_STEP + 2) * PROCESS_STEP
