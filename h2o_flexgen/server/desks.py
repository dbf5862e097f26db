"""Desks: one desk after the other, for requests of lengths that are not known before they come. It needs none of the packages
that the server listens with.

    with Desks(llm) as desks:
        future = desks.ask(Request(prompt, SamplingParams(max_tokens=32)))
        print(future.result().text)

The seats of a desk are planned for the longest of the requests that wait. A longer request waits, and blocks those queued
after it, until the desk has served the requests that it admitted. Then new seats are planned for a new desk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Condition, Lock, Thread
from types import TracebackType
from typing import NamedTuple

from h2o_flexgen.engine.arrivals import Arrivals, Closed
from h2o_flexgen.engine.job import Request, RequestSize
from h2o_flexgen.llm import LLM
from h2o_flexgen.memory.threads import starting
from h2o_flexgen.sampling.completion import Completion
from h2o_flexgen.server.counts import ServerCounts
from h2o_flexgen.server.desk import Desk, RequestListener, Terms
from h2o_flexgen.server.problems import ApiProblem, Refused

SECONDS = 0.1  # that a block waits for others behind its first request, until all its seats are taken
THREAD = "computing"
STEPS = 4  # between one power of two and the next: the lengths that seats are planned for, so that few desks end for the next


class Lengths(NamedTuple):
    """What a seat has room for: the tokens of a prompt and those behind it."""

    prompt: int = 1
    generated: int = 1

    def hold(self, other: Lengths) -> bool:
        return self.prompt >= other.prompt and self.generated >= other.generated

    def together_with(self, other: Lengths) -> Lengths:
        return Lengths(max(self.prompt, other.prompt), max(self.generated, other.generated))

    def rounded(self, positions: int) -> Lengths:
        """The next lengths above these, as far as both together have positions."""
        generated = min(_round(self.generated), max(self.generated, positions - self.prompt))
        return Lengths(min(_round(self.prompt), max(self.prompt, positions - generated)), generated)


def _round(length: int) -> int:
    step = max(1, (1 << length.bit_length() - 1) // STEPS)
    return -(-length // step) * step


class Turns:
    """Models of one process that take turns: the one that computes has the memory of them all."""

    def __init__(self) -> None:
        self._computing = Lock()
        self._loaded: LLM | None = None

    @contextmanager
    def of(self, llm: LLM) -> Iterator[None]:
        """A context in which this model computes. The one before it, if it was another, gives its memory back."""
        with self._computing:
            if self._loaded not in (None, llm):
                self._loaded.unload()
                llm.loaded.weigh()
            self._loaded = llm
            yield


@dataclass(frozen=True)
class _Asked:
    """A request that has come, and what its caller waits for."""

    request: Request
    lengths: Lengths
    rows: int
    future: Future[Completion] = field(default_factory=Future)

    @property
    def listener(self) -> RequestListener:
        return RequestListener(None, self.future.set_result, self._fail)

    def _fail(self, problem: ApiProblem, error: BaseException | None) -> None:
        self.future.set_exception(Refused(problem) if error is None else error)


class Desks:
    """The desks of one model, and the thread that computes. It starts with the first request, and ends when this is closed."""

    def __init__(
        self,
        llm: LLM,
        *,
        seconds: float = SECONDS,
        rows: int | None = None,
        least: Lengths | None = None,
        turns: Turns | None = None,
        counts: ServerCounts | None = None,
    ) -> None:
        """`seconds`: how long a block waits to be filled. `rows`: how many have a seat at once, if a plan is to be found for
        them. `least`: what seats are planned for, if no request needs more. `turns` are shared by models that do not fit
        together."""
        self._llm, self._terms, self._at_once = llm, Terms(seconds, most_waiting=0, seed=None), rows
        self._least, self._turns, self._counts = least or Lengths(), turns or Turns(), counts or ServerCounts()
        self._changed = Condition()
        self._waiting: deque[_Asked] = deque()  # for a desk that has room for them
        self._desk: Desk | None = None
        self._forget_seats()
        self._thread: Thread | None = None
        self._is_closed = False

    # -- for callers, in any thread ----------------------------------------------------------------------------------------

    def size(self, request: Request) -> RequestSize:
        """The size of a request with a prompt that is read. What this model cannot do is refused."""
        return self._llm.row_maker.size(request.index or 0, request)

    def ask(self, request: Request) -> Future[Completion]:
        """Puts a request with a prompt that is read at the end of the queue. Its future cannot be cancelled."""
        size = self.size(request)
        asked = _Asked(request, Lengths(size.prompt_len, max(1, size.gen_len)), size.rows)
        asked.future.set_running_or_notify_cancel()
        with self._changed:
            if self._is_closed:
                raise Closed("no more requests are taken")
            self._begin()
            self._waiting.append(asked)
            self._hand_in()
            self._changed.notify_all()
        return asked.future

    def close(self) -> None:
        """Admits no request any more, and returns when all are served that were admitted. The model stays open."""
        with self._changed:
            self._is_closed = True
            self._hand_in()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Desks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _begin(self) -> None:
        if self._thread is None:
            thread = Thread(target=self._compute, name=THREAD, daemon=True)  # a caller that never closes is not held up by it
            with starting():
                thread.start()
            self._thread = thread

    def _hand_in(self) -> None:
        """Hands in what waits, in order, as far as the seats have room. A desk without room for the next one admits no more."""
        if self._desk is None:
            return
        while self._waiting and self._room.hold(self._waiting[0].lengths):
            asked = self._waiting.popleft()
            try:
                self._desk.admit([self._desk.prepare(asked.request, asked.listener)])
            except Exception as error:
                asked.future.set_exception(error)
        if self._waiting or self._is_closed:
            self._desk.close()

    # -- the thread that computes ------------------------------------------------------------------------------------------

    def _compute(self) -> None:
        while self._is_asked():
            try:
                arrivals = self._planned()
            except BaseException as error:  # a ValueError: not even the first has room
                self._fail(1 if isinstance(error, ValueError) else len(self._waiting), error)
            else:
                self._serve(arrivals)

    def _is_asked(self) -> bool:
        """Waits for a request, and then for others that fill the seats. None comes any more where it returns False."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            self._changed.wait_for(lambda: self._is_closed or self._rows >= self._seats, self._terms.gather_seconds)
            return bool(self._waiting)

    @property
    def _rows(self) -> int:
        """How many rows wait."""
        return sum(asked.rows for asked in self._waiting)

    def _planned(self) -> Arrivals:
        """Seats for those that wait, or for the first of them where there is no room for all."""
        with self._changed:
            wanted = self._wanted([asked.lengths for asked in self._waiting])
        with self._turns.of(self._llm):
            for lengths in wanted[:-1]:
                try:
                    return self._llm.arrivals(*lengths, rows=self._at_once)
                except ValueError:
                    continue
            return self._llm.arrivals(*wanted[-1], rows=self._at_once)

    def _wanted(self, waiting: Sequence[Lengths]) -> list[Lengths]:
        """What seats could be planned for, the best first: for all that wait and for those before them, with some room; without
        it; for the one that waits longest."""
        positions, first = self._llm.spec.max_positions, waiting[0]
        known = self._room.together_with(self._least)
        for one in waiting:
            known = known.together_with(one)
        return list(dict.fromkeys([known.rounded(positions), known, first]))

    def _serve(self, arrivals: Arrivals) -> None:
        """Serves all requests that fit these seats, until one comes that needs more."""
        desk = Desk(self._llm, arrivals, self._terms, self._counts, self._broken, in_turn=lambda: self._turns.of(self._llm))
        with self._changed:
            self._desk, self._room = desk, Lengths(arrivals.longest_prompt, arrivals.most_tokens)
            self._seats = arrivals.load.seats
            self._hand_in()
        try:
            desk.run(are_gathered=True)
        except BaseException as error:  # the thread goes on, and no caller waits for ever
            self._broken(error)
            desk.hand_back(error)
        with self._changed:
            self._desk = None

    def _broken(self, error: BaseException) -> str:
        """Lets the desk of a block that has failed serve those it has admitted: seats for the next are planned anew."""
        with self._changed:
            if self._desk is not None:
                self._desk.close()
            self._desk = None
            self._forget_seats()
        return str(error)

    def _forget_seats(self) -> None:
        self._room, self._seats = Lengths(), self._llm.plan.block_size

    def _fail(self, count: int, error: BaseException) -> None:
        """Tells the first of those that wait that nothing can be computed for them."""
        with self._changed:
            failed = [self._waiting.popleft() for _ in range(count)]
            if not isinstance(error, ValueError):
                self._forget_seats()
        for asked in failed:
            asked.future.set_exception(error)
