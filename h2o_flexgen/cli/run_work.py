"""The work of the run command: opens a model, finds its plan if none is given, and generates texts under it."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack

from h2o_flexgen.cli.output_files import CompletionsFile
from h2o_flexgen.cli.report.run_report import RunOutcome
from h2o_flexgen.cli.run_job import RunJob
from h2o_flexgen.cli.run_request import MadeUpPrompts, RunRequest
from h2o_flexgen.cli.shared_work import RunApart
from h2o_flexgen.cli.slow import say_slow, unrecorded_reason
from h2o_flexgen.cli.watch import RunWatch, open_llm, say_threads
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.sampling.sampler import resolve_seed
from h2o_flexgen.schedule.ops import Task


def work(request: RunRequest) -> None:
    with ExitStack() as stack:
        completions = request.files.completions
        output = None if completions is None else stack.enter_context(CompletionsFile(completions))
        llm = stack.enter_context(open_llm(request.model, request.site, request.plan.first_plan, request.shows_trace))
        request.sampling.check_vocabulary(llm.spec.vocab, llm.name)
        if not isinstance(request.prompts, MadeUpPrompts) and not llm.tokenizer.reads_texts:
            llm.tokenizer.encode("")  # reports a missing tokenizer before a machine is measured
        job = RunJob(request, llm, llm.loaded.machines(request.machine), output)
        job.refuse_impossible()
        job.find_plan()
        job.announce()
        if request.dry_run:
            print(json.dumps(job.plan_as_json()))
        elif job.processes > 1:
            job.say_slow()
            RunApart.of(job).run()
        else:
            say_threads(request.others, request.site.threads, job.plan_report.arithmetic)
            job.say_slow()
            run(job)


def run(job: RunJob) -> None:
    """Runs it in this process."""
    request, llm, blocks, seed = job.request, job.llm, job.planned_run.blocks, resolve_seed(job.request.seed)
    prepared = llm.prepare(job.prompts, request.sampling.up_to(request.steps), planned=job.planned_run)
    with Progress(blocks.visits, "run", late=True) as progress:
        watch = RunWatch(blocks, progress)
        completions = llm.generate(
            prepared,
            seed=seed,
            on_completion=None if job.output is None else job.output.add,
            on_stage=watch.stage,
            on_visit=_listener(job, watch),
            on_shrink=lambda shrink: watch.shrink(shrink.num_ended, shrink.rest, str(shrink)),
            stop_at=job.stop_at,
        )
        seconds = watch.seconds
    assert llm.stats is not None
    say_slow(unrecorded_reason(llm.stats.unrecorded))
    RunOutcome(job, watch.blocks, llm.stats, completions, watch, seconds, seed).tell()


def _listener(job: RunJob, watch: RunWatch) -> Callable[[Task, int], None]:
    if job.stop_at is None:
        return watch.visit

    def visit_when_done(task: Task, tokens: int) -> None:
        """Waits for the layer: where layers are timed, launching one must not count as its end."""
        job.llm.device.settle()
        watch.visit(task, tokens)

    return visit_when_done
