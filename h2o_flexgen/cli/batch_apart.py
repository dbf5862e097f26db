"""A job over a file that several processes do, each with a GPU and a part of the requests. Their records are written here, as
they finish."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from h2o_flexgen.cli.batch_request import BatchRequest
from h2o_flexgen.cli.batch_run import Listening, OnBroken
from h2o_flexgen.cli.batch_watch import Ticks
from h2o_flexgen.cli.process import RequestsPart
from h2o_flexgen.cli.process_link import AtStage, Broken, Noted
from h2o_flexgen.cli.processes import Processes
from h2o_flexgen.core.dealing import dealt
from h2o_flexgen.engine.tick import Tick
from h2o_flexgen.jobs.file_job import FileJob
from h2o_flexgen.llm import LLM
from h2o_flexgen.sampling.completion import Completion


def dealt_requests(job: FileJob, processes: int) -> Sequence[FileJob]:
    """The requests of each process. Those that share a prefix stay together as far as possible."""
    sizes = job.sizes
    if processes == 1 or len(sizes) < 2:
        return [job]
    work = [size.rows * (size.prompt_len + size.gen_len) for size in sizes]
    groups = None if job.prefixes is None else job.prefixes.groups
    parts = ({job.places[place] for place in places} for places in dealt(work, min(processes, len(work)), groups))
    return [job.only(places.__contains__) for places in parts]


@dataclass(frozen=True)
class JobApart:
    """The requests that are left of a job, for processes."""

    llm: LLM
    request: BatchRequest
    seed: int

    def completions(self, left: FileJob, listening: Listening, on_broken: OnBroken) -> Generator[Completion, None, None]:
        request, ticks = self.request, Ticks()
        style = request.style if request.checked.chats else None
        parts = [RequestsPart(part.apart, style, self.seed) for part in dealt_requests(left, request.site.gpus)]
        with Processes(self.llm, request.model, request.site, parts) as processes:
            for number, news in processes.said(listening.interrupts.put_aside):  # nothing is lost by ending then
                if isinstance(news, Completion):
                    yield news
                elif isinstance(news, Broken):
                    on_broken(news.number, news.reason, listening)
                elif isinstance(news, Tick):
                    ticks.latest[number] = news
                    listening.tick(ticks.together)
                elif isinstance(news, AtStage) and number == 0:
                    listening.stage(news.stage, news.done_bytes, news.total_bytes)
                elif isinstance(news, Noted):
                    listening.progress.note(f"process {number}: {news.line}")
