"""Work that several processes share, each with a GPU. A run: prompts are dealt to them, texts come back with the numbers and
the draws that they would have had in one process, and the report is of all. A job over a file: each runs some of the requests,
and their records are written here, as they finish."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from h2o_flexgen.cli.batch_request import BatchRequest
from h2o_flexgen.cli.batch_run import Listening
from h2o_flexgen.cli.processes.link import AtStage, Noted, PartDone
from h2o_flexgen.cli.processes.process import PromptsPart, RequestsPart
from h2o_flexgen.cli.processes.supervisor import Processes
from h2o_flexgen.cli.report import Entry, document_of, lines_of
from h2o_flexgen.cli.report.summary import Timing, completion_lines, peaks_entry, say_broken, summary
from h2o_flexgen.cli.run_job import RunJob
from h2o_flexgen.cli.terminal import page_width, say, table
from h2o_flexgen.cli.watch import show_stage
from h2o_flexgen.core.site import DEVICE, HOST, TIERS
from h2o_flexgen.core.units import format_bytes
from h2o_flexgen.core.workload import dealt
from h2o_flexgen.engine.job import BrokenRequest, Outcome
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.engine.reports import Tick
from h2o_flexgen.engine.stats import Peaks, Stats
from h2o_flexgen.jobs.file_job import FileJob
from h2o_flexgen.llm import LLM
from h2o_flexgen.memory.host import peak_resident_bytes
from h2o_flexgen.sampling.completion import Completion
from h2o_flexgen.sampling.sampler import resolve_seed

SHOWN = (
    "num_prompts", "prompt_tokens", "generated_tokens", "prefill_seconds", "decode_seconds", "moved_bytes", "moved_by_data",
    "busy_seconds", "peak_bytes", "shrunk",
)  # fmt: skip  # figures of each process in the JSON


# -- a run -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunApart:
    """A run that divides its prompts among processes."""

    job: RunJob
    seed: int
    completions: list[Completion] = field(default_factory=list)
    stats: dict[int, Stats] = field(default_factory=dict)  # of each process that has ended
    names: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, job: RunJob) -> RunApart:
        return cls(job, resolve_seed(job.request.seed))

    def run(self) -> None:
        job = self.job
        parts = [*self._parts()]
        with (
            Progress(job.workload.num_prompts, "run") as progress,
            Processes(job.llm, job.request.model, job.request.site, parts) as processes,
        ):
            progress.stage(f"starting {len(parts)} processes")
            for number, news in processes.said(nullcontext):
                self._take(number, news, progress)
            self.names.update({number: processes.device(number) for number in range(len(parts))})
        self.completions.sort(key=lambda one: one.index)
        self._tell(processes.exchange.shared_bytes)

    def _parts(self) -> Iterator[PromptsPart]:
        prompts, sampling = self.job.prompts, self.job.request.sampling
        for numbers in dealt(self.job.workload.prompt_lens, self.job.processes):
            yield PromptsPart([prompts[number] for number in numbers], numbers, sampling, self.seed)

    def _take(self, number: int, news: object, progress: Progress) -> None:
        if isinstance(news, Completion):
            self.completions.append(news)
            if self.job.output is not None:
                self.job.output.add(news)
            progress.update("prompts", len(self.completions))
        elif isinstance(news, AtStage) and number == 0:
            show_stage(progress, news.stage, news.done_bytes, news.total_bytes)
        elif isinstance(news, Noted):
            progress.note(f"process {number}: {news.line}")
        elif isinstance(news, PartDone):
            assert news.stats is not None, "each process has a prompt"
            self.stats[number] = news.stats
        else:
            assert isinstance(news, (AtStage, BrokenRequest, Tick)), news

    # -- what all of them did ------------------------------------------------------------------------------------------

    @property
    def timing(self) -> Timing:
        """Processes run at the same time: the one that takes longest counts."""
        each = self.stats.values()
        prefill, decode = (max(getattr(one, name) for one in each) for name in ("prefill_seconds", "decode_seconds"))
        prompts, generated = (sum(getattr(one, name) for one in each) for name in ("prompt_tokens", "generated_tokens"))
        return Timing(len(self.completions), prompts, generated, prefill, decode)

    def peaks(self, shared: int) -> Peaks:
        """The peaks of memory: on a device of one process, elsewhere of all together. They share the weights in host memory."""
        each = {tier: [one.peak_bytes.get(tier, 0) for one in self.stats.values()] for tier in TIERS}
        beside = {HOST: peak_resident_bytes() - shared * (len(self.stats) - 1)}
        held = {tier: max(peaks) if tier == DEVICE else sum(peaks) + beside.get(tier, 0) for tier, peaks in each.items()}
        return Peaks(held, self.job.llm.limits.exceeded_by(held))

    def _tell(self, shared: int) -> None:
        job, peaks = self.job, self.peaks(shared)
        if job.output is not None:
            job.output.finish(self.completions)
        if job.request.verbose:
            say(["", *completion_lines(self.completions, job.request.verbose >= 2, job.llm.tokenizer.reads_texts)])
        say(["", *self._table(), f"weights in host memory that they share: {format_bytes(shared)}"])
        told = summary(job.llm.spec, job.workload, self.timing, peaks.peak_bytes[DEVICE])
        say(["", *lines_of(told)])
        say_broken(peaks)
        print(json.dumps(self._json(told, peaks, shared)), flush=True)

    def _table(self) -> list[str]:
        rows = [["process", "device", "prompts", "tokens", "prefill s", "decode s", "busiest lane"]]
        for number, one in sorted(self.stats.items()):
            seconds = f"{one.prefill_seconds:.3f}", f"{one.decode_seconds:.3f}"
            busiest = max(one.busy_seconds, key=lambda lane: one.busy_seconds[lane], default="")
            counts = str(one.num_prompts), str(one.generated_tokens)
            rows.append([str(number), self.names[number], *counts, *seconds, busiest])
        return table(rows, page_width())

    def _json(self, told: Sequence[Entry], peaks: Peaks, shared: int) -> dict[str, object]:
        job = self.job
        each = [
            {"device": self.names[number], **{name: getattr(one, name) for name in SHOWN}}
            for number, one in sorted(self.stats.items())
        ]
        return {
            **job.plan_as_json(),
            **document_of(told),
            **peaks_entry(peaks).values,
            "shared_bytes": shared,
            "seed": self.seed,
            "processes": each,
            **({} if job.predicted is None else {"predicted": job.predicted.as_json()}),
        }


# -- a job over a file -----------------------------------------------------------------------------------------------------


def dealt_requests(job: FileJob, processes: int) -> Sequence[FileJob]:
    """The requests of each process. Those that share a prefix stay together as far as possible."""
    sizes = job.sizes
    if processes == 1 or len(sizes) < 2:
        return [job]
    work = [size.rows * (size.prompt_len + size.gen_len) for size in sizes]
    groups = None if job.prefixes is None else job.prefixes.groups
    parts = ({job.places[place] for place in places} for places in dealt(work, min(processes, len(work)), groups))
    return [job.only(places.__contains__) for places in parts]


def outcomes_of_processes(
    llm: LLM, request: BatchRequest, seed: int, left: FileJob, listening: Listening
) -> Generator[Outcome, None, None]:
    """What becomes of the requests that are left of a job, as processes say it."""
    parts = [RequestsPart(part.sent, request.needed_style, seed) for part in dealt_requests(left, request.site.gpus)]
    with Processes(llm, request.model, request.site, parts) as processes:
        for number, news in processes.said(listening.interrupts.put_aside):  # nothing is lost by ending then
            if isinstance(news, (Completion, BrokenRequest)):
                yield news
            elif isinstance(news, Tick):
                listening.tick_of(number, news)
            elif isinstance(news, AtStage) and number == 0:
                listening.stage(news.stage, news.done_bytes, news.total_bytes)
            elif isinstance(news, Noted):
                listening.progress.note(f"process {number}: {news.line}")
