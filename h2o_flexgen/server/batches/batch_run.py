"""A batch while it is run: a bounded number of its requests wait in the background, and the record of each is written when it
is over."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue

from h2o_flexgen.engine.arrivals import Arrival, Closed, TooLong
from h2o_flexgen.engine.job import without_number
from h2o_flexgen.jobs.line import Line
from h2o_flexgen.jobs.openai_answers import BROKEN
from h2o_flexgen.jobs.output import Recording
from h2o_flexgen.jobs.recovery import Finished
from h2o_flexgen.sampling.completion import Completion
from h2o_flexgen.sampling.params import one_params
from h2o_flexgen.server.desk import Prepared, RequestListener
from h2o_flexgen.server.problems import COMPUTATION_FAILED, ENDING, TOO_LONG, ApiProblem
from h2o_flexgen.server.service import Service

ROWS_PER_SEAT = 2  # of completions that are under way, so that a seat that gets free is taken at once
MOST_TRIES = 2  # of a request that is lost with a block


@dataclass(frozen=True)
class Told:
    """What the thread that computes says of a request. `run`: the one that has handed it in."""

    run: BatchRun
    place: int
    outcome: Completion | ApiProblem


Hears = SimpleQueue[Told | None]  # None: something else has changed. It may be put there by a signal's handler


class BatchRun:
    def __init__(self, service: Service, recording: Recording, seed: int, hears: Hears) -> None:
        self._service, self._recording, self._seed, self._hears = service, recording, seed, hears
        self._most_rows = ROWS_PER_SEAT * service.desk.now.seats
        self._left = self._open_places()
        self._again: deque[int] = deque()  # places of requests that were lost with a block
        self._tries: Counter[int] = Counter()
        self._under_way: dict[int, Arrival] = {}

    @property
    def finished(self) -> Finished:
        return self._recording.output.finished

    @property
    def is_complete(self) -> bool:
        return self.finished.num_done == len(self.finished.states)

    def to_the_end(self, goes_on: Callable[[], bool], on_progress: Callable[[Finished], object]) -> None:
        """Runs what is left, as long as it is to go on; what is then under way is given up."""
        try:
            while goes_on() and not self.is_complete:
                self._hand_in(goes_on)
                self._hear(waits=bool(self._under_way))
                on_progress(self.finished)
        finally:
            self._service.desk.give_up([*self._under_way.values()])
        self._hear(waits=False)

    # -- handing in --------------------------------------------------------------------------------------------------------

    def _open_places(self) -> Iterator[int]:
        return (place for place in range(len(self.finished.states)) if self.finished.is_open(place))

    def _hand_in(self, goes_on: Callable[[], bool]) -> None:
        """Lets as many requests wait as may; a text is read when its turn comes."""
        prepared = dict[int, Prepared]()
        rows = sum(len(arrival.rows) for arrival in self._under_way.values())
        for _ in range(self._most_rows):  # as many as may be refused before anything else is heard
            place = self._next_place() if rows < self._most_rows and goes_on() else None
            if place is None:
                break
            one = self._prepared(place)
            if one is not None:
                prepared[place] = one
                rows += len(one[0].rows)
        if prepared:
            try:
                self._service.desk.admit([*prepared.values()], in_background=True)
            except Closed:
                return  # the server is shutting down, as the caller sees before it goes on
            self._under_way |= {place: arrival for place, (arrival, _) in prepared.items()}

    def _next_place(self) -> int | None:
        return self._again.popleft() if self._again else next(self._left, None)

    def _prepared(self, place: int) -> Prepared | None:
        """A request that may be admitted; one that cannot be run is recorded so."""
        index = self._recording.index
        line = index.line(place)
        number = index.request_number(place) if line.options.params.seed is None else 0
        try:
            return self._service.readers.submit(self._read, place, number, line).result()
        except ValueError as error:
            code = TOO_LONG if isinstance(error, TooLong) else None
            self._recording.refuse(place, without_number(str(error), number), code=code)
            return None

    def _read(self, place: int, number: int, line: Line) -> Prepared:
        """A request draws by the batch's seed and its line. One with a seed of its own draws as if it had come alone."""
        request = self._service.reading.request(number, line)
        params = one_params(request.params)
        if params.seed is None:
            request = replace(request, params=replace(params, seed=self._seed))
        tell = partial(self._tell, place)
        return self._service.desk.prepare(request, RequestListener(None, tell, lambda problem, error: tell(problem)))

    # -- hearing what became of them -----------------------------------------------------------------------------------------

    def _tell(self, place: int, outcome: Completion | ApiProblem) -> None:
        """Called in the thread that computes."""
        self._hears.put(Told(self, place, outcome))

    def _hear(self, waits: bool) -> None:
        """Records what became of requests, as far as that is known; `waits`: until something is."""
        told = [self._hears.get()] if waits else []
        try:
            while True:
                told.append(self._hears.get_nowait())
        except Empty:
            pass
        for one in told:
            if one is not None and one.run is self:
                self._record(one.place, one.outcome)
        self._recording.output.sync()

    def _record(self, place: int, outcome: Completion | ApiProblem) -> None:
        self._under_way.pop(place, None)
        self._tries[place] += 1
        if isinstance(outcome, Completion):
            self._recording.answer(place, outcome)
        elif outcome.code == COMPUTATION_FAILED and self._tries[place] < MOST_TRIES:
            self._again.append(place)
        elif outcome.code != ENDING:
            self._recording.refuse(place, outcome.message, BROKEN, outcome.code)
        if not self.finished.is_open(place):
            del self._tries[place]
