"""Work that several processes share, each with a GPU. A run: prompts are dealt to them, texts come back with the numbers and
the draws that they would have had in one process, and the report is of all. A job over a file: each runs some of the requests,
and their records are written here, as they finish.

The processes are started, looked after, and ended whatever happens. An error of one ends all of them. Nothing is left of them:
what they share has no name, and a lifeline that breaks with this process ends them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from h2o_flexgen.cli.batch_request import BatchRequest
from h2o_flexgen.cli.batch_run import Listening
from h2o_flexgen.cli.errors import Mendable
from h2o_flexgen.cli.process import ProcessPart, ProcessPlace, PromptsPart, RequestsPart, compute
from h2o_flexgen.cli.process_link import AtStage, BytesTaken, Failed, Loaded, News, Noted, PartDone, Passing, ProcessLink
from h2o_flexgen.cli.report import Entry, document_of, lines_of
from h2o_flexgen.cli.report.summary import Timing, completion_lines, peaks_entry, say_broken, summary
from h2o_flexgen.cli.run_job import RunJob
from h2o_flexgen.cli.terminal import page_width, say, say_document, table
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
from h2o_flexgen.memory.disk import OffloadFolder
from h2o_flexgen.memory.host import file_in_memory, peak_resident_bytes
from h2o_flexgen.sampling.completion import Completion
from h2o_flexgen.sampling.sampler import resolve_seed
from h2o_flexgen.session.open_request import ModelRequest, SiteRequest

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
        say(["", *self._table(), f"weights in CPU memory that they share: {format_bytes(shared)}"])
        told = summary(job.llm.spec, job.workload, self.timing, peaks.peak_bytes[DEVICE])
        say(["", *lines_of(told)])
        say_broken(peaks)
        say_document(self._json(told, peaks, shared))

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


# -- the processes ---------------------------------------------------------------------------------------------------------

START = """\
import json, signal, sys
ours = {signal.SIGINT, signal.SIGHUP}  # a terminal sends these to all; only the process that looks after the others answers
for one in ours: signal.signal(one, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, ours)
sys.path[:] = json.loads(sys.argv[1])
from h2o_flexgen.cli.process_link import begin
sys.exit(begin(int(sys.argv[2]), int(sys.argv[3])))
"""
PATIENCE_SECONDS = 30.0  # within which a process that was told to end does
FOLDER = "process-{}"
Waits: TypeAlias = Callable[[], AbstractContextManager[object]]  # makes a context in which nothing is done but wait


class Processes:
    """Processes that do parts of a job, until the end of a `with`."""

    def __init__(self, llm: LLM, model: ModelRequest, site: SiteRequest, parts: Sequence[ProcessPart]) -> None:
        self._llm, self._model, self._site, self._parts = llm, model.without_measuring, site, parts
        self._links: list[ProcessLink] = []
        self.exchange = ProcessExchange(self._links, self._name, self._death)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ending = ExitStack()

    # -- from the beginning to the end ---------------------------------------------------------------------------------

    def __enter__(self) -> Processes:
        with ExitStack() as undo:
            undo.push(self.__exit__)
            self._start()
            undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ending.close()

    def _start(self) -> None:
        folder = OffloadFolder(self._llm.loaded.offload_folder)
        self._ending.callback(folder.close)
        self._ending.callback(self._remove_folders, folder.path)
        weights, passing = (self._held(file_in_memory()) for _ in range(2))
        ours, lifeline = os.pipe()
        self._held(ours)
        self._ending.callback(self._wait)
        self._ending.callback(self._close_links)
        self._held(lifeline)  # the first to be closed
        for number, part in enumerate(self._parts):
            site = replace(
                self._site.of_each,
                gpus=1,
                device=self.device(number),
                cpu_mem=self._llm.limits.host,
                offload_dir=str(folder.path.absolute() / FOLDER.format(number)),
            )
            place = ProcessPlace(number, self._model, site, self._llm.plan, weights, passing)
            self._links.append(self._started((weights, passing, ours)))
            self._links[-1].say((compute, (place, part)))

    def _held(self, descriptor: int) -> int:
        self._ending.callback(os.close, descriptor)
        return descriptor

    def _started(self, descriptors: tuple[int, ...]) -> ProcessLink:
        mine, its = Pipe()
        command = [sys.executable, "-c", START, json.dumps(sys.path), str(its.fileno()), str(descriptors[-1])]
        with its, _signals_held():
            self._processes.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else subprocess.DEVNULL,
                    pass_fds=(its.fileno(), *descriptors),
                )
            )
        return ProcessLink(mine)

    def _close_links(self) -> None:
        for link in self._links:
            link.connection.close()

    def _wait(self) -> None:
        """Waits for all processes after their lifeline is closed. A process that takes too long is killed."""
        until = time.monotonic() + PATIENCE_SECONDS
        try:
            for process in self._processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, until - time.monotonic()))
        finally:
            for process in self._processes:
                process.kill()
                process.wait()

    def _remove_folders(self, folder: Path) -> None:
        """Removes what a process that was killed has left; its files had no names."""
        for number in range(len(self._processes)):
            with suppress(OSError):
                (folder / FOLDER.format(number)).rmdir()

    # -- what they say -------------------------------------------------------------------------------------------------

    def said(self, waits: Waits) -> Iterator[tuple[int, News]]:
        """What processes say of the job, until all have ended."""
        yield from self.exchange.said(waits)
        for process in self._processes:  # they close what they have opened
            with suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE_SECONDS)

    def device(self, number: int) -> str:
        return self._llm.device.names_of(len(self._parts))[number]

    def _name(self, number: int) -> str:
        return f"process {number} of {len(self._parts)} ({self.device(number)})"

    def _death(self, number: int) -> str:
        status = self._processes[number].wait()
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"{how}, and so are the others; if memory ran out, give fewer processes or smaller blocks"


@contextmanager
def _signals_held() -> Iterator[None]:
    """A context in which a process is started that is not to hear of a terminal's signals before it can ignore them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _has_descriptor(stream: Any) -> bool:
    try:
        stream.fileno()
    except (OSError, ValueError, AttributeError):
        return False
    return True


