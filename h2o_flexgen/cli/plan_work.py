"""The work of the plan command: searches for the fastest plan, or prices a given one, and reports."""

from __future__ import annotations

import json
import time

from h2o_flexgen.cli.asked_problem import has_profile, machine_before_measuring, machine_of, opened_for, problem_of
from h2o_flexgen.cli.common_requests import site_of_each
from h2o_flexgen.cli.pictures import draw_front, draw_timelines, two_steps
from h2o_flexgen.cli.plan_request import PlanRequest
from h2o_flexgen.cli.report.found_report import FoundReport
from h2o_flexgen.cli.report.stored_weights import StoredWeights
from h2o_flexgen.cli.slow import experts_reason, int8_reason, kernel_reasons, say_slow, visits_reason
from h2o_flexgen.cli.terminal import say
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.engine.resources import set_threads
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.predict import BlockPrediction
from h2o_flexgen.planning.search import Candidate, SearchProblem, SearchResult, refuse_what_never_fits, search


def work(request: PlanRequest) -> None:
    is_given = isinstance(request.plan, Plan)
    with Progress(0, f"planning for {request.model.name}", late=True) as progress:
        set_threads(site_of_each(request.site).threads)  # measurements and the memory of kernels depend on their number
        _refuse_before_profile(request)
        machine = machine_of(request.machine, request.site, request.model.dtype, progress)
        opened = opened_for(request, machine)
        problem = problem_of(request, machine, opened)
        progress.stage("pricing the plan" if is_given else "searching")
        begun = time.perf_counter()
        found = _priced(problem) if is_given else search(problem)
        seconds = time.perf_counter() - begun
        found.best.plan.refuse_graphs_where_data_move()  # a run would
        progress.stage("reporting")
        report = FoundReport(problem, found, request, round(seconds, 3), StoredWeights.of(opened))
        lines, document = report.lines(), report.as_json()
        _draw(report)
    say(lines)
    say_slow(kernel_reasons(report.plan_report.arithmetic))
    say_slow(experts_reason(report.first))
    say_slow(int8_reason(report.first, problem.machine))
    say_slow(visits_reason(report.first, problem.machine))
    print(json.dumps(document), flush=True)


def _refuse_before_profile(request: PlanRequest) -> None:
    """Refuses what cannot be done, before the user waits for a profile."""
    if request.machine is None and not has_profile(request.site, request.model.dtype):
        machine = machine_before_measuring(request.site)
        before = problem_of(request, machine, opened_for(request, machine))
        if isinstance(request.plan, Plan):
            before.largest(before.plan).refuse_what_does_not_fit(before.limits)
        else:
            refuse_what_never_fits(before)


def _priced(problem: SearchProblem) -> SearchResult:
    """The given plan, as if a search had found it."""
    problem.largest(problem.plan).refuse_what_does_not_fit(problem.limits)
    one = Candidate(problem.plan, problem.predict(problem.plan))
    return SearchResult(best=one, runners_up=(), front=(one,), cases=0)


def _draw(report: FoundReport) -> None:
    request = report.request
    if request.plot is not None:
        draw_front(report.found, request.plot, report.title)
    if request.timeline is not None:
        trace = BlockPrediction.of(report.first, report.problem.machine).trace
        draw_timelines({"predicted": two_steps(trace)}, request.timeline, report.title, report.first.spec.layer_names)
