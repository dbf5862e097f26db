"""A job on workers of Ray: portions of requests go out to actors, and completions come back as they finish. When a worker dies,
another one takes its place, and what its portion still lacks is handed out again: so nothing comes twice, and nothing is
missing at the end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event

import ray

from h2o_flexgen.cli.batch_request import LOCAL, BatchRequest, RayRequest
from h2o_flexgen.cli.batch_run import Listening
from h2o_flexgen.cli.interrupts import Aside
from h2o_flexgen.cli.ray.cluster import Pool, answer_sigterm_again, connected, joined, waiting
from h2o_flexgen.cli.ray.workers import (
    Handing,
    Lost,
    SharedJob,
    WaitingPortions,
    WorkerMessage,
    cut,
    cut_evenly,
    new_actor,
)
from h2o_flexgen.cli.slow import SLOW, one_worker_reason, small_job_reason
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.engine.job import Outcome
from h2o_flexgen.engine.reports import Stage
from h2o_flexgen.jobs.file_job import FileJob
from h2o_flexgen.jobs.output import Settings
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.session.open_request import OpenRequest

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
