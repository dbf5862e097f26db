"""Generation: prepared rows run block after block, or come and go in one block. A completion is yielded when it ends."""

from __future__ import annotations

import time
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from h2o_flexgen.core.environment import cache_folder
from h2o_flexgen.engine.engine import BlockRun, Engine, OnVisit, Until
from h2o_flexgen.engine.head import AtHead
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.engine.reports import MADE_AGAIN, OnStage, Stage, Ticker, how_far, made_again
from h2o_flexgen.engine.restarted_run import OnShrink, RowsOfBlocks, Shrink, Unfinished, run_blocks
from h2o_flexgen.engine.row_state import RowState, completion_of
from h2o_flexgen.engine.rows import OnToken
from h2o_flexgen.engine.seated_rows import Waiting
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.workload_plan import WorkloadPlan
from h2o_flexgen.sampling.completion import Completion

OnCompletion: TypeAlias = Callable[[Completion], object]
UseTqdm: TypeAlias = "bool | Callable[..., Any]"  # True: on stderr; or a function that makes a bar like tqdm's
Listeners: TypeAlias = "tuple[OnToken | None, OnStage | None]"
DESCRIPTION = "prompts"


class _Bar(Protocol):
    def update(self, count: int) -> object: ...

    def close(self) -> object: ...


@contextmanager
def shown_progress(use_tqdm: UseTqdm, rows: Sequence[RowState], told: Listeners) -> Iterator[Listeners]:
    """The given listeners; if `use_tqdm` is set, they also show how many prompts are done."""
    if not use_tqdm:
        yield told
    elif use_tqdm is True:
        with Progress(len({row.index for row in rows}), DESCRIPTION) as progress:
            yield _on_stderr(progress, rows, told)
    else:
        bar: _Bar = use_tqdm(total=len({row.index for row in rows}), desc=DESCRIPTION, unit="prompt")
        try:
            yield _counting(rows, told[0], lambda done, tokens: bar.update(1) if done else None), told[1]
        finally:
            bar.close()


def _on_stderr(progress: Progress, rows: Sequence[RowState], told: Listeners) -> Listeners:
    on_token, on_stage = told
    begun, count = time.monotonic(), 0

    def show(done: int, tokens: int) -> None:
        nonlocal count
        count += done
        progress.update(f"{tokens / max(time.monotonic() - begun, 1e-9):.2f} tokens/s", count)

    def show_stage(stage: Stage, done_bytes: int, total_bytes: int) -> None:
        nonlocal begun
        begun = time.monotonic()  # tokens come after the last stage
        if stage in MADE_AGAIN:
            progress.note(made_again(stage, cache_folder("")))
        progress.stage(str(stage), how_far(done_bytes, total_bytes))
        if on_stage is not None:
            on_stage(stage, done_bytes, total_bytes)

    return _counting(rows, on_token, show), show_stage


def _counting(rows: Sequence[RowState], on_token: OnToken | None, show: Callable[[int, int], object]) -> OnToken:
    """Calls `show` for each token with whether it ended its prompt, and with the number of tokens so far."""
    waiting, tokens = Counter(row.index for row in rows), 0

    def count(place: int, token: int, text: str | None) -> None:
        nonlocal tokens
        tokens += 1
        row = rows[place]
        waiting[row.index] -= row.finished
        show(int(row.finished and not waiting[row.index]), tokens)
        if on_token is not None:
            on_token(place, token, text)

    return count


@dataclass(frozen=True)
class PreparedRows:
    """Rows that can be run: their tokens are known, and their workload is planned and fits."""

    rows: Sequence[RowState]
    planned: WorkloadPlan

    def for_use_under(self, plan: Plan, *given: object) -> PreparedRows:
        if self.planned.plan != plan:
            raise ValueError("these prompts were prepared under another plan; prepare them again")
        if any(one is not None for one in given):
            raise ValueError("prompts that are prepared have their sampling_params; give these to prepare")
        if any(row.num_generated or row.finished for row in self.rows):
            raise ValueError("these prompts were generated from already; prepare them again")
        return self


@dataclass(frozen=True)
class Running:
    """How blocks run, whatever happens to them at the head of the model; and the runs that are done."""

    engine: Engine
    at_head: AtHead
    on_visit: OnVisit | None = None
    on_shrink: OnShrink | None = None
    may_shrink: bool = True
    stop_at: Until | None = None
    ticker: Ticker | None = None
    done: list[BlockRun] = field(default_factory=list)  # a long job has many blocks: only the last one keeps its trace

    def rows(self, prepared: PreparedRows) -> Iterator[RowState]:
        """Runs all blocks, and yields each row when it finishes."""
        return self._finished(prepared.planned, RowsOfBlocks(prepared.rows), prepared.rows)

    def _finished(
        self, planned: WorkloadPlan, unfinished: Unfinished, rows: Sequence[RowState] | Waiting
    ) -> Generator[RowState, None, None]:
        def run(block: BlockPlan, may_run_out: bool) -> Generator[RowState, None, BlockRun]:
            may_run_out = may_run_out and self.may_shrink
            if isinstance(rows, Waiting):
                rows.seat_in(block)
            if self.ticker is not None:
                self.ticker.begin_block()
            return self.engine.running(
                block, rows, self.at_head, self.on_visit, self.stop_at, may_run_out=may_run_out, on_pass=self.ticker
            )

        self.engine.trim()
        yield from run_blocks(planned, unfinished, run, self.on_shrink or _warn, self._add)

    def _add(self, ended: BlockRun) -> None:
        if self.done:
            self.done[-1] = self.done[-1].without_trace()
        self.done.append(ended)

    def to_the_end(self, each: Iterable[PreparedRows]) -> None:
        for prepared in each:
            deque(self.rows(prepared), maxlen=0)

    def completions(self, prepared: PreparedRows) -> Iterator[Completion]:
        """Yields one completion for each prompt, when its rows have all ended."""
        of_prompt = defaultdict[int, list[RowState]](list)
        for row in prepared.rows:
            of_prompt[row.index].append(row)
        waiting = Counter(row.index for row in prepared.rows if not row.finished)
        for row in self.rows(prepared):
            waiting[row.index] -= 1
            if not waiting[row.index]:
                yield completion_of(of_prompt.pop(row.index))

    def seated(self, planned: WorkloadPlan, waiting: Waiting) -> Generator[RowState, None, None]:
        """Runs one block in which rows come and go, and yields each row when it finishes. A caller may close it early."""
        return self._finished(planned, waiting, waiting)


def _warn(shrink: Shrink) -> None:
    """Warns callers without a listener: a smaller block is slower, and the warning says why."""
    warnings.warn(f"{shrink} ({shrink.shortage.reason})", RuntimeWarning, stacklevel=2)