class ProcessExchange:
    """Messages of a job's processes go to each other, or to the process that runs the job."""

    def __init__(self, links: Sequence[ProcessLink], name: Callable[[int], str], death: Callable[[int], str]) -> None:
        """`name` is what people call a process, and `death` says how one has ended that did not say that it would."""
        self.shared_bytes = 0  # of weights in host memory
        self._links, self._name, self._death = links, name, death
        self._not_taken = 0  # processes that have yet to take what is handed round

    def said(self, waits: Waits) -> Iterator[tuple[int, News]]:
        """What processes say of the job, each with its number, until all have ended. An error of one of them is raised."""
        number_of: dict[Any, int] = {link.connection: number for number, link in enumerate(self._links)}
        while number_of:
            with waits():
                ready: Sequence[Any] = wait(list(number_of))
            for connection in ready:
                number = number_of[connection]
                message = self._heard(connection, number)
                if not self._is_passed_on(message):
                    yield number, message
                if isinstance(message, PartDone):
                    del number_of[connection]

    def _heard(self, connection: Any, number: int) -> Any:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            raise self._of_death(number) from None
        if isinstance(message, Failed):
            if message.line is None:
                raise RuntimeError(f"{self._name(number)}:\n{message.trace}")
            raise Mendable(f"{self._name(number)}: {message.line}")
        return message

    def _is_passed_on(self, message: object) -> bool:
        """Passes a message on if it is for other processes."""
        if isinstance(message, Loaded):
            self.shared_bytes = message.shared_bytes
        if isinstance(message, Passing):
            self._not_taken = len(self._links) - 1
        if isinstance(message, (Loaded, Passing)):
            for number in range(1, len(self._links)):
                self._tell(number, message)
            return True
        if isinstance(message, BytesTaken):
            self._not_taken -= 1
            if not self._not_taken:
                self._tell(0, message)
            return True
        return False

    def _tell(self, number: int, message: object) -> None:
        try:
            self._links[number].say(message)
        except OSError:
            raise self._of_death(number) from None

    def _of_death(self, number: int) -> Mendable:
        return Mendable(f"{self._name(number)} {self._death(number)}")
