"""Opens the LLM of a request, and shows the steps of opening that take long."""

from __future__ import annotations

from h2o_flexgen.cli.requests import ModelRequest, SiteRequest
from h2o_flexgen.cli.watch import Opening
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.engine.stage import OnStage
from h2o_flexgen.llm import LLM
from h2o_flexgen.memory.device import open_device
from h2o_flexgen.planning.plan import Plan


def open_llm(model: ModelRequest, site: SiteRequest, plan: Plan, trace: bool = False) -> LLM:
    with Progress(0, f"opening {model.name}", late=True) as progress:
        llm = make_llm(model, site, plan, Opening(progress).stage, trace)
        if llm.leftovers is not None:
            progress.note(str(llm.leftovers))
        return llm


def make_llm(model: ModelRequest, site: SiteRequest, plan: Plan, on_stage: OnStage, trace: bool = False) -> LLM:
    if site.gpu_mem is not None and not open_device(site.device).accelerator:
        raise ValueError(f"--gpu-mem {site.gpu_mem} is for a GPU, and this run computes on the CPU; leave it out")
    return LLM(
        model.source,
        tokenizer=model.tokenizer,
        plan=plan,
        dtype=model.dtype,
        device=site.device,
        gpu_mem=site.gpu_mem,
        cpu_mem=site.cpu_mem,
        offload_dir=site.offload_dir,
        dummy_weights=model.dummy_weights,
        threads=site.threads,
        trace=trace,
        on_stage=on_stage,
    )
