"""Opens the LLM of a request, and shows the steps of opening that take long."""

from __future__ import annotations

from h2o_flexgen.cli.common_requests import GPUS
from h2o_flexgen.cli.watch import OpeningReport
from h2o_flexgen.core.allowed_values import AUTO
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.llm import LLM
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.session.open_request import ModelRequest, OpenRequest, SiteRequest


def open_llm(model: ModelRequest, site: SiteRequest, plan: Plan, trace: bool = False) -> LLM:
    """The LLM that plans for as many processes as are asked for: with the threads of each, and room for all of them."""
    with Progress(0, f"opening {model.name}", late=True) as progress:
        llm = LLM.of(OpenRequest(model, site.of_each, plan, trace), OpeningReport(progress).stage)
        if llm.loaded.leftovers is not None:
            progress.note(str(llm.loaded.leftovers))
    try:
        _refuse_missing_devices(llm, site)
    except BaseException:
        llm.close()
        raise
    return llm


def _refuse_missing_devices(llm: LLM, site: SiteRequest) -> None:
    if site.gpus > 1 and site.device == AUTO and not llm.device.accelerator:
        raise ValueError(f"{GPUS} {site.gpus} is for GPUs, and there is none; with --device cpu so many processes use the CPU")
    llm.device.names_of(site.gpus)
