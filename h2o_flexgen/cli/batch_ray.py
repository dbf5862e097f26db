"""A job on Ray Data: requests go out to workers in portions, and completions come back as they finish. Who runs what, how it
gets there, and that the portion of a worker that died is run again is Ray's work; here it is seen to that nothing comes twice,
and that nothing is missing at the end."""

from __future__ import annotations

import logging
import pickle
import signal
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory, gettempdir
from typing import Any
from warnings import catch_warnings, simplefilter

import pyarrow
import ray
import ray.data

from h2o_flexgen.cli.batch_request import LOCAL, RAY, RESUME, WORKERS, BatchRequest, RayRequest
from h2o_flexgen.cli.batch_run import Listening, OnBroken
from h2o_flexgen.cli.batch_watch import Ticks
from h2o_flexgen.cli.ray_worker import PORTION, SAID, Portion, Said, Share, Worker
from h2o_flexgen.core.cores import cores
from h2o_flexgen.core.hints import one_line
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.engine.stage import Stage
from h2o_flexgen.jobs.job import FileJob
from h2o_flexgen.jobs.manifest import Settings
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.sampling.output import Completion

PATIENCE_SECONDS = 10.0
LONGEST_FOLDER = 24  # characters: names of sockets have 107 at most, and Ray adds up to 80
LONGEST_REASON = 400  # characters
LOOPBACK = "127.0.0.2"  # Ray takes localhost for the machine's address in its network
STORE_BYTES = 1 << 28  # of texts and records on their way; more goes through files
RETRIES = 3  # how often a portion is run again whose worker died: some requests may be what kills it
PORTIONS_EACH = 16  # a worker has so many in turn, so that little is lost with one, and all end at about the same time
LEAST_PORTION = 256  # requests, where nobody says how many a block holds: few blocks run empty then
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
    on_broken: OnBroken

    def completions(self) -> Generator[Completion, None, None]:
        """The completion of every request, once. Ray counts what has come of a portion, and leaves out as much of it if it is
        run again. If that finishes in another order, some requests come twice and others not at all: these are run in a
        further round."""
        with connected(self.asked, self.request.site.threads) as pool:
            open_places = set(range(len(self.left.sizes)))
            while open_places:
                before = len(open_places)
                with closing(self._round(pool, sorted(open_places))) as ended:
                    for place, became in ended:
                        if place not in open_places:
                            continue
                        open_places.remove(place)
                        if isinstance(became, Completion):
                            yield became
                        else:
                            self.on_broken(self._number(place), became, self.listening)
                if len(open_places) == before:
                    raise ValueError(f"workers came to their end without any of {before} requests; {RESUME} tries again")

    def _round(self, pool: Pool, places: Sequence[int]) -> Generator[tuple[int, Completion | str], None, None]:
        """Runs the requests at these places; yields what became of each, or what is wrong with it."""
        size = self._portion_size(pool, len(places))
        parts = [places[start : start + size] for start in range(0, len(places), size)]
        pool = replace(pool, workers=min(pool.workers, len(parts)))
        self._tell(f"workers: {pool}; {size} requests at a time")
        ticks = Ticks()
        place_of = {self._number(place): place for place in places}
        with closing(self._said(pool, parts)) as all_said:
            for said in all_said:
                if said.failure is not None:
                    raise ValueError(f"a worker cannot go on: {said.failure}")
                if said.opened is not None:
                    self.listening.stage(Stage.GENERATING)
                    self._tell(f"worker {said.opened}")
                if said.completion is not None:
                    yield place_of[said.completion.index], said.completion
                if said.broken is not None:
                    yield place_of[said.broken.number], said.broken.reason
                if said.tick is not None:
                    ticks.latest[said.portion] = said.tick
                    self.listening.tick(ticks.together)

    def _tell(self, line: str) -> None:
        if self.request.verbose:
            self.listening.progress.note(line)

    def _portion_size(self, pool: Pool, count: int) -> int:
        """Requests per portion: what was asked for, or what is a good share and fills some blocks, but leaves nobody idle."""
        if self.asked.hand_out is not None:
            return self.asked.hand_out
        plan = self.request.plan
        least = BLOCKS * plan.block_size if isinstance(plan, Plan) else LEAST_PORTION
        return min(max(least, _divided(count, PORTIONS_EACH * pool.workers)), _divided(count, pool.workers))

    # -- what goes out and comes back ----------------------------------------------------------------------------------

    def _said(self, pool: Pool, parts: Sequence[Sequence[int]]) -> Generator[Said, None, None]:
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.target_max_block_size = 1  # each thing that a worker says is a block: none waits for others
        tables = (pyarrow.table({PORTION: [pickle.dumps(self._portion(*part))]}) for part in enumerate(parts))
        blocks: list[Any] = [ray.put(table) for table in tables]
        with catch_warnings():
            simplefilter("ignore", DeprecationWarning)  # no newer way to say how often is known
            dataset = ray.data.from_arrow_refs(blocks).map_batches(
                Worker,
                batch_size=None,
                compute=ray.data.ActorPoolStrategy(size=pool.workers, max_tasks_in_flight_per_actor=1),
                fn_constructor_kwargs={"share": self._share(parts)},
                num_cpus=pool.cpus,
                num_gpus=pool.gpus,
                max_restarts=-1,
                max_task_retries=RETRIES,
            )
        batches: Any = iter(dataset.iter_batches(batch_size=None, batch_format="numpy", prefetch_batches=0))
        with closing(batches):  # ends the execution, too
            while (batch := self._next(batches)) is not None:
                yield from map(pickle.loads, batch[SAID])

    def _next(self, batches: Iterator[Mapping[str, Iterable[bytes]]]) -> Mapping[str, Iterable[bytes]] | None:
        try:
            with self.listening.interrupts.put_aside():  # nothing is lost by ending here
                return next(batches, None)
        except ray.exceptions.RayError as error:
            last = [line.strip() for line in str(error).splitlines() if line.strip()][-1:]
            raise ValueError(f"Ray has given up ({''.join(last)}); {RESUME} goes on with the requests that are left") from error

    def _number(self, place: int) -> int:
        return self.left.index.request_number(self.left.places[place])

    def _portion(self, number: int, places: Sequence[int]) -> Portion:
        lines = ((self._number(place), self.left.index.raw(self.left.places[place])) for place in places)
        return Portion(number, tuple(lines))

    def _share(self, parts: Sequence[Sequence[int]]) -> Share:
        request, sizes = self.request, self.left.sizes
        return Share(
            model=request.model,
            site=request.site,
            plan=request.plan,
            reader=self.left.index.reader,
            style=request.style if request.checked.chats else None,
            seed=self.seed,
            identity=self.identity,
            longest=self._longest(parts),
            scores_texts=any(sizes.scores),
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


# -- a cluster -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pool:
    """Workers, and what each of them is given."""

    workers: int
    cpus: int
    gpus: int
    machines: int

    def __str__(self) -> str:
        gpu = " and a GPU" if self.gpus else ""
        machines = "this machine" if self.machines == 1 else f"{self.machines} machines"
        return f"{self.workers} on {machines}, each with {self.cpus} core{'s' * (self.cpus > 1)}{gpu}"


@contextmanager
def connected(asked: RayRequest, threads: int | None) -> Iterator[Pool]:
    """A context in which Ray is at hand: a cluster of its own on this machine, which ends with it, or one that runs."""
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    before = signal.getsignal(signal.SIGTERM)
    opening = _of_this_machine(asked, threads) if asked.address == LOCAL else _at(asked.address)
    with opening:
        signal.signal(signal.SIGTERM, before)  # Ray has put its own there
        with _threads_ended():
            yield _pool(asked, threads)


@contextmanager
def _threads_ended() -> Iterator[None]:
    """A context after which no thread is left of those that Ray Data has begun in it: one that speaks to a cluster that is gone
    takes the process with it."""
    before = set(threading.enumerate())
    try:
        yield
    finally:
        until = time.monotonic() + PATIENCE_SECONDS
        for thread in set(threading.enumerate()) - before:
            thread.join(max(0.0, until - time.monotonic()))


@contextmanager
def _of_this_machine(asked: RayRequest, threads: int | None) -> Iterator[None]:
    workers = asked.workers or 1
    each = threads or max(1, cores() // workers)
    with TemporaryDirectory(prefix="h2o-ray-", dir=_folder_with_a_short_name(), ignore_cleanup_errors=True) as folder:
        ray.init(
            LOCAL,
            num_cpus=workers * each,
            include_dashboard=False,
            object_store_memory=STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=folder,
            _node_ip_address=LOOPBACK,
        )
        try:
            yield
        finally:
            ray.shutdown()


def _folder_with_a_short_name() -> str:
    """The folder for temporary files, unless the names of Ray's sockets below it would be longer than the system allows."""
    folder = gettempdir()
    return folder if len(folder) <= LONGEST_FOLDER else "/tmp"


@contextmanager
def _at(address: str) -> Iterator[None]:
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        words = one_line(error)[:LONGEST_REASON]
        raise ValueError(f"{RAY} {address} cannot be joined ({words}); give the address of a cluster, or {LOCAL}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _pool(asked: RayRequest, threads: int | None) -> Pool:
    """The workers that fit the cluster."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    workers = asked.workers or len(nodes)
    cpus = threads or max(1, int(min(node["CPU"] for node in nodes)) // _divided(workers, len(nodes)))
    gpus = int(asked.may_use_gpus and sum(int(node.get("GPU", 0)) for node in nodes) >= workers)
    room = sum(min(int(node["CPU"]) // cpus, int(node.get("GPU", 0)) if gpus else workers) for node in nodes)
    if room < workers:
        has = f"the cluster has room for {room} with {cpus} cores each{' and a GPU' if gpus else ''}"
        raise ValueError(f"{WORKERS} is {workers}, but {has}; ask for fewer, or for fewer --threads")
    return Pool(workers, cpus, gpus, len(nodes))


def _divided(count: int, by: int) -> int:
    """Rounded up."""
    return -(-count // by)
