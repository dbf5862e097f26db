"""What the flags of the plan command ask for: a machine, what may be held there, and the Problem for a search."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from h2o_flexgen.commands.choose_model import ChosenModel
from h2o_flexgen.commands.shapes import Shapes
from h2o_flexgen.planning.footprint import Budgets
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.machines import find_machine
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
    if args.machine is not None:
        return find_machine(args.machine)
    from h2o_flexgen.llm import default_offload_folder  # imports torch, which takes a while
    from h2o_flexgen.memory.device import open_device
    from h2o_flexgen.runtime.profiling.kept import profiled

    progress.stage("profiling this machine, once")
    dtype = None if args.dtype == "auto" else args.dtype
    folder = Path(args.offload_dir or default_offload_folder()).expanduser()
    return profiled(
        open_device(args.device),
        folder,
        dtype,
        on_note=progress.note,
        on_subject=lambda title, done, total: progress.stage(title, f"{done}/{total}"),
    )


def problem_of(args: Namespace, chosen: ChosenModel, machine: Machine) -> Problem:
    from h2o_flexgen.kernels.native import kernel_threads

    accelerator = machine.has_accelerator
    shapes, plan = Shapes.of(chosen, args.dtype, accelerator), args.plan if accelerator else args.plan.folded()
    _check(shapes, plan, args, machine)
    return Problem(
        model=shapes,
        workload=Workload.uniform(args.num_prompts, args.prompt_len, args.gen_len) if args.num_prompts else None,
        prompt_len=args.prompt_len,
        gen_len=args.gen_len,
        plan=plan,
        machine=machine,
        budgets=_budgets(args, machine),
        kernel_threads=0 if accelerator else kernel_threads(),
        writes_weights=chosen.dummy_weights,
        codecs=four_bits(plan) if args.allow_4bit else (),
        attend_on=(HOST,) if args.cpu_cache_compute else (DEVICE,),
        batch_sizes=args.batch_sizes,
        batches=args.batches,
        latency_limit=args.latency_limit,
        prefer=args.prefer,
    )


def four_bits(plan: Plan) -> tuple[tuple[str, str], ...]:
    """Codecs of weights and KV that may be taken beside the plan's own."""
    packed = PACKED[BITS]
    return (packed, plan.kv_codec), (plan.weight_codec, packed), (packed, packed)


def _check(shapes: Shapes, plan: Plan, args: Namespace, machine: Machine) -> None:
    spec = shapes(plan)
    check_rolling(spec, plan)
    check_positions(spec, plan, 0, args.prompt_len, args.gen_len)
    machine.flop_rate(spec.dtype, 1)  # a type that was not measured there is refused


def _budgets(args: Namespace, machine: Machine) -> Budgets:
    import psutil

    if args.gpu_mem is not None and not machine.has_accelerator:
        raise ValueError(f"--gpu-mem {args.gpu_mem} is for a machine with a GPU, and {machine.name} has none; leave it out")
    process = (psutil.Process().memory_info().rss // PROCESS_STEP + 2) * PROCESS_STEP
    return Budgets(
        device=_size(args.gpu_mem, machine.device_bytes) if machine.has_accelerator else None,
        host=_size(args.cpu_mem, machine.host_bytes),
        disk=_size(args.disk, machine.disk_bytes),
        host_base=process,
    )


def _size(asked: str | None, of_machine: int) -> int:
    return of_machine if asked is None else parse_bytes(asked)
