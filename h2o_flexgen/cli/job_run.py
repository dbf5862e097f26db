"""A job while it runs: the record of every request is written when it finishes, whatever becomes of the others."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from h2o_flexgen.cli.batch_request import RESUME
from h2o_flexgen.cli.batch_watch import JobFigures, JobWatch, Metrics
from h2o_flexgen.cli.interrupts import Interrupts
from h2o_flexgen.engine.executor import TaskFailed
from h2o_flexgen.engine.job import BrokenRequest, Outcome
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.engine.reports import Stage, Tick, summed
from h2o_flexgen.engine.restarted_run import RestartedRun, Shrink
from h2o_flexgen.jobs.file_job import FileJob
from h2o_flexgen.jobs.index import SOUND, ChangedInput, Index
from h2o_flexgen.jobs.openai_answers import BROKEN, RecordMaker
from h2o_flexgen.jobs.output import JobOutput, Recording
from h2o_flexgen.jobs.recovery import Finished
from h2o_flexgen.llm import LLM

ENDING = "ending: what is computed now is finished first; another signal ends at once"


@dataclass(frozen=True)
class JobRun:
    llm: LLM
    left: FileJob
    records: RecordMaker
    output: JobOutput
    seed: int
    metrics: Path | None
    elsewhere: Elsewhere | None = None  # what runs requests, if not this process

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
                JobWatch(progress, metrics, self.left.sizes, finished, self.left.shared_tokens),
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


def end_lines(finished: Finished, path: Path, figures: JobFigures | None) -> Iterator[str]:
    """What a person is told at the end; without figures where nothing was left to be run."""
    failed = f", {finished.num_failed} of them failed" if finished.num_failed else ""
    yield f"requests  {finished.num_done} done{failed}; records in {path}"
    if figures is None:
        return
    tick = figures.tick
    useful = "" if figures.useful_share is None else f"; {figures.useful_share:.1%} of what was computed was of use"
    yield f"tokens    {tick.prompt_tokens} read and {tick.generated_tokens} generated in {figures.seconds:.1f} s{useful}"
    yield f"speed     prefill {figures.prompt_rate:.1f} and decode {figures.decode_rate:.1f} tokens/s"
