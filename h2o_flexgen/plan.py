"""The plan command: finds the plan that generates fastest on a machine within its memory, says why, and predicts its seconds.

    python -m h2o_flexgen.plan --model facebook/opt-6.7b --prompt-len 512 --gen-len 32 --cpu-mem 8GB

No weights are needed: shapes say all. With --evaluate it prices one plan instead. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from h2o_flexgen.cli.asked_problem import has_profile, machine_before_measuring, machine_of, named_machine, problem_of
from h2o_flexgen.cli.choose_model import ChosenModel, choose_model
from h2o_flexgen.cli.errors import exit_status
from h2o_flexgen.cli.found_report import FoundReport
from h2o_flexgen.cli.front_picture import draw_front
from h2o_flexgen.cli.pictures import check_picture
from h2o_flexgen.cli.plan_arguments import parse
from h2o_flexgen.cli.report import say
from h2o_flexgen.cli.timeline_picture import draw_timelines, two_steps
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.planning.predict import BlockPrediction
from h2o_flexgen.planning.search import Candidate, Found, Problem, refuse_what_never_fits, search


def main(argv: Sequence[str] | None = None) -> int:
    return exit_status(lambda: parse(argv), _run)


def _run(args: Namespace) -> None:
    for flag in ("plot", "timeline"):
        check_picture(getattr(args, flag), f"--{flag}")
    chosen = choose_model(args.model, args.path, args.dummy_weights)
    with Progress(0, f"planning for {chosen.name}", late=True) as progress:
        _set_threads(args)
        _refuse_before_profile(args, chosen)
        problem = problem_of(args, chosen, machine_of(args, progress))
        progress.stage("pricing the plan" if args.evaluate else "searching")
        begun = time.perf_counter()
        found = _priced(problem) if args.evaluate else search(problem)
        seconds = time.perf_counter() - begun
        progress.stage("reporting")
        report = FoundReport(problem, found, args, chosen, round(seconds, 3))
        lines, document = report.lines(), report.as_json()
        _draw(args, report)
    say(lines)
    print(json.dumps(document), flush=True)


def _set_threads(args: Namespace) -> None:
    """What is measured, and the memory that kernels need, depend on the number of threads."""
    from h2o_flexgen.engine.threads import set_threads  # imports torch, which takes a while

    set_threads(args.threads)


def _refuse_before_profile(args: Namespace, chosen: ChosenModel) -> None:
    """Nobody waits for a profile only to hear that what he asks cannot be."""
    if named_machine(args) is None and not has_profile(args):
        before = problem_of(args, chosen, machine_before_measuring(args))
        if args.evaluate:
            before.largest(before.plan).refuse_what_does_not_fit(before.budgets)
        else:
            refuse_what_never_fits(before)


def _priced(problem: Problem) -> Found:
    """The plan as it is asked for, as if it had been found."""
    problem.largest(problem.plan).refuse_what_does_not_fit(problem.budgets)
    one = Candidate(problem.plan, problem.predict(problem.plan))
    return Found(best=one, runners_up=(), front=(one,), cases=0, seconds_at_least=one.block_seconds)


def _draw(args: Namespace, report: FoundReport) -> None:
    if args.plot is not None:
        draw_front(report.found, Path(args.plot).expanduser(), report.title)
    if args.timeline is not None:
        trace = BlockPrediction.of(report.first, report.problem.machine).trace
        draw_timelines({"predicted": two_steps(trace)}, Path(args.timeline).expanduser(), report.title)


if __name__ == "__main__":
    sys.exit(main())
