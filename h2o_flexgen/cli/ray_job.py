"""A job on workers of Ray: portions of requests go out to actors, and completions come back as they finish. When a worker dies,
another one takes its place, and what its portion still lacks is handed out again: so nothing comes twice, and nothing is
missing at the end.

Workers are engines, each under a plan for its own machine. At the end of a portion few rows run, so there are few portions:
each is a share of the work that is left. So the first ones are large, and the last ones let all workers end together.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event
from typing import Any

import ray

from h2o_flexgen.cli.batch_request import LOCAL, RESUME, BatchRequest, RayRequest
from h2o_flexgen.cli.batch_run import Listening
from h2o_flexgen.cli.interrupts import Aside
from h2o_flexgen.cli.ray_cluster import Pool, answer_sigterm_again, connected, joined, waiting
from h2o_flexgen.cli.slow import SLOW, one_worker_reason, small_job_reason
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.engine.executor import TaskFailed
from h2o_flexgen.engine.job import Outcome, Request
from h2o_flexgen.engine.reports import Stage, Tick
from h2o_flexgen.evaluation.answer_settings import TOKENIZER, WEIGHTS, model_settings
from h2o_flexgen.jobs.file_job import FileJob, LineReading
from h2o_flexgen.jobs.index import read_line
from h2o_flexgen.jobs.line import LineReader
from h2o_flexgen.jobs.output import Settings
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.plan_requirements import PlanRequirements
from h2o_flexgen.ray import Engine
from h2o_flexgen.session.open_request import OpenRequest
from h2o_flexgen.session.plan_finder import AutoPlan

POLL_SECONDS = 0.2  # within which the end of the job is seen
RETRIES = 3  # how often requests are run again after their worker died: one of them may be the cause
LONGEST_REASON = 200  # characters
SHARE = 2  # a portion is one of so many parts of what a worker would still have to do
MOST_PORTION = 4096  # requests: their lines are held in memory and sent at once


# -- a worker --------------------------------------------------------------------------------------------------------------


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

    opening: OpenRequest  # of the model, on each
    seed: int
    style: str  # how chats are written down
    asked: PlanRequirements | None  # what a plan is found for; None: the request has it
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
        self._engine = Engine.of(share.opening, share.seed, share.style)
        llm = self._engine.llm
        self._refuse_another_model()
        if share.asked is not None:
            AutoPlan(share.asked, llm.loaded).provide(share.longest, share.scores_texts, None)
        maker = self._engine.row_maker
        self._reading = LineReading(llm.tokenizer, self._engine.style, maker.size, longest=maker.longest_prompt)

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


# -- portions --------------------------------------------------------------------------------------------------------------


def cut(places: Sequence[int], work: Sequence[int], workers: int, least: int) -> list[Sequence[int]]:
    """Portions of places, in order. `work` has the tokens of each place. A portion has `least` tokens, unless a worker would
    have nothing to do then. One worker gets all."""
    left, portions, start = sum(work), list[Sequence[int]](), 0
    least = min(least, -(-left // workers))
    while start < len(places):
        enough = left if workers == 1 else max(least, left // (SHARE * workers))
        end, load = start, 0
        while end < len(places) and end - start < MOST_PORTION and (load < enough or end == start):
            load += work[end]
            end += 1
        portions.append(places[start:end])
        start, left = end, left - load
    return portions


def cut_evenly(places: Sequence[int], count: int) -> list[Sequence[int]]:
    """Portions of so many places each, but for the last."""
    return [places[start : start + count] for start in range(0, len(places), count)]


# -- handing out -----------------------------------------------------------------------------------------------------------


def new_actor(pool: Pool, share: Any) -> Any:
    """A worker that Ray starts where there is room. When it dies, Ray does nothing: what it lacks is known here."""
    actor = ray.remote(Worker).options(num_cpus=pool.cpus, num_gpus=pool.gpus, max_restarts=0, max_task_retries=0)
    return actor.remote(share)


@dataclass(frozen=True)
class Lost:
    """A worker that died, and the requests that are handed out again."""

    portion: int | None
    requests: int
    reason: str

    def __str__(self) -> str:
        return f"a worker has died ({self.reason}); another one starts, and {self.requests} requests are run again"


@dataclass(frozen=True)
class WaitingPortions:
    """The numbers of requests that are to be handed out together."""

    numbers: Sequence[int]
    tries: int = 0  # runs that ended because the worker died


@dataclass
class _Task:
    """What a worker is doing: it opens the model, or runs a portion."""

    worker: Any
    tries: int  # before this one
    portion: int | None = None
    left: dict[int, None] = field(default_factory=dict)  # numbers of requests, in order


@dataclass
class Handing:
    """Hands out portions until all requests have ended."""

    new_worker: Callable[[], Any]
    raw: Callable[[int], bytes]  # the line of a request
    workers: int
    waiting: deque[WaitingPortions]
    _tasks: dict[Any, _Task] = field(default_factory=dict)  # by what Ray knows each by
    _idle: list[Any] = field(default_factory=list)
    _portions: int = 0  # that were handed out

    def said(self, ending: Event) -> Iterator[WorkerMessage | Lost]:
        """What workers say. Returns soon after `ending` is set."""
        for _ in range(self.workers):
            self._open(0)
        while self._tasks and not ending.is_set():
            ready, _ = ray.wait([*self._tasks], num_returns=1, timeout=POLL_SECONDS)
            for stream in ready:
                yield from self._next(stream)

    def _next(self, stream: Any) -> Iterator[WorkerMessage | Lost]:
        task = self._tasks[stream]
        try:
            reference = next(stream, None)
            said = None if reference is None else ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            raise ValueError(f"a worker cannot go on: {_last_line(error)}; {RESUME} tries again") from error
        except ray.exceptions.RayError as error:
            yield self._lost(stream, _last_line(error))
            return
        if said is None:
            del self._tasks[stream]
            self._idle.append(task.worker)
            self._hand_out()
            return
        if said.outcome is not None:
            del task.left[said.outcome.index]
        yield said

    def _open(self, tries: int) -> None:
        worker = self.new_worker()
        self._tasks[worker.open.options(num_returns="streaming").remote()] = _Task(worker, tries)

    def _hand_out(self) -> None:
        while self._idle and self.waiting:
            worker, given, number = self._idle.pop(), self.waiting.popleft(), self._portions
            self._portions += 1
            portion = Portion(number, tuple((one, self.raw(one)) for one in given.numbers))
            stream = worker.run.options(num_returns="streaming").remote(portion)
            self._tasks[stream] = _Task(worker, given.tries, number, dict.fromkeys(given.numbers))

    def _lost(self, stream: Any, reason: str) -> Lost:
        """Puts what a worker that died has not done before everything that waits, and another worker in its place."""
        task = self._tasks.pop(stream)
        ray.kill(task.worker)  # it may be alive where it cannot be reached
        opens = task.portion is None
        if (task.left or opens) and task.tries == RETRIES:
            doing = "while they opened the model" if opens else f"while they ran the same {len(task.left)} requests"
            raise ValueError(f"{RETRIES + 1} workers have died {doing} ({reason}); {RESUME} goes on with what is left")
        if task.left:
            self.waiting.appendleft(WaitingPortions([*task.left], task.tries + 1))
        if self.waiting:
            self._open(task.tries + 1 if opens else 0)
        return Lost(task.portion, len(task.left), reason)


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:LONGEST_REASON]


# -- the job ---------------------------------------------------------------------------------------------------------------

LEAST_PORTION = 256  # requests, where nothing says how many a block holds: few blocks run empty then
BLOCKS = 4  # blocks that a portion fills at least, for the same reason


@dataclass(frozen=True)
class RayJob:
    """The requests that are left of a job, for workers."""

    request: BatchRequest
    asked: RayRequest
    left: FileJob
    seed: int
    identity: Settings  # of the model
    listening: Listening

    def outcomes(self) -> Generator[Outcome, None, None]:
        """What becomes of every request, once."""
        clock = _Clock()
        self._tell_before()
        aside = Aside(self._work, self._wait)
        with joined(self.asked.address), closing(aside.said()) as all_said:
            for said in all_said:
                if isinstance(said, Pool):
                    answer_sigterm_again()
                    clock.connected(said)
                    self._tell(f"workers: {said}; Ray has started after {clock.ray_seconds:.1f} s")
                elif isinstance(said, Lost):
                    self.listening.end_part(said.portion)
                    self._tell(str(said))
                else:
                    yield from self._heard(said, clock)
        if self.asked.address == LOCAL and (reason := small_job_reason(clock.workers, clock.ray_seconds, clock.run_seconds)):
            self.listening.progress.note(f"{SLOW}: {reason}")

    @contextmanager
    def _wait(self) -> Iterator[None]:
        with self.listening.interrupts.put_aside(), waiting():  # nothing is lost by ending then
            yield

    def _heard(self, said: WorkerMessage, clock: _Clock) -> Iterator[Outcome]:
        if said.failure is not None:
            raise ValueError(f"a worker cannot go on: {said.failure}")
        clock.heard()
        if said.opened is not None:
            self.listening.stage(Stage.GENERATING)
            self._tell(f"worker {said.opened}; ready after {clock.seconds:.1f} s")
        if said.outcome is not None:
            yield said.outcome
        if said.tick is not None and said.portion is not None:
            self.listening.tick_of(said.portion, said.tick)

    def _tell_before(self) -> None:
        if self.asked.address != LOCAL:
            return
        self._tell("workers: Ray starts on this machine, then each worker imports torch and loads the model")
        if self.asked.workers in (None, 1):
            self.listening.progress.note(f"{SLOW}: {one_worker_reason()}")

    def _tell(self, line: str) -> None:
        if self.request.verbose:
            self.listening.progress.note(line)

    # -- in the thread that speaks to Ray ------------------------------------------------------------------------------

    def _work(self, ending: Event) -> Generator[Pool | Lost | WorkerMessage, None, None]:
        """All calls of Ray: a signal in the middle of one leaves it in a state that ends the process."""
        site, busy = self.request.site, self.request.others.cores()
        with connected(self.asked, site.threads, busy) as pool:
            parts = self._parts(pool)
            pool = replace(pool, workers=min(pool.workers, len(parts)))
            yield pool
            index = replace(self.left.index, _lines=None)  # the other thread reads lines, too
            with closing(index):
                numbered = [[index.request_number(self.left.places[place]) for place in part] for part in parts]
                yield from Handing(
                    new_worker=partial(new_actor, pool, ray.put(self._share(parts))),
                    raw=lambda number: index.raw(index.place_of_number(number)),
                    workers=pool.workers,
                    waiting=deque(WaitingPortions(numbers) for numbers in numbered),
                ).said(ending)

    def _parts(self, pool: Pool) -> list[Sequence[int]]:
        """The places of each portion: as many as were asked for, or a share of the work that is worth it."""
        sizes, plan = self.left.sizes, self.request.plan
        places = range(len(sizes))
        if self.asked.hand_out is not None:
            return cut_evenly(places, self.asked.hand_out)
        work = [size.rows * (size.prompt_len + size.gen_len) for size in sizes]
        least = BLOCKS * plan.block_size if isinstance(plan, Plan) else LEAST_PORTION
        return cut(places, work, pool.workers, least * sum(work) // len(work))

    def _share(self, parts: Sequence[Sequence[int]]) -> SharedJob:
        request = self.request
        return SharedJob(
            opening=OpenRequest(request.model.without_measuring, request.site, request.plan.first_plan),
            seed=self.seed,
            style=request.needed_style,
            asked=None if isinstance(request.plan, Plan) else request.plan,
            reader=self.left.index.reader,
            identity=self.identity,
            longest=self._longest(parts),
            scores_texts=any(self.left.sizes.scores),
        )

    def _longest(self, parts: Sequence[Sequence[int]]) -> Workload:
        """A workload that is at least as long as each part, row by row, so that a plan for it has room for any of them."""
        sizes = self.left.sizes
        longest: list[int] = []
        for part in parts:
            rows = [sizes.prompt_lens[place] for place in part for _ in range(sizes.rows[place])]
            rows.sort(reverse=True)
            longest = [*map(max, longest, rows), *longest[len(rows) :], *rows[len(longest) :]]
        return Workload(tuple(longest), max(1, max(sizes.gen_lens)))


@dataclass
class _Clock:
    """When what began."""

    begun: float = field(default_factory=time.perf_counter)
    workers: int = 0
    ray_seconds: float = 0.0  # until Ray had started
    run_seconds: float = 0.0  # from when the first worker was ready to the last that a worker said
    _first: float | None = None

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.begun

    def connected(self, pool: Pool) -> None:
        self.workers, self.ray_seconds = pool.workers, self.seconds

    def heard(self) -> None:
        """Hears that a worker has said something."""
        self._first = self.seconds if self._first is None else self._first
        self.run_seconds = self.seconds - self._first
