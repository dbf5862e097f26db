"""Desk: where requests are handed in, from any thread, and the one thread that computes. It gathers requests, and runs a block
until no request is left. If a block fails, the clients that lost something are told, and the thread goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from threading import Lock
from typing import TypeAlias

from h2o_flexgen.engine.arrivals import GIVEN_UP, Arrival, Arrivals, OnPiece
from h2o_flexgen.engine.executor import TaskFailed
from h2o_flexgen.engine.job import Request, without_number
from h2o_flexgen.engine.reports import Tick
from h2o_flexgen.engine.restarted_run import OnShrink
from h2o_flexgen.llm import LLM
from h2o_flexgen.sampling.completion import Completion
from h2o_flexgen.sampling.params import one_params
from h2o_flexgen.sampling.sampler import NoTokenLeft
from h2o_flexgen.server.counts import Now, ServerCounts
from h2o_flexgen.server.problems import ApiProblem, Refused, broken, broken_by_itself, ending, queue_full, too_many

RETRY_SECONDS = 2  # when a client may retry that a full queue has refused
LOST = "error"  # why completions of a failed block end


@dataclass(frozen=True)
class RequestListener:
    """The callbacks of a client that waits for a request. They are called in the thread that computes."""

    on_piece: OnPiece | None  # None: only whole completions are wanted
    over: Callable[[Completion], object]
    fail: Callable[[ApiProblem, BaseException | None], object]  # why, and what the computation has raised


Prepared: TypeAlias = "tuple[Arrival, RequestListener]"


@dataclass(frozen=True)
class Terms:
    """How requests are taken."""

    gather_seconds: float  # how long the first one waits for others
    most_waiting: int  # rows
    seed: int | None  # of completions that bring none


class Desk:
    def __init__(
        self,
        llm: LLM,
        arrivals: Arrivals,
        terms: Terms,
        counts: ServerCounts,
        on_broken: Callable[[Exception], str],
        on_shrink: OnShrink | None = None,
        in_turn: Callable[[], AbstractContextManager[object]] = nullcontext,
        on_pass: Callable[[], object] = bool,
    ) -> None:
        """`on_broken` hears why a block has failed, and returns what clients are told. Blocks run in a context `in_turn`, and
        each pass ends with a call of `on_pass`."""
        self._llm, self._arrivals, self._terms, self._counts = llm, arrivals, terms, counts
        self._on_broken, self._on_shrink, self._in_turn, self._on_pass = on_broken, on_shrink, in_turn, on_pass
        self._lock = Lock()
        self._listeners: dict[Arrival, RequestListener] = {}
        self._is_closed = False
        self._hear_of_end: list[Callable[[], object]] = []

    # -- for requests of clients -------------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Whether no request is admitted any more."""
        return self._is_closed

    def offer(self, requests: Sequence[tuple[Request, RequestListener]]) -> list[Arrival]:
        """Hands in the requests of a body: all of them, or none."""
        if self._is_closed:
            raise Refused(ending())
        self._refuse_too_many(sum(one_params(request.params).n for request, _ in requests))
        return self.admit([self.prepare(*each) for each in requests])

    def prepare(self, request: Request, listener: RequestListener) -> Prepared:
        """A request that may be admitted. One that has no room in a seat is refused."""
        return self._arrivals.prepare(request, listener.on_piece), listener

    def admit(self, prepared: Sequence[Prepared], in_background: bool = False) -> list[Arrival]:
        """Lets all of these wait for seats, or none."""
        arrivals = [arrival for arrival, _ in prepared]
        with self._lock:
            self._listeners.update(prepared)  # before its listener is known it cannot be over
        try:
            self._arrivals.admit(arrivals, in_background)
        except BaseException:
            with self._lock:
                for arrival in arrivals:
                    del self._listeners[arrival]
            raise
        return arrivals

    def _refuse_too_many(self, rows: int) -> None:
        """Refuses rows for which there is no room in seats and queue together: for ever, or as long as others have it. Rows in
        the background do not count: they take seats that are left."""
        load, most = self._arrivals.load, self._terms.most_waiting
        if rows > load.seats + most:
            raise Refused(too_many(rows, load.seats, most))
        if self._arrivals.in_foreground + rows > load.seats + most:
            raise Refused(queue_full(load.waiting, rows, most, RETRY_SECONDS))

    def give_up(self, arrivals: Sequence[Arrival]) -> None:
        """Gives up these requests: no client waits for them any more."""
        for arrival in arrivals:
            with self._lock:
                is_open = self._listeners.pop(arrival, None) is not None
            if is_open:
                self._arrivals.give_up(arrival)
                self._counts.ended([GIVEN_UP] * len(arrival.rows))

    @property
    def now(self) -> Now:
        arrivals = self._arrivals
        return Now(*arrivals.requests, *arrivals.load, *arrivals.kv_bytes, arrivals.waiting_in_background)

    def when_closed(self, hear: Callable[[], object]) -> None:
        """Registers a callback for the moment when no request is admitted any more; a signal's handler may call it."""
        self._hear_of_end.append(hear)

    # -- the end -----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Admits no more requests; those that were admitted are served to the end. A signal's handler may call this."""
        self._is_closed = True
        self._arrivals.close()
        for hear in self._hear_of_end:
            hear()

    def hand_back(self, error: BaseException | None = None) -> None:
        """Ends all admitted requests, when nothing is computed any more. `error`: the error that ended it, if there is one."""
        self.close()
        self._tell(self._arrivals.abandon(), ending(), error)

    # -- the thread that computes ------------------------------------------------------------------------------------------

    def run(self, are_gathered: bool = False) -> None:
        """Serves until the desk is closed and no request is left. `are_gathered`: the first block waits for no others."""
        seconds = 0.0 if are_gathered else self._terms.gather_seconds
        while self._arrivals.gather(seconds):
            seconds = self._terms.gather_seconds
            try:
                with self._in_turn():
                    self._run_block()
            except Exception as error:
                self._survive(error)
            finally:
                self._counts.run_over()

    def _run_block(self) -> None:
        seed = self._terms.seed
        for arrival in self._llm.generate_arriving(self._arrivals, seed=seed, on_tick=self._tick, on_shrink=self._on_shrink):
            listener = self._taken(arrival)
            if listener is not None:
                completion = arrival.completion
                self._counts.ended(output.finish_reason for output in completion.outputs)
                listener.over(completion)

    def _tick(self, tick: Tick) -> None:
        self._counts.tick(tick)
        self._on_pass()

    def _survive(self, error: Exception) -> None:
        """Tells the clients of lost requests: all that had a seat. If a single request broke the block, only that one is lost;
        the others start again from their prompts, and keep what they were told."""
        cause = error.cause if isinstance(error, TaskFailed) else error
        said, lost = self._on_broken(error), list[Arrival]()
        if isinstance(cause, NoTokenLeft):
            said = without_number(said, cause.number)
            lost = [] if cause.row is None else self._arrivals.drop(cause.row)
        if lost:
            self._tell(lost, broken_by_itself(said), error)
        else:
            self._tell(self._arrivals.break_off(), broken(said), error)

    def _tell(self, lost: Sequence[Arrival], problem: ApiProblem, error: BaseException | None) -> None:
        listening = [(arrival, self._taken(arrival)) for arrival in lost]  # a client that hears of one gives up its others
        for arrival, listener in listening:
            if listener is not None:
                self._counts.ended([LOST] * len(arrival.rows))
                listener.fail(problem, error)

    def _taken(self, arrival: Arrival) -> RequestListener | None:
        with self._lock:
            return self._listeners.pop(arrival, None)
