"""The work of the batch command: finds a plan for the requests that are left, runs them, and writes their records.

Ray takes the settings of a cluster of the job's own from the environment when it is imported. They are set here before.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from h2o_flexgen.cli.batch_request import LOCAL, RETRY, BatchRequest, RayRequest
from h2o_flexgen.cli.batch_run import Elsewhere, JobFigures, JobRun, Listening, end_lines
from h2o_flexgen.cli.report import Entry, document_of, noted
from h2o_flexgen.cli.report.plan_report import PlanReport, together
from h2o_flexgen.cli.report.summary import peaks_entry, prefix_files_entry, say_broken
from h2o_flexgen.cli.shared_work import dealt_requests, outcomes_of_processes
from h2o_flexgen.cli.slow import plan_reasons, say_slow, unrecorded_reason
from h2o_flexgen.cli.terminal import say, say_document
from h2o_flexgen.cli.watch import open_llm, say_threads
from h2o_flexgen.engine.job import Outcome, prefix_finder, workload_of_job
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.engine.stats import Peaks
from h2o_flexgen.engine.stores.prefix_files import PrefixFileCounts
from h2o_flexgen.evaluation.answer_settings import model_settings, plan_settings
from h2o_flexgen.jobs.file_job import FileJob, LineReading, RequestSizes
from h2o_flexgen.jobs.index import SOUND
from h2o_flexgen.jobs.openai_answers import Answers, RecordMaker
from h2o_flexgen.jobs.output import JobOutput, Manifest, OrderedOutput, Settings, versions
from h2o_flexgen.jobs.recovery import Finished, OutputReader
from h2o_flexgen.llm import LLM
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.plan_requirements import PlanNeed
from h2o_flexgen.profiling.measure import describe_machine
from h2o_flexgen.sampling.sampler import resolve_seed
from h2o_flexgen.session.plan_finder import PlanFinder
from h2o_flexgen.text.dialogue import Style, choose_style

FOR_GOOD = "none of them can be run: mend their lines, and run these as a job of their own"
SOME_FAILED = 1  # exit status of a job that has come to its end with errors among its records


def work(request: BatchRequest) -> None:
    ended = run(request)
    if ended is None:
        return
    say_document(ended.as_json())
    ended.exit_if_failed()


def run(request: BatchRequest) -> FinishedJob | None:
    """Runs a job to its end. One that is only to be looked at has none."""
    with ExitStack() as stack:
        stack.enter_context(closing(request.checked.index))
        llm = stack.enter_context(open_llm(request.model, request.site, request.plan.first_plan))
        request.refuse_other_seed()
        prepared = PreparedBatch(request, llm)
        prepared.refuse_other()
        if request.dry_run:
            prepared.for_requests(Finished.nothing(request.checked.index)).show_plan()
            return None
        output = stack.enter_context(prepared.open_output())
        return prepared.for_requests(output.finished).run(output)


@dataclass(frozen=True)
class FinishedJob:
    """A job that came to its end, and what its last run did."""

    output: Path
    requests: int
    failed: int
    cannot_run: int  # of those that failed: whatever is tried again, they fail again
    seed: int
    ran: RequestSizes  # of the requests of the last run
    figures: JobFigures | None  # None: nothing was left to be run
    machine: Mapping[str, object]
    peaks: Peaks | None = None  # of this process, where it computed
    prefix_files: PrefixFileCounts | None = None  # what this process read and wrote of prefixes that outlive it

    @property
    def result(self) -> Settings:
        return document_of(self._entries())

    def _entries(self) -> Iterator[Entry]:
        yield noted(requests=self.requests, requests_failed=self.failed)
        if self.figures is not None:
            yield from self.figures.entries()
        if self.peaks is not None:
            yield peaks_entry(self.peaks)
        if self.prefix_files is not None:
            yield prefix_files_entry(self.prefix_files)

    def as_json(self) -> dict[str, object]:
        return {**self.result, "output": str(self.output), "seed": self.seed}

    def exit_if_failed(self) -> None:
        if self.failed:
            told = f"{self.failed} of {self.requests} requests failed: their records in {self.output} have an error"
            some = "them" if not self.cannot_run else f"the {self.failed - self.cannot_run} that could be run"
            again = f"{RETRY} runs {some} again" if self.failed > self.cannot_run else FOR_GOOD
            print(f"{told}; {again}", file=sys.stderr)
            raise SystemExit(SOME_FAILED)


@dataclass(frozen=True)
class PreparedBatch:
    """A request with its model open, and with the manifest of the job that it goes on with."""

    request: BatchRequest
    llm: LLM

    @cached_property
    def _of_model(self) -> tuple[Settings, Settings]:
        return model_settings(self.llm)

    @cached_property
    def settings(self) -> Settings:
        """What the answers depend on, but for the plan."""
        return {**self._of_model[0], **self.request.settings}

    @cached_property
    def noted(self) -> Settings:
        return self._of_model[1]

    def refuse_other(self) -> None:
        begun = self.request.begun
        if begun is None:
            return
        self.request.refuse_other(self.settings)
        asked = self.request.plan
        if isinstance(asked, Plan) or not asked.may_change_answers:  # otherwise the search has a say
            self.request.refuse_other(plan_settings(self.llm.plan))
        for note in begun.notes(self.noted):
            print(f"note: {note}: numbers may differ in their last bits", file=sys.stderr)

    def open_output(self) -> JobOutput:
        """The output, with the records of earlier runs."""
        request = self.request
        reader = OutputReader(request.checked.index, request.resuming.retry_errors)
        output = (OrderedOutput if request.ordered else JobOutput)(request.files.output, reader)
        finished = output.finished
        if finished.num_done or finished.dropped:
            lost = f"; {finished.dropped} lines that were cut off there are dropped" if finished.dropped else ""
            done = f"{finished.num_done} of {len(request.checked.index)} requests are done"
            print(f"{done} by their records in {request.files.output}{lost}", file=sys.stderr)
        return output

    def for_requests(self, finished: Finished) -> BatchJob:
        """Reads the requests that are left, and also those that are done where answers depend on what all of them share."""
        index, states = self.request.checked.index, self.request.checked.index.states
        sound = [place for place in range(len(index)) if states[place] == SOUND]
        left = [place for place in sound if finished.is_open(place)]
        places = sound if left and self.llm.plan.answers_depend_on_prefixes else left
        with Progress(len(places), "reading prompts", late=True) as progress:
            return BatchJob(
                self,
                FileJob.of(index, places, self._reading, finished.is_open, lambda count: progress.update("", count)),
            )

    @property
    def style(self) -> Style:
        return choose_style(self.request.needed_style, self.llm.tokenizer)

    @property
    def _reading(self) -> LineReading:
        maker = self.llm.row_maker
        return LineReading(
            self.llm.tokenizer, self.style, maker.size, partial(prefix_finder, self.llm.plan), maker.longest_prompt
        )


@dataclass(frozen=True)
class BatchJob:
    """The requests that are left, and how they are run."""

    prepared: PreparedBatch
    left: FileJob

    @property
    def request(self) -> BatchRequest:
        return self.prepared.request

    @property
    def llm(self) -> LLM:
        return self.prepared.llm

    # -- the plan ------------------------------------------------------------------------------------------------------

    @cached_property
    def parts(self) -> Sequence[FileJob]:
        """The requests of each process."""
        return dealt_requests(self.left, self.request.site.gpus)

    @property
    def _largest_part(self) -> FileJob:
        return max(self.parts, key=lambda part: sum(part.sizes.prompt_lens) + sum(part.sizes.gen_lens))

    def find_plan(self) -> None:
        """Finds a plan if none was given. What the answers depend on must be as it was when the job began."""
        asked = self.request.plan
        if not isinstance(asked, Plan):
            workload = workload_of_job(self._largest_part, self.llm.plan, self.llm.spec)
            finder = PlanFinder(
                self.llm.loaded.with_heads(asked), self.llm.loaded, self.llm.loaded.machines(self.request.machine)
            )
            self.tell(finder.find(PlanNeed(workload)).lines())
        self.request.refuse_other(plan_settings(self.llm.plan))

    @cached_property
    def plan_report(self) -> PlanReport:
        planned = {id(part): self.llm.plan_job(part) for part in self.parts}  # each has to fit
        return PlanReport.of(self.llm.loaded, planned[id(self._largest_part)])

    def show_plan(self) -> None:
        """Tells of the plan, for a job that is not run."""
        counts = {"requests": len(self.left.index), "refused": self.left.index.num_refused + len(self.left.refused)}
        if not len(self.left.sizes):
            say_document(counts)
            return
        self.find_plan()
        self.tell(self.plan_lines())
        say_slow(plan_reasons(self.plan_report.planned, self.plan_report.arithmetic))
        say_document({**self.plan_report.as_json(), **counts})

    def tell(self, lines: Iterable[str]) -> None:
        if self.request.verbose:
            say(lines)

    # -- the run -------------------------------------------------------------------------------------------------------

    def run(self, output: JobOutput) -> FinishedJob:
        """Runs what is left."""
        is_crowded = False
        if len(self.left.sizes) and self.request.ray is None:
            self.find_plan()
            self.tell(self.plan_lines())
            say_slow(plan_reasons(self.plan_report.planned, self.plan_report.arithmetic))
            is_crowded = say_threads(self.request.others, self.request.site.threads, self.plan_report.arithmetic)
        manifest = self._manifest()
        manifest.write(self.request.files.manifest)
        style, labels, adapters = self.prepared.style, self.llm.spec.labels, self.llm.loaded.adapters.names
        records = RecordMaker(Answers(self.request.model.name, style, labels, adapters), manifest.created)
        run = JobRun(
            self.llm,
            self.left,
            records,
            output,
            manifest.seed,
            self.request.files.metrics,
            self._elsewhere(manifest.seed),
            is_crowded,
        )
        run.record_refused()
        figures = run.to_the_end() if len(self.left.sizes) else None
        finished, machine = output.finished, describe_machine(self.llm.device)
        peaks = None if self.llm.stats is None else self.llm.stats.peaks
        counts = len(self.left.index), finished.num_failed, self.left.index.num_refused + len(self.left.refused)
        of_prefixes = self.llm.loaded.prefix_counts
        ended = FinishedJob(output.path, *counts, manifest.seed, self.left.sizes, figures, machine, peaks, of_prefixes)
        replace(manifest, result=ended.result).write(self.request.files.manifest)
        self.tell(end_lines(finished, output.path, figures))
        self.tell(prefix_files_entry(of_prefixes).lines if of_prefixes is not None else ())
        if peaks is not None:
            say_broken(peaks)
        if self.llm.stats is not None:
            say_slow(unrecorded_reason(self.llm.stats.unrecorded))
        return ended

    def _elsewhere(self, seed: int) -> Elsewhere | None:
        """What runs requests, if not this process."""
        if self.request.ray is not None:
            return partial(self._on_workers, self.request.ray, seed)
        if len(self.parts) > 1:
            return partial(outcomes_of_processes, self.llm, self.request, seed)
        return None

    def plan_lines(self) -> Iterator[str]:
        yield from self.plan_report.lines()
        yield from together(len(self.parts), len(self.left.sizes), self.llm.device.accelerator).lines

    def _on_workers(self, asked: RayRequest, seed: int, left: FileJob, listening: Listening) -> Generator[Outcome, None, None]:
        with ray_environment() if asked.address == LOCAL else nullcontext():
            from h2o_flexgen.cli.ray_job import RayJob  # imports an optional package

            yield from RayJob(self.request, asked, left, seed, self.prepared.settings, listening).outcomes()

    def _manifest(self) -> Manifest:
        request, begun, now = self.request, self.request.begun, int(time.time())
        settings = {**self.prepared.settings, **plan_settings(self.llm.plan)}
        plan = self.llm.plan.as_json() if len(self.left.sizes) else None
        run = {"began": now, "arguments": request.arguments, "versions": versions(), "model": request.model.name, "plan": plan}
        if begun is None:
            seed = resolve_seed(request.seed)
            begun = Manifest(now, seed, request.checked.whole, settings, self.prepared.noted)
        seed = begun.seed if request.seed is None else request.seed
        return replace(begun, seed=seed, settings=settings, checked=request.checked.whole).with_run(run)


# -- on workers of Ray -------------------------------------------------------------------------------------------------

RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",  # what goes wrong for good is raised
    "RAY_memory_monitor_refresh_ms": "0",  # the engine keeps its own promise, and goes on with less when memory runs out
}
RAY_AUTH_MODE, RAY_TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"


@contextmanager
def ray_environment() -> Iterator[None]:
    """A context for a cluster of this process's own: without its token, no process can hand workers anything."""
    settings = dict(RAY_SETTINGS)
    if "ray" not in sys.modules:  # otherwise it has chosen to do without
        settings |= {RAY_AUTH_MODE: "token", RAY_TOKEN: secrets.token_hex(32)}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
