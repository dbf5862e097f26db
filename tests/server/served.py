"""A server for tests: a model's desk in a thread, at a port that the system chooses. It listens no longer than its `with`."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import httpx
from openai import AsyncOpenAI, OpenAI

from h2o_flexgen.cli.report.plan_report import PlanReport
from h2o_flexgen.cli.serve_work import facts_of, usual_options
from h2o_flexgen.engine.reports import Tick
from h2o_flexgen.jobs.file_job import LineReading
from h2o_flexgen.jobs.openai_answers import Answers
from h2o_flexgen.llm import LLM
from h2o_flexgen.server.app import Hosts, Keys, make_app
from h2o_flexgen.server.batch_routes import BatchRoutes
from h2o_flexgen.server.batch_threads import BatchWork
from h2o_flexgen.server.counts import ServerCounts
from h2o_flexgen.server.desk import Desk, Terms
from h2o_flexgen.server.listening import Limits, ServerAddress, bound, listening, place_of
from h2o_flexgen.server.service import Service
from h2o_flexgen.server.stored_batches import data_folder
from h2o_flexgen.text.dialogue import choose_style
from tests.helpers.patience import PATIENCE_SECONDS

MODEL = "tiny"
PROMPT_LEN, GEN_LEN = 32, 48
SEED = 5
HERE = ServerAddress("127.0.0.1", 0)


class EndedAtOnce(BaseException):
    """What a signal does to the thread that computes."""


class GatedCounts(ServerCounts):
    """Counts that can hold the thread that computes behind a pass, or end it there."""

    def __init__(self) -> None:
        super().__init__()
        self.is_held = threading.Event()
        self._may_go = threading.Event()
        self._may_go.set()
        self._passes_to_go = 0
        self.ends_at_once = False

    def hold(self, after: int) -> None:
        self._passes_to_go = after
        self._may_go.clear()

    def let_go(self) -> None:
        self._may_go.set()

    def tick(self, tick: Tick) -> None:
        super().tick(tick)
        self._passes_to_go -= 1
        if not self._may_go.is_set() and self._passes_to_go <= 0:
            self.is_held.set()
            assert self._may_go.wait(PATIENCE_SECONDS)
        if self.ends_at_once:
            raise EndedAtOnce


@dataclass
class Served:
    place: ServerAddress
    desk: Desk
    counts: GatedCounts
    llm: LLM
    data: Path | None
    told: list[str] = field(default_factory=list)  # why blocks have failed, and batches

    @property
    def base_url(self) -> str:
        return f"{self.place.url}/v1"

    def client(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=self.base_url, api_key=key, max_retries=0, timeout=PATIENCE_SECONDS)

    def async_client(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=self.base_url, api_key="none", max_retries=0, timeout=PATIENCE_SECONDS)

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.place.url, timeout=PATIENCE_SECONDS)

    def connected(self) -> socket.socket:
        return socket.create_connection((self.place.host, self.place.port))

    @contextmanager
    def held(self, after: int = 1) -> Iterator[None]:
        """A context in which nothing is computed behind the next pass, or behind so many."""
        self.counts.hold(after)
        try:
            yield
        finally:
            self.counts.let_go()

    def until(self, is_so: Callable[[], bool]) -> None:
        """Waits until something is so."""
        waiting = threading.Event()
        for _ in range(round(PATIENCE_SECONDS / 0.005)):
            if is_so():
                return
            waiting.wait(0.005)
        raise AssertionError("it never came to be so")


@contextmanager
def served(
    llm: LLM,
    most_waiting: int = 1000,
    keys: tuple[str, ...] = (),
    limits: Limits = Limits(),  # noqa: B008  # frozen
    seed: int | None = SEED,
    room: tuple[int, int] = (PROMPT_LEN, GEN_LEN),
    data: Path | None = None,
    most_file_bytes: int = 10_000_000,
    settings: Mapping[str, object] = MappingProxyType({"model": MODEL}),
    seconds_of_rest: float = 3600.0,
    template: str | None = None,
) -> Iterator[Served]:
    counts, told = GatedCounts(), list[str]()

    def broken(error: Exception) -> str:
        told.append(str(error))
        return f"the computation has failed: {error}"

    arrivals = llm.arrivals(*room)
    desk = Desk(llm, arrivals, Terms(0.0, most_waiting, seed), counts, broken)
    facts = facts_of(MODEL, PlanReport.of(llm.loaded, arrivals.planned))
    maker, style = llm.row_maker, choose_style("auto", llm.tokenizer, template=template)
    reading = LineReading(llm.tokenizer, style, maker.size, longest=arrivals.longest_prompt)
    usual = usual_options(room[1])
    computing = threading.Thread(target=lambda: run(desk), name="computing")
    with ExitStack() as stack:
        readers, opened = stack.enter_context(ThreadPoolExecutor(1)), stack.enter_context(bound(HERE))
        answers = Answers(MODEL, style, llm.spec.labels, llm.loaded.adapters.names)
        service, batches = Service(desk, reading, answers, *usual, limits, readers, 17), None
        if data is not None:
            folder = stack.enter_context(data_folder(data, "--data-dir"))
            work = BatchWork(folder, service, lambda: ({**settings}, {}), told.append, seconds_of_rest)
            batches = BatchRoutes(work, limits, most_file_bytes, seed, lambda: desk.is_closed)
        app = make_app(service, counts, Keys(tuple(key.encode() for key in keys)), Hosts(HERE.host), facts, batches)
        stack.enter_context(listening(app, opened, limits, desk.close))
        stack.enter_context(nullcontext() if batches is None else batches.work.running())
        computing.start()
        try:
            yield Served(place_of(opened), desk, counts, llm, data, told)
        finally:
            counts.let_go()
            desk.close()
            computing.join()


def run(desk: Desk) -> None:
    """Runs the desk as the command does."""
    try:
        with suppress(EndedAtOnce):
            desk.run()
    finally:
        desk.hand_back()
