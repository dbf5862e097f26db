"""The work of the plan command: searches for the fastest plan, or prices a given one, and reports."""

from __future__ import annotations

import json

from h2o_flexgen.cli.pictures import draw_front, draw_timelines, two_steps
from h2o_flexgen.cli.plan_request import PlanRequest
from h2o_flexgen.cli.report.arithmetic import StoredWeights
from h2o_flexgen.cli.report.found_report import FoundReport
from h2o_flexgen.cli.slow import compute_reason, plan_reasons, say_slow
from h2o_flexgen.cli.terminal import say
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.engine.resources import set_threads
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.plan_requirements import PlanNeed, PlanRequirements
from h2o_flexgen.planning.predict import BlockPrediction
from h2o_flexgen.session.machine_source import MachineSource
from h2o_flexgen.session.opened_model import ModelShapes
from h2o_flexgen.session.plan_finder import PlanFinder


def work(request: PlanRequest) -> None:
    set_threads(request.site.of_each.threads)  # measurements and the memory of kernels depend on their number
    machines = MachineSource.at_site(request.machine, request.site, request.model.dtype)
    shapes = ModelShapes(request.model, request.site, request.machine, request.disk)
    if isinstance(plan := request.plan, Plan):
        found = PlanFinder(PlanRequirements(plan, attend_on=(plan.attend_on,)), shapes, machines).price(need_of(request))
    else:
        found = PlanFinder(plan, shapes, machines).search(need_of(request))
    found.result.best.plan.refuse_graphs(found.problem.site)  # a run would
    with Progress(0, f"planning for {request.model.name}", late=True) as progress:
        progress.stage("reporting")
        stored = StoredWeights.of(shapes.opened_on(found.problem.machine))
        report = FoundReport(found.problem, found.result, request, round(found.seconds, 3), stored)
        lines, document = report.lines(), report.as_json()
        _draw(report)
    say(lines)
    say_slow(plan_reasons(report.planned, report.plan_report.arithmetic))
    say_slow(compute_reason(report.first, report.problem.machine))
    print(json.dumps(document), flush=True)


def need_of(request: PlanRequest) -> PlanNeed:
    """What the process with most to do needs."""
    number = 1 if request.num_prompts is None else -(-request.num_prompts // request.site.gpus)
    workload = Workload.uniform(number, request.prompt_len, request.gen_len)
    return PlanNeed(workload, is_sample=request.num_prompts is None)


def _draw(report: FoundReport) -> None:
    request = report.request
    if request.plot is not None:
        draw_front(report.found, request.plot, report.title)
    if request.timeline is not None:
        trace = BlockPrediction.of(report.first, report.problem.machine).trace
        draw_timelines({"predicted": two_steps(trace)}, request.timeline, report.title, report.first.spec.layer_names)
