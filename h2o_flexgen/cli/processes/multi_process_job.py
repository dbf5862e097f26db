"""A job over a file that several processes do, each with a GPU and a part of the requests. Their records are written here, as
they finish."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from h2o_flexgen.cli.batch_request import BatchRequest
from h2o_flexgen.cli.job_run import Listening
from h2o_flexgen.cli.processes.link import AtStage, Noted
from h2o_flexgen.cli.processes.process import RequestsPart
from h2o_flexgen.cli.processes.supervisor import Processes
from h2o_flexgen.core.dealing import dealt
from h2o_flexgen.engine.job import BrokenRequest, Outcome
from h2o_flexgen.engine.reports import Tick
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


def outcomes_of_processes(
    llm: LLM, request: BatchRequest, seed: int, left: FileJob, listening: Listening
) -> Generator[Outcome, None, None]:
    """What becomes of the requests that are left of a job, as processes say it."""
    parts = [RequestsPart(part.apart, request.needed_style, seed) for part in dealt_requests(left, request.site.gpus)]
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
