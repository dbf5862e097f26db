"""An LLM as the flags ask for it. What takes long while it opens is shown."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from h2o_flexgen.cli.choose_model import ChosenModel
from h2o_flexgen.cli.stages import Opening
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.planning.plan import Plan

if TYPE_CHECKING:
    from h2o_flexgen.engine.stage import OnStage
    from h2o_flexgen.llm import LLM


def open_llm(args: Namespace, chosen: ChosenModel) -> LLM:
    with Progress(0, f"opening {chosen.name}", late=True) as progress:
        llm = make_llm(args, chosen, args.plan, Opening(progress).stage)
        if llm.leftovers is not None:
            progress.note(str(llm.leftovers))
        return llm


def make_llm(args: Namespace, chosen: ChosenModel, plan: Plan, on_stage: OnStage) -> LLM:
    """Under a plan that may be another one than that of the flags."""
    from h2o_flexgen.llm import LLM  # imports torch, which takes a while
    from h2o_flexgen.memory.device import open_device

    if args.gpu_mem is not None and not open_device(args.device).accelerator:
        raise ValueError(f"--gpu-mem {args.gpu_mem} is for a GPU, and this run computes on the CPU; leave it out")
    return LLM(
        chosen.source,
        tokenizer=args.tokenizer,
        plan=plan,
        dtype=args.dtype,
        device=args.device,
        gpu_mem=args.gpu_mem,
        cpu_mem=args.cpu_mem,
        offload_dir=args.offload_dir,
        dummy_weights=chosen.dummy_weights,
        threads=args.threads,
        on_stage=on_stage,
    )
