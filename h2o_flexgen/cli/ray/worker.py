"""A worker of a job on Ray: an engine under a plan for its own machine, which runs the requests that it is handed, a portion at
a time."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from h2o_flexgen.core.workload import Workload
from h2o_flexgen.engine.executor import TaskFailed
from h2o_flexgen.engine.job import Outcome, Request
from h2o_flexgen.engine.tick import Tick
from h2o_flexgen.evaluation.answer_settings import TOKENIZER, WEIGHTS, model_settings
from h2o_flexgen.jobs.file_job import LineReading
from h2o_flexgen.jobs.index import read_line
from h2o_flexgen.jobs.line import LineReader
from h2o_flexgen.jobs.manifest import Settings
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.plan_requirements import PlanRequirements
from h2o_flexgen.ray import Engine
from h2o_flexgen.session.auto_plan import AutoPlan


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
    """What a worker says of a portion: what became of a request, how far it is, or why it cannot go on. It says that it has
    begun before it has a portion."""

    portion: int | None = None
    outcome: Outcome | None = None
    tick: Tick | None = None  # the last one of this portion
    opened: Opened | None = None
    failure: str | None = None


@dataclass(frozen=True)
class SharedJob:
    """What workers need to know of a job."""

    engine: Mapping[str, object]  # the arguments of the Engine of each
    asked: PlanRequirements | None  # what a plan is found for; None: the engine is given one
    reader: LineReader
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
            yield WorkerMessage(opened=Opened(socket.gethostname(), self._engine.llm.plan))
        except (ValueError, TaskFailed, OSError, MemoryError) as error:
            yield _failed(None, error)

    def _open(self) -> None:
        share = self._share
        self._engine = Engine(**share.engine)  # type: ignore[arg-type]
        llm = self._engine.llm
        self._refuse_another_model()
        if share.asked is not None:
            AutoPlan(share.asked, str(share.engine["dtype"])).provide(llm, share.longest, share.scores_texts, None)
        self._reading = LineReading(llm.tokenizer, self._engine.style, self._engine.row_maker.size)

    def _refuse_another_model(self) -> None:
        here = model_settings(self._engine.llm)[0]
        for name in (f"the model's {WEIGHTS}", f"the model's {TOKENIZER}"):
            if here.get(name) != self._share.identity.get(name):
                where = f"{self._engine.llm.name} is another model there than on the machine that started the job"
                raise ValueError(f"{where} ({name} differ); put the same files on every machine")

    def run(self, portion: Portion) -> Iterator[WorkerMessage]:
        ticks: list[Tick] = []
        try:
            requests = [self._request(number, line) for number, line in portion.lines]
            for outcome in self._engine.outcomes(requests, ticks.append):
                del ticks[:-1]
                yield WorkerMessage(portion.number, outcome, ticks[-1] if ticks else None)
            if ticks:
                yield WorkerMessage(portion.number, tick=ticks[-1])
        except (ValueError, TaskFailed, OSError, MemoryError) as error:
            yield _failed(portion.number, error)

    def _request(self, number: int, line: bytes) -> Request:
        return self._reading.request(number, read_line(self._share.reader, line))


def _failed(portion: int | None, error: Exception) -> WorkerMessage:
    return WorkerMessage(portion, failure=f"{socket.gethostname()}: {error}")
