"""Gathering: requests that come one by one, from any thread, are computed together in blocks. One thread computes for all.

    with Gathering(llm) as gathering:
        future = gathering.ask(gathering.read(prompt, SamplingParams(max_tokens=32)))
        print(future.result().text)

The seats of a block are planned for the longest of those who wait. Whoever needs more than a running block was planned for
waits, with all behind him, until it is over; then seats are planned anew. Nothing has to be known before the first request.
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

from h2o_flexgen.engine.arrivals import Arrival, Arrivals, Closed, Load, OnPiece
from h2o_flexgen.engine.job import Request, Size, without_number
from h2o_flexgen.engine.requests import RowMaker
from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.engine.tick import OnTick
from h2o_flexgen.llm import LLM
from h2o_flexgen.memory.threads import starting
from h2o_flexgen.sampling.output import Completion
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.text.prompts import read_prompts

SECONDS = 0.1  # that a block waits for others behind its first request, until all its seats are taken
THREAD = "computing"
STEPS = 4  # between one power of two and the next: the lengths that seats are planned for, so that few blocks end for the next


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
    """Models of one process that take turns: whoever computes has the memory of them all."""

    def __init__(self) -> None:
        self._computing = Lock()
        self._loaded: LLM | None = None

    @contextmanager
    def of(self, llm: LLM) -> Iterator[None]:
        """A context in which this model computes. The one before it, if it was another, gives its memory back."""
        with self._computing:
            if self._loaded not in (None, llm):
                self._loaded.unload()
                llm.weigh()
            self._loaded = llm
            yield


@contextmanager
def _said_of_one() -> Iterator[None]:
    """A context in which errors leave out the number of a prompt, as nobody has given one."""
    try:
        yield
    except ValueError as error:
        raise ValueError(without_number(str(error), 0)) from error


@dataclass(eq=False)
class _Guest:
    """A request that has come, and who waits for it."""

    request: Request
    lengths: Lengths
    rows: int
    on_piece: OnPiece | None
    future: Future[Completion] = field(default_factory=Future)

    def end(self, found: Completion | BaseException) -> None:
        if self.future.done() or not self.future.set_running_or_notify_cancel():
            return
        if isinstance(found, BaseException):
            self.future.set_exception(found)
        else:
            self.future.set_result(found)


class Gathering:
    """What computes for all who ask. Its thread starts with the first request and ends when it is closed, which lets all finish
    who have asked."""

    def __init__(
        self,
        llm: LLM,
        *,
        seconds: float = SECONDS,
        rows: int | None = None,
        seed: int | None = None,
        least: Lengths | None = None,
        turns: Turns | None = None,
        on_tick: OnTick | None = None,
    ) -> None:
        """`seconds`: how long a block waits to be filled. `rows`: who has a seat at once, if a plan is to be found for them.
        `least`: what seats are planned for, if nobody needs more. `turns` are shared by models that do not fit together."""
        self._llm, self._seconds, self._at_once, self._seed = llm, seconds, rows, seed
        self._least, self._turns, self._on_tick = least or Lengths(), turns or Turns(), on_tick
        self.reading = Lock()  # tokenizers change while they read
        self._changed = Condition()
        self._waiting: deque[_Guest] = deque()  # who has no place in the queue of the seats
        self._arrivals: Arrivals | None = None
        self._guests: dict[Arrival, _Guest] = {}
        self._thread: Thread | None = None
        self._is_closed = False

    # -- those who ask, in any thread --------------------------------------------------------------------------------------

    def read(self, prompt: object, params: SamplingParams) -> Request:
        """Reads a prompt, in whatever form `generate` takes it. What this model cannot do is refused."""
        with self.reading, _said_of_one():
            (read,) = read_prompts([prompt], self._llm.tokenizer)
        request = Request(read, params)
        self._size(request)
        return request

    def ask(self, request: Request, on_piece: OnPiece | None = None) -> Future[Completion]:
        """Puts a request that was read behind all others. `on_piece` hears of its tokens, in the thread that computes; an error
        of it ends this request alone. Whoever cancels the future frees the seats of its rows at their next token."""
        size = self._size(request)
        guest = _Guest(request, Lengths(size.prompt_len, max(1, size.gen_len)), size.rows, on_piece)
        with self._changed:
            if self._is_closed:
                raise Closed("no more requests are taken")
            self._begin()
            self._waiting.append(guest)
            self._admit()
            self._changed.notify_all()
        guest.future.add_done_callback(lambda future: self._leave(guest) if future.cancelled() else None)
        return guest.future

    def _size(self, request: Request) -> Size:
        with _said_of_one():
            return RowMaker(self._llm.spec, self._llm.plan, self._llm.tokenizer).size(0, request)

    def _begin(self) -> None:
        if self._thread is None:
            thread = Thread(target=self._compute, name=THREAD, daemon=True)  # nobody who forgets to close is held up by it
            with starting():
                thread.start()
            self._thread = thread

    def _admit(self) -> None:
        """Lets in whoever waits, in order, as far as the seats have room for him."""
        while self._waiting and self._arrivals is not None and self._room.hold(self._waiting[0].lengths):
            guest = self._waiting.popleft()
            try:
                self._guests[self._arrivals.offer(guest.request, self._hearing(guest))] = guest
            except ValueError as error:
                guest.end(error)

    @property
    def _room(self) -> Lengths:
        return Lengths() if self._arrivals is None else Lengths(self._arrivals.longest_prompt, self._arrivals.most_tokens)

    def _hearing(self, guest: _Guest) -> OnPiece | None:
        """Whoever listens to the tokens of one request; his errors are his own."""
        listener = guest.on_piece
        if listener is None:
            return None

        def hear(row: RowState, token: int, text: str | None) -> None:
            try:
                listener(row, token, text)
            except Exception as error:
                guest.end(error)
                self._leave(guest)

        return hear

    def _leave(self, guest: _Guest) -> None:
        with self._changed:
            if guest in self._waiting:
                self._waiting.remove(guest)
            arrival = next((arrival for arrival, one in self._guests.items() if one is guest), None)
            if arrival is not None and self._arrivals is not None:
                self._arrivals.give_up(arrival)
                if arrival.is_over:  # none of its rows had a seat, so nobody will say so
                    del self._guests[arrival]

    @property
    def load(self) -> Load:
        """Rows that wait, those that have a seat, and the seats."""
        with self._changed:
            waiting = sum(guest.rows for guest in self._waiting)
            if self._arrivals is None:
                return Load(waiting, 0, self._llm.plan.block_size)
            return self._arrivals.load._replace(waiting=self._arrivals.load.waiting + waiting)

    def close(self) -> None:
        """Admits nobody any more, and returns when all are served who were admitted. The model stays open."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Gathering:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- the thread that computes ------------------------------------------------------------------------------------------

    def _compute(self) -> None:
        while self._is_asked():
            try:
                with self._turns.of(self._llm):
                    self._plan_seats()
                    self._run_block()
            except BaseException as error:  # whoever waits hears of it, and the next are served
                self._fail(error)

    def _is_asked(self) -> bool:
        """Waits for somebody, and then for others who fill the seats. Nobody comes any more where it returns False."""
        with self._changed:
            while self.load.waiting or not self._is_closed:
                self._changed.wait_for(lambda: self.load.waiting or self._is_closed)
                self._changed.wait_for(lambda: self.load.waiting >= self.load.seats or self._is_closed, self._seconds)
                if self.load.waiting:
                    return True  # otherwise all who had come have cancelled meanwhile
            return False

    def _plan_seats(self) -> None:
        """Plans seats for those who wait, if there is one among them for whom the seats are too small."""
        with self._changed:
            if self._arrivals is not None and self._arrivals.load.waiting:
                return  # whoever has a place in the queue of the seats comes before those who need more
            waiting = [*self._waiting]
        refused: ValueError | None = None
        for lengths in self._wanted([guest.lengths for guest in waiting]):
            try:
                arrivals = self._llm.arrivals(*lengths, rows=self._at_once)
            except ValueError as error:
                refused = error
                continue
            with self._changed:
                self._arrivals = arrivals
                self._admit()
            return
        if refused is not None:
            first = waiting[0]
            with self._changed:
                if first in self._waiting:  # he may have cancelled meanwhile
                    self._waiting.remove(first)
            first.end(refused)

    def _wanted(self, waiting: Sequence[Lengths]) -> list[Lengths]:
        """What seats could be planned for, the best first: for all who wait and for who was there, with some room; without it;
        for who waits longest."""
        if not waiting:
            return []
        positions, first = self._llm.spec.max_positions, waiting[0]
        known = self._room.together_with(self._least)
        for one in waiting:
            known = known.together_with(one)
        return list(dict.fromkeys([known.rounded(positions), known, first]))

    def _run_block(self) -> None:
        if self._arrivals is not None:
            for arrival in self._llm.generate_arriving(self._arrivals, seed=self._seed, on_tick=self._on_tick):
                with self._changed:
                    guest = self._guests.pop(arrival, None)
                if guest is not None and not arrival.is_given_up:
                    guest.end(arrival.completion)

    def _fail(self, error: BaseException) -> None:
        """Tells all for whom seats were planned that nothing can be computed for them; where none are, all who wait."""
        with self._changed:
            left = [*self._guests.values()] or [*self._waiting]
            self._waiting = deque(guest for guest in self._waiting if guest not in left)
            self._guests.clear()
            self._arrivals = None
        for guest in left:
            guest.end(error)
