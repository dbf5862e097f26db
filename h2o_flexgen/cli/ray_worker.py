"""A worker of a job on Ray: an actor that opens the model under a plan for its own machine, and runs the requests that it is
handed, a portion at a time."""

from __future__ import annotations

import socket
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace

from h2o_flexgen.cli.common_requests import ModelRequest, SiteRequest
from h2o_flexgen.cli.open_llm import make_llm
from h2o_flexgen.cli.process_link import Broken
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.engine.executor import TaskFailed
from h2o_flexgen.engine.job import Request
from h2o_flexgen.engine.row_maker import RowMaker
from h2o_flexgen.engine.stage import Stage
from h2o_flexgen.engine.tick import Tick
from h2o_flexgen.evaluation.answer_settings import TOKENIZER, WEIGHTS, model_settings
from h2o_flexgen.jobs.file_job import LineReading
from h2o_flexgen.jobs.index import read_line
from h2o_flexgen.jobs.line import LineReader
from h2o_flexgen.jobs.manifest import Settings
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.plan_requirements import PlanRequirements
from h2o_flexgen.ray import memory_of_actor
from h2o_flexgen.sampling.completion import Completion
from h2o_flexgen.sampling.sampler import NoTokenLeft
from h2o_flexgen.session.auto_plan import AutoPlan
from h2o_flexgen.text.dialogue import choose_style


@dataclass(frozen=True)
class Portion:
    """Requests that a worker is handed at once: their numbers, and their lines as they stand in the input."""

    number: int
    lines: tuple[tuple[int, bytes], ...]


@dataclass(frozen=True)
class Opened:
    """A worker that has begun."""

    host: str
    plan: Plan

    def __str__(self) -> str:
        plan = self.plan
        percent = " ".join(f"{share:g}" for share in plan.percent)
        return f"on {self.host}, percent {percent}, {plan.num_gpu_batches} batches of {plan.gpu_batch_size}"


@dataclass(frozen=True)
class WorkerMessage:
    """What a worker says of a portion: a request that has ended, how far it is, or why it cannot go on. It says that it has
    begun before it has a portion."""

    portion: int | None = None
    completion: Completion | None = None
    broken: Broken | None = None
    tick: Tick | None = None  # the last one of this portion
    opened: Opened | None = None
    failure: str | None = None

    @property
    def ended(self) -> int | None:
        """The number of the request that has ended."""
        return self.completion.index if self.completion is not None else self.broken.number if self.broken is not None else None


@dataclass(frozen=True)
class SharedJob:
    """What workers need to know of a job."""

    model: ModelRequest
    site: SiteRequest
    plan: Plan | PlanRequirements
    reader: LineReader
    style: str | None  # how chats are written down; None: there are none
    seed: int
    identity: Settings  # of the model, wherever it is opened
    longest: Workload  # at least as long as any portion, row by row
    scores_texts: bool


class Worker:
    """The class of the actors. What a person can mend is said, and not raised, so that it arrives in one line."""

    def __init__(self, share: SharedJob) -> None:
        self._share = share

    def open(self) -> Iterator[WorkerMessage]:
        try:
            self._open()
            yield WorkerMessage(opened=Opened(socket.gethostname(), self._llm.plan))
        except (ValueError, TaskFailed, OSError, MemoryError) as error:
            yield _failed(None, error)

    def _open(self) -> None:
        share = self._share
        asked, site = share.plan, share.site
        memory = memory_of_actor() if site.cpu_mem is None else None
        site = site if memory is None else replace(site, cpu_mem=str(memory))
        self._llm = make_llm(share.model, site, asked if isinstance(asked, Plan) else asked.plan, _nobody)
        self._refuse_another_model()
        if not isinstance(asked, Plan):
            AutoPlan(asked, share.model.dtype).provide(self._llm, share.longest, share.scores_texts, _nobody)
        style = None if share.style is None else choose_style(share.style, self._llm.tokenizer)
        sizes = RowMaker(self._llm.spec, self._llm.plan, self._llm.tokenizer).size
        self._reading = LineReading(self._llm.tokenizer, style, sizes)

    def _refuse_another_model(self) -> None:
        here = model_settings(self._llm)[0]
        for name in (f"the model's {WEIGHTS}", f"the model's {TOKENIZER}"):
            if here.get(name) != self._share.identity.get(name):
                where = f"{self._share.model.source} is another model there than on the machine that started the job"
                raise ValueError(f"{where} ({name} differ); put the same files on every machine")

    def run(self, portion: Portion) -> Iterator[WorkerMessage]:
        try:
            requests = [self._request(number, line) for number, line in portion.lines]
            left = {request.index: request for request in requests}
            while left:
                broken = yield from self._run(portion.number, left)
                if broken is not None:
                    yield WorkerMessage(portion.number, broken=broken)
        except (ValueError, TaskFailed, OSError, MemoryError) as error:
            yield _failed(portion.number, error)

    def _run(self, portion: int, left: dict[int | None, Request]) -> Generator[WorkerMessage, None, Broken | None]:
        """Runs requests until all are done, or until one breaks. Those that have ended are taken out."""
        ticks: list[Tick] = []
        try:
            for done in self._llm.generate_stream(
                [*left.values()], seed=self._share.seed, on_tick=ticks.append, on_stage=_nobody
            ):
                del ticks[:-1]
                del left[done.index]
                yield WorkerMessage(portion, done, tick=ticks[-1] if ticks else None)
        except TaskFailed as failed:
            if not isinstance(failed.cause, NoTokenLeft):
                raise
            number = failed.cause.number
            del left[number]
            return Broken(number, str(failed.cause))
        yield WorkerMessage(portion, tick=ticks[-1])
        return None

    def _request(self, number: int, line: bytes) -> Request:
        return self._reading.request(number, read_line(self._share.reader, line))


def _failed(portion: int | None, error: Exception) -> WorkerMessage:
    return WorkerMessage(portion, failure=f"{socket.gethostname()}: {error}")


def _nobody(stage: Stage, done_bytes: int = 0, total_bytes: int = 0) -> None:
    """Listens to stages where there is no terminal to show them."""
