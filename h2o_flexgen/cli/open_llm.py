"""Opens the LLM of a request, and shows the steps of opening that take long."""

from __future__ import annotations

from dataclasses import replace

from h2o_flexgen.cli.common_requests import GPUS, ModelRequest, SiteRequest, site_of_each
from h2o_flexgen.cli.watch import OpeningReport
from h2o_flexgen.core.allowed_values import AUTO
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.engine.reports import OnStage
from h2o_flexgen.llm import LLM
from h2o_flexgen.memory.device import open_device
from h2o_flexgen.planning.plan import Plan


def open_llm(model: ModelRequest, site: SiteRequest, plan: Plan, trace: bool = False) -> LLM:
    with Progress(0, f"opening {model.name}", late=True) as progress:
        llm = make_llm(model, site, plan, OpeningReport(progress).stage, trace)
        if llm.leftovers is not None:
            progress.note(str(llm.leftovers))
        return llm


def open_together(model: ModelRequest, site: SiteRequest, plan: Plan, trace: bool = False) -> LLM:
    """The LLM that plans for as many processes as are asked for: with the threads of each, and room for all of them."""
    llm = open_llm(model, site_of_each(site), plan, trace)
    try:
        refuse_missing_devices(llm, site)
    except BaseException:
        llm.close()
        raise
    llm.limits = replace(llm.limits, processes=site.gpus)
    return llm


def refuse_missing_devices(llm: LLM, site: SiteRequest) -> None:
    if site.gpus > 1 and site.device == AUTO and not llm.device.accelerator:
        raise ValueError(f"{GPUS} {site.gpus} is for GPUs, and there is none; with --device cpu so many processes use the CPU")
    llm.device.names_of(site.gpus)


def make_llm(model: ModelRequest, site: SiteRequest, plan: Plan, on_stage: OnStage, trace: bool = False) -> LLM:
    if site.gpu_mem is not None and not open_device(site.device).accelerator:
        raise ValueError(f"--gpu-mem {site.gpu_mem} is for a GPU, and this run computes on the CPU; leave it out")
    return LLM(**llm_arguments(model, site, plan), trace=trace, on_stage=on_stage)  # type: ignore[arg-type]


def llm_arguments(model: ModelRequest, site: SiteRequest, plan: Plan) -> dict[str, object]:
    """The arguments of LLM, also for one on another machine."""
    of_site = {name: getattr(site, name) for name in ("device", "gpu_mem", "cpu_mem", "offload_dir", "threads")}
    of_model = {name: getattr(model, name) for name in ("tokenizer", "dtype", "dummy_weights")}
    return {"model": model.source, "plan": plan, **of_model, **of_site}
