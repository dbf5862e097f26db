"""A job while it runs: the record of every request is written when it finishes, whatever becomes of the others. How far it is
shows in a line of progress, in lines of JSON for plots, and in the figures at its end."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from h2o_flexgen.cli.batch_request import RESUME
from h2o_flexgen.cli.interrupts import Interrupts
from h2o_flexgen.cli.report import Entry, document_of, entry, lines_of, noted
from h2o_flexgen.cli.report.summary import drafts_entry
from h2o_flexgen.cli.watch import Crowd, clock, show_stage
from h2o_flexgen.core.hints import reason
from h2o_flexgen.engine.drafts import Drafted
from h2o_flexgen.engine.executor import TaskFailed
from h2o_flexgen.engine.job import BrokenRequest, Outcome
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.engine.reports import NO_TICK, Stage, Tick, summed
from h2o_flexgen.engine.restarted_run import RestartedRun, Shrink
from h2o_flexgen.jobs.file_job import FileJob, RequestSizes
from h2o_flexgen.jobs.index import SOUND, ChangedInput, Index
from h2o_flexgen.jobs.openai_answers import BROKEN, RecordMaker
from h2o_flexgen.jobs.output import JobOutput, Recording
from h2o_flexgen.jobs.recovery import Finished
from h2o_flexgen.llm import LLM
from h2o_flexgen.sampling.completion import Completion

ENDING = "ending: what is computed now is finished first; another signal ends at once"
SECONDS_BETWEEN_METRICS = 2.0


# -- the run ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JobRun:
    llm: LLM
    left: FileJob
    records: RecordMaker
    output: JobOutput
    seed: int
    metrics: Path | None
    elsewhere: Elsewhere | None = None  # what runs requests, if not this process
    is_crowded: bool = False  # it was said that other processes slow it

    @property
    def _index(self) -> Index:
        return self.left.index

    @property
    def _recording(self) -> Recording:
        return Recording(self._index, self.records, self.output)

    # -- requests that cannot be run -----------------------------------------------------------------------------------

    def record_refused(self) -> None:
        """Writes the records of requests that are refused before anything is run."""
        finished = self.output.finished
        for place in (place for place in range(len(self._index)) if self._index.states[place] != SOUND):
            if finished.is_open(place):
                self._recording.refuse_bad_line(place)
        for place in self.left.refused:
            self._recording.refuse(place, self.left.reason(place))
        self.output.sync()

    # -- the others ----------------------------------------------------------------------------------------------------

    def to_the_end(self) -> JobFigures:
        """Runs all requests; returns the figures of the end."""
        finished = self.output.finished
        with Metrics(self.metrics) as metrics, Progress(len(finished.states), "batch") as progress:
            listening = Listening(
                JobWatch(progress, metrics, self.left.sizes, finished, self.left.shared_tokens, self.is_crowded),
                progress,
                Interrupts(lambda: progress.stage(ENDING)),
                self.output,
            )
            try:
                with listening.interrupts.heard():
                    self._run(listening)
                listening.sync()
            except BaseException:
                done = f"{finished.num_done} of {len(finished.states)} requests are done"
                progress.note(f"{done}; {RESUME} goes on with the others")
                raise
            return listening.watch.end()

    def _run(self, listening: Listening) -> None:
        """Runs what is left, and records what becomes of each request."""
        try:
            with closing(self._outcomes(listening)) as outcomes:
                for outcome in outcomes:
                    self._record(outcome, listening)
        except TaskFailed as failed:
            if isinstance(failed.cause, ChangedInput):
                raise failed.cause from failed  # it says all that a person can mend
            raise

    def _record(self, outcome: Outcome, listening: Listening) -> None:
        place = self._index.place_of_number(outcome.index)
        if isinstance(outcome, BrokenRequest):
            self._recording.refuse(place, outcome.reason, BROKEN)
            listening.progress.note(f"line {self._index.numbers[place]} failed, and the others go on: {outcome.reason}")
        else:
            self._recording.answer(place, outcome)
            listening.watch.finished(outcome, self.left.size_of(place).gen_len)

    def _outcomes(self, listening: Listening) -> Generator[Outcome, None, None]:
        if self.elsewhere is not None:
            return self.elsewhere(self.left, listening)
        heard: dict[str, Any] = {"on_stage": listening.stage, "on_shrink": listening.shrink}
        generate = partial(self.llm.generate_stream, seed=self.seed, **heard)
        return RestartedRun(generate, self.left, listening.tick).outcomes()


@dataclass(frozen=True)
class Listening:
    """What hears of a job while it runs."""

    watch: JobWatch
    progress: Progress
    interrupts: Interrupts
    output: JobOutput = field(repr=False)
    _parts: dict[int, Tick] = field(default_factory=dict)  # how far each part of the job is, if it has several

    def stage(self, stage: Stage, done_bytes: int = 0, total_bytes: int = 0) -> None:
        if stage is Stage.GENERATING:  # before that nothing is lost that a signal could wait for
            self.interrupts.listen()
        self.watch.stage(stage, done_bytes, total_bytes)

    def tick(self, tick: Tick) -> None:
        self.sync()
        self.watch.tick(tick)
        if self.interrupts.are_asked:
            self.interrupts.end()

    def tick_of(self, part: int, tick: Tick) -> None:
        self._parts[part] = tick
        self.tick(summed(self._parts.values()))

    def end_part(self, part: int | None) -> None:
        """Hears that a part has ended before all its rows had: what is left of it is another part."""
        if part in self._parts:
            self._parts[part] = replace(self._parts[part], alive=0)

    def sync(self) -> None:
        if self.output.sync():
            self.progress.note(f"{self.output.path} was removed while the job runs; its records are written there again")

    def shrink(self, shrink: Shrink) -> None:
        self.progress.note(str(shrink))


Elsewhere: TypeAlias = "Callable[[FileJob, Listening], Generator[Outcome, None, None]]"


# -- how far it is ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JobFigures:
    """The state of a job at a moment. Rates are over the time since weights were loaded."""

    requests: int  # of the whole job
    requests_done: int  # failed ones and those of earlier runs included
    requests_failed: int
    seconds: float  # since weights were loaded
    share: float  # of this run's work that is done, as far as it is known
    rows: int  # rows that this run has begun
    tick: Tick

    @property
    def prompt_rate(self) -> float:
        return self.tick.prompt_tokens / max(self.seconds, 1e-9)

    @property
    def decode_rate(self) -> float:
        return self.tick.generated_tokens / max(self.seconds, 1e-9)

    @property
    def rates(self) -> str:
        """Both in words. A pass may read prompts and generate, so neither has a time of its own."""
        return f"{self.prompt_rate:.1f} tokens/s read and {self.decode_rate:.1f} generated"

    @property
    def useful_share(self) -> float | None:
        """Tokens of texts, of all that were computed; no layer ever sees the last token of a text."""
        tick = self.tick
        useful = tick.prompt_tokens + tick.generated_tokens - self.rows
        return min(1.0, useful / tick.computed_tokens) if tick.computed_tokens else None

    @property
    def busiest(self) -> tuple[str, float] | None:
        """The lane that was busy longest, and its share of the time."""
        if not self.tick.busy_seconds:
            return None
        lane, seconds = max(self.tick.busy_seconds.items(), key=lambda item: item[1])
        return lane, min(1.0, seconds / max(self.seconds, 1e-9))

    @property
    def seconds_left(self) -> float | None:
        return self.seconds / self.share * (1 - self.share) if self.share > 0 else None

    def entries(self) -> Iterator[Entry]:
        tick, useful = self.tick, self.useful_share
        yield noted(requests=self.requests, requests_done=self.requests_done, requests_failed=self.requests_failed)
        of_use = "" if useful is None else f"; {useful:.1%} of what was computed was of use"
        yield entry(
            "tokens",
            f"{tick.prompt_tokens} read and {tick.generated_tokens} generated in {self.seconds:.1f} s{of_use}",
            seconds=round(self.seconds, 3),
            seconds_left=None if self.seconds_left is None else round(self.seconds_left, 1),
            prompt_tokens=tick.prompt_tokens,
            generated_tokens=tick.generated_tokens,
            computed_tokens=tick.computed_tokens,
            useful_share=None if useful is None else round(useful, 4),
        )
        yield entry(
            "speed",
            f"{self.rates}, both over the whole time",
            prompt_tokens_per_second=round(self.prompt_rate, 3),
            generated_tokens_per_second=round(self.decode_rate, 3),
        )
        if tick.proposed_tokens:
            yield drafts_entry(Drafted(tick.proposed_tokens, tick.accepted_tokens), tick.generated_tokens, tick.number)
        yield noted(rows_alive=tick.alive, rows_possible=tick.seats, ticks=tick.number)
        yield noted(busy_seconds={lane: round(seconds, 3) for lane, seconds in tick.busy_seconds.items()})


class Metrics:
    """A file that figures are appended to. If it cannot be written, the job goes on without it."""

    def __init__(self, path: Path | None) -> None:
        self._stream: TextIOWrapper | None = None if path is None else path.open("a", encoding="utf-8")
        self._last = 0.0

    def add(self, figures: JobFigures, at_once: bool = False) -> None:
        now = time.monotonic()
        if self._stream is None or (now - self._last < SECONDS_BETWEEN_METRICS and not at_once):
            return
        self._last = now
        try:
            self._stream.write(json.dumps({"time": round(time.time(), 3), **document_of(figures.entries())}) + "\n")
            self._stream.flush()
        except OSError as error:
            print(f"--metrics {self._stream.name} cannot be written any more ({reason(error)})", file=sys.stderr)
            with suppress(OSError):
                self._stream.close()
            self._stream = None

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._stream is not None:
            self._stream.close()


class JobWatch:
    """Listens to a running job."""

    def __init__(
        self,
        progress: Progress,
        metrics: Metrics,
        sizes: RequestSizes,
        finished: Finished,
        shared_tokens: int = 0,
        is_crowded: bool = False,
    ) -> None:
        """`finished` is kept up to date by the writer of records; `shared_tokens` are not read again. `is_crowded`: a crowd was
        told of before."""
        self._progress, self._metrics, self._finished = progress, metrics, finished
        whole = sum(size.rows * (size.prompt_len + size.gen_len) for size in sizes)
        self._work = whole - shared_tokens  # tokens, at most
        self._rows_ended = 0
        self._saved = 0  # tokens that finished requests might have had and did not need
        self._began = time.perf_counter()
        self._tick = NO_TICK
        self._crowd = Crowd(progress.note, is_told=is_crowded)

    def stage(self, stage: Stage, done_bytes: int, total_bytes: int) -> None:
        if stage is Stage.GENERATING and self._tick is NO_TICK:
            self._began = time.perf_counter()
        show_stage(self._progress, stage, done_bytes, total_bytes)

    def finished(self, completion: Completion, gen_len: int) -> None:
        self._saved += sum(gen_len - len(output.token_ids) for output in completion.outputs)
        self._rows_ended += sum(bool(output.token_ids) for output in completion.outputs)

    def tick(self, tick: Tick) -> None:
        self._tick = tick
        figures = self.figures
        self._progress.update(
            ", ".join(self._words(figures)), figures.requests_done, [f"{figures.tick.alive} of {figures.tick.seats} rows"]
        )
        self._metrics.add(figures)
        self._crowd.look()

    @property
    def figures(self) -> JobFigures:
        finished, seconds = self._finished, time.perf_counter() - self._began
        tokens = self._tick.prompt_tokens + self._tick.generated_tokens
        is_over = finished.num_done == len(finished.states)
        share = 1.0 if is_over else min(1.0, tokens / max(1, self._work - self._saved))
        rows = self._rows_ended + self._tick.alive
        return JobFigures(len(finished.states), finished.num_done, finished.num_failed, seconds, share, rows, self._tick)

    def _words(self, figures: JobFigures) -> Iterator[str]:
        if figures.busiest is not None:
            yield f"{figures.busiest[0]} {figures.busiest[1]:.0%} busy"
        yield figures.rates
        if (left := figures.seconds_left) is not None:
            yield f"ETA {clock(left)}"

    def end(self) -> JobFigures:
        """Writes the last figures, and returns them."""
        figures = self.figures
        self._metrics.add(figures, at_once=True)
        return figures


def end_lines(finished: Finished, path: Path, figures: JobFigures | None) -> Iterator[str]:
    """What a person is told at the end; without figures where nothing was left to be run."""
    failed = f", {finished.num_failed} of them failed" if finished.num_failed else ""
    yield from entry("requests", f"{finished.num_done} done{failed}; records in {path}").lines
    yield from lines_of([] if figures is None else figures.entries())
