"""The work on batches, which are files of requests that clients leave with a server. It computes them when no client waits, and
keeps the results. They are checked when they are made, and run one after another, the oldest first. A bounded number of a
batch's requests wait in the background, and the record of each is written when it is over. Whatever ends the work, the next
server goes on with the records that are there.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

from h2o_flexgen.core.files import NotADocument, parse_json
from h2o_flexgen.core.hints import one_line, reason
from h2o_flexgen.engine.arrivals import Arrival, Closed, TooLong
from h2o_flexgen.engine.job import without_number
from h2o_flexgen.jobs.index import ChangedInput, CheckedFile, Index, check_lines
from h2o_flexgen.jobs.line import CHAT, InputFile, Line, LineReader
from h2o_flexgen.jobs.openai_answers import BROKEN, Record, RecordMaker, Said, is_refusal
from h2o_flexgen.jobs.output import JobOutput, Recording, Settings
from h2o_flexgen.jobs.recovery import Finished, OutputReader, is_of_a_crash
from h2o_flexgen.sampling.completion import Completion
from h2o_flexgen.sampling.params import one_params
from h2o_flexgen.server.body_fields import read_line_body, read_line_inputs
from h2o_flexgen.server.desk import Prepared, RequestListener
from h2o_flexgen.server.problems import COMPUTATION_FAILED, ENDING, TOO_LONG, ApiProblem
from h2o_flexgen.server.service import Service
from h2o_flexgen.server.stored_batches import (
    CANCELLED,
    CANCELLING,
    COMPLETED,
    FAILED,
    FINALIZING,
    IN_PROGRESS,
    KIND_OF_BATCH,
    KIND_OF_FILE,
    OF_OUTPUT,
    UNDER_WAY,
    VALIDATING,
    Batches,
    BatchOutcome,
    DataFolder,
    NewFile,
    Rests,
    StoredBatch,
    StoredFiles,
    failing,
)

ROWS_PER_SEAT = 2  # of completions that are under way, so that a seat that gets free is taken at once
MOST_TRIES = 2  # of a request that is lost with a block


# -- one batch -----------------------------------------------------------------------------------------------------------


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


# -- all of them, and the threads that work on them -----------------------------------------------------------------------


SECONDS_OF_REST = 30.0  # after the disk or the memory has failed
NAMED = 100  # bad lines that a batch tells of
CHANGED, GONE = "its input file is no longer what was checked", "its input file is no longer there"
NOTHING_LEFT = {FINALIZING: COMPLETED, CANCELLING: CANCELLED}  # states in which only the end is left, and how it is called
SettingsOf = Callable[[], tuple[Settings, Settings]]  # what answers depend on, and what only their last bits do


class ServerEnds(Exception):
    """The server is shutting down: work on the lines of a file stops."""


class BatchWork:
    def __init__(
        self,
        folder: DataFolder,
        service: Service,
        settings_of: SettingsOf,
        note: Callable[[str], object],
        seconds_of_rest: float = SECONDS_OF_REST,
    ) -> None:
        self.files = StoredFiles(folder.files)
        self.batches = Batches(folder.batches, self.files)
        self._service, self._settings_of, self._note = service, settings_of, note
        self._rests = Rests(seconds_of_rest)
        self._hears: Hears = SimpleQueue()
        self._checking = ThreadPoolExecutor(1, "checking")
        self._is_ended = False
        service.desk.when_closed(self.wake)

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context in which batches are worked on, until the desk is closed or the context ends."""
        for batch in self.batches.all():
            if batch.status == VALIDATING:
                self.check(batch)
        thread = threading.Thread(target=self._run, name="batches")
        thread.start()
        try:
            yield
        finally:
            self._is_ended = True
            self.wake()
            self._checking.shutdown()
            thread.join()

    def check(self, batch: StoredBatch) -> None:
        """Checks a new batch, in another thread; it is then run when its turn comes."""
        with suppress(RuntimeError):  # the server ends, and the next one checks it
            self._checking.submit(self._check, batch)

    def wake(self) -> None:
        """Says that something has changed. It may be called by a signal's handler."""
        self._hears.put(None)

    @property
    def _is_over(self) -> bool:
        return self._is_ended or self._service.desk.is_closed

    # -- the check ---------------------------------------------------------------------------------------------------------

    def _check(self, batch: StoredBatch) -> None:
        try:
            found = self._found(batch)
            self.batches.change(batch.id, lambda _: found, (VALIDATING,))
        except ServerEnds:
            return
        except (OSError, MemoryError) as error:
            self._rest(batch, _why_of_rest(error))
        self.wake()

    def _found(self, batch: StoredBatch) -> StoredBatch:
        """The batch after its check. A failure of the disk or the memory says nothing about the batch, and is raised."""
        try:
            with self._checked(batch) as checked:
                return batch.checked_as(checked.whole, len(checked.index), _errors(checked))
        except (ServerEnds, OSError, MemoryError):
            raise
        except Exception as error:  # an input that is empty, or gone
            return batch.checked_as(None, 0, [failing(_line_of(error))])

    def _check_again(self, now: float) -> None:
        """Checks the batches with a rest that is over."""
        for batch_id in self._rests.over(now):
            batch = self.batches.one(batch_id)
            if batch.status == VALIDATING:
                self.check(batch)

    @contextmanager
    def _checked(self, batch: StoredBatch) -> Iterator[CheckedFile]:
        """A context with the batch's input: its lines can be read again there."""
        service = self._service
        defaults = service.of_chats if batch.endpoint == CHAT else service.of_prompts
        bodies = partial(read_line_body, names=service.answers.names)
        inputs = partial(read_line_inputs, names=service.answers.names)
        reader = LineReader(True, defaults, batch.endpoint, bodies, service.limits.body_bytes, inputs)
        file = InputFile(self.files.lines(batch.input_file_id), self.files.one(batch.input_file_id).filename)
        with closing(Index(file, reader)) as index:
            try:
                checked = check_lines(index, batch.checked, self._goes_on, NAMED)
            except FileNotFoundError:
                raise ValueError(GONE) from None
            yield checked

    def _goes_on(self, lines: int) -> None:
        if self._is_over:
            raise ServerEnds

    # -- the thread that runs them -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_over:
            now = time.monotonic()
            self._check_again(now)
            batch = next((one for one in self.batches.under_way if one not in self._rests), None)
            if batch is None:
                with suppress(Empty):
                    self._hears.get(timeout=self._rests.seconds_left(now))
                continue
            try:
                self._run_one(batch)
            except ServerEnds:
                return
            except Exception as error:
                self._survive(batch, error)

    def _survive(self, batch: StoredBatch, error: Exception) -> None:
        """Ends a batch after an error. If the disk or the memory has failed, the batch is paused instead: that may be fixed."""
        if self._is_over:
            return  # what it needed may have been taken away; the next server goes on with it
        why = _why_of_rest(error)
        if not why:
            try:
                self._fail(batch, [failing(CHANGED if isinstance(error, ChangedInput) else _line_of(error))])
                return
            except ServerEnds:
                return
            except Exception as another:
                why = _why_of_rest(another) or _line_of(another)
        self._rest(batch, why)

    def _rest(self, batch: StoredBatch, why: str) -> None:
        self._note(f"{batch.id} paused for {self._rests.seconds:g} s ({why}); fix this and it will retry")
        self._rests.begin(self.batches.one(batch.id), time.monotonic())

    def _run_one(self, batch: StoredBatch) -> None:
        if batch.status in NOTHING_LEFT:
            self._end(batch, NOTHING_LEFT[batch.status])
        elif errors := self._other_settings(batch):
            self._fail(batch, errors)
        else:
            self._run_lines(batch)

    def _run_lines(self, batch: StoredBatch) -> None:
        with self._checked(batch) as checked:
            if checked.whole != batch.checked:
                raise ChangedInput(CHANGED)
            if errors := _errors(checked):
                self._fail(batch, errors)
                return
            self._begin(batch)
            if self.batches.one(batch.id).has_ended:
                return  # it was cancelled before it began
            is_complete = self._run_to_the_end(batch, checked.index)
        if is_complete:
            self._end(batch, COMPLETED)
        elif self.batches.one(batch.id).status == CANCELLING:
            self._end(batch, CANCELLED)

    def _run_to_the_end(self, batch: StoredBatch, index: Index) -> bool:
        """Runs what is left; returns whether all of it is done."""
        with JobOutput(self.batches.records(batch.id), OutputReader(index, on_line=self._goes_on)) as output:
            recording = Recording(index, RecordMaker(self._service.answers, batch.created_at), output)
            run = BatchRun(self._service, recording, batch.seed, self._hears)
            self._count(batch, output.finished)
            run.to_the_end(lambda: self._is_wanted(batch), lambda finished: self._on_progress(batch, finished))
            return run.is_complete

    def _on_progress(self, batch: StoredBatch, finished: Finished) -> None:
        self._count(batch, finished)
        self._check_again(time.monotonic())  # others are checked while this one is run

    def _is_wanted(self, batch: StoredBatch) -> bool:
        return not self._is_over and self.batches.one(batch.id).status != CANCELLING

    def _count(self, batch: StoredBatch, finished: Finished) -> None:
        self.batches.count(batch.id, finished.num_done - finished.num_failed, finished.num_failed)

    def _begin(self, batch: StoredBatch) -> None:
        """Writes down what the answers depend on, before there are any."""
        if batch.begun is None:
            settings, noted = self._settings_of()
            self.batches.change(batch.id, lambda one: one.begins(settings, noted), UNDER_WAY)

    def _other_settings(self, batch: StoredBatch) -> Sequence[Said]:
        """What of that which answers depend on was otherwise when there were the first ones. It is asked before lines are read:
        to a server with another model each of them is a bad one."""
        if batch.begun is None:
            return ()
        settings, noted = self._settings_of()
        for each in batch.begun.notes(noted):
            self._note(f"{batch.id}: {each}: numbers may differ in their last bits")
        others = "; ".join(batch.begun.differences(settings))
        told = f"it was begun by a server with other options: {others}; send what is left in a new one"
        return (failing(told, code="settings_changed"),) if others else ()

    # -- the end of one ------------------------------------------------------------------------------------------------------

    def _fail(self, batch: StoredBatch, errors: Sequence[Said]) -> None:
        self._note(f"{batch.id} has failed: {errors[0]['message']}")
        self._end(batch, FAILED, errors)

    def _end(self, batch: StoredBatch, status: str, errors: Sequence[Said] = ()) -> None:
        """Makes files of its records. Should that be cut off, it is done again, with the same names."""
        if status == COMPLETED:
            now = self.batches.change(batch.id, lambda one: one.now(FINALIZING), (IN_PROGRESS,))
            status = CANCELLED if now.status == CANCELLING else COMPLETED
        records, own = self.batches.records(batch.id), f"{KIND_OF_FILE}{batch.id.removeprefix(KIND_OF_BATCH)}"
        with self.files.new(f"{own}-output") as answers, self.files.new(f"{own}-error") as refusals:
            fine, failed = self._split(records, answers, refusals, skips_damaged=status == FAILED)
            if status == COMPLETED and fine + failed < batch.total:
                raise ValueError(f"it has {batch.total} requests, and {fine + failed} records of them are there")
            outcome = BatchOutcome(
                fine,
                failed,
                self.files.keep(answers, f"{batch.id}_output.jsonl", OF_OUTPUT).id if fine else None,
                self.files.keep(refusals, f"{batch.id}_error.jsonl", OF_OUTPUT).id if failed else None,
            )
        self.batches.change(batch.id, lambda one: one.ended_as(status, outcome, errors), UNDER_WAY)
        records.unlink(missing_ok=True)

    def _split(self, records: Path, answers: NewFile, refusals: NewFile, skips_damaged: bool) -> tuple[int, int]:
        """Writes records to where they belong; returns how many of each there are."""
        fine = failed = 0
        if records.exists():
            with records.open("rb") as opened:
                for number, line in enumerate(opened, start=1):
                    self._goes_on(number)
                    record = None if is_of_a_crash(line) else _record(number, line, skips_damaged)
                    if record is not None:
                        is_failed = is_refusal(record)
                        (refusals if is_failed else answers).write(line)
                        fine, failed = fine + (not is_failed), failed + is_failed
        return fine, failed


def _record(number: int, line: bytes, skips_damaged: bool) -> Record | None:
    """The record in a line of records; None: it is damaged, and is to be passed over."""
    try:
        record = parse_json(line)
    except NotADocument:
        record = None
    if isinstance(record, dict):
        return record
    if skips_damaged:
        return None
    raise ValueError(f"line {number} of its records is damaged")


def _errors(checked: CheckedFile) -> Sequence[Said]:
    """What is wrong with the lines of a batch."""
    errors = [failing(f"line {number}: {reason}", number) for number, reason in checked.refused]
    more = checked.num_refused - len(checked.refused)
    return [*errors, failing(f"and {more} more lines cannot be run")] if more else errors


def _why_of_rest(error: Exception) -> str:
    """What has failed where that may be mended: the disk, or the memory. Empty: something else has."""
    if isinstance(error, MemoryError):
        return "there is no memory left"
    cause = error if isinstance(error, OSError) else error.__cause__
    return reason(cause) if isinstance(cause, OSError) else ""


def _line_of(error: Exception) -> str:
    return one_line(error) or type(error).__name__
