"""Generation. Prepared rows run block after block, or come and go in one block. A completion is yielded when it ends.

A stream of completions: the rows of a job are made when a seat is free for them, and a request is completed when its last row
ends. Texts are held only while their rows are alive.
"""

from __future__ import annotations

import time
import warnings
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol, TypeAlias

from h2o_flexgen.core.environment import cache_folder
from h2o_flexgen.core.prefix_groups import PrefixGroups, under
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.engine.engine import BlockRun, Engine, OnVisit, Until
from h2o_flexgen.engine.head import AtHead
from h2o_flexgen.engine.job import Job, Request, Requests, RequestSize, prefix_finder, prompt_of, workload_of_job
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.engine.reports import MADE_AGAIN, OnStage, Stage, Ticker, how_far, made_again
from h2o_flexgen.engine.restarted_run import OnShrink, RowsOfBlocks, Shrink, Unfinished, run_blocks
from h2o_flexgen.engine.row_maker import RowMaker
from h2o_flexgen.engine.row_state import RowState, completion_of
from h2o_flexgen.engine.rows import OnToken
from h2o_flexgen.engine.seated_rows import Waiting, WaitingJob
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.workload_plan import WorkloadPlan
from h2o_flexgen.sampling.completion import Completion
from h2o_flexgen.text.prompts import Prompt, read_prompts
from h2o_flexgen.text.tokenizer import Tokenizer

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


# -- streams ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ListedJob:
    """Requests that are all in memory, with their tokens."""

    requests: Sequence[Request]
    sizes: Sequence[RequestSize]
    prefixes: PrefixGroups | None = None

    @classmethod
    def of(cls, requests: Iterable[Request | object], maker: RowMaker) -> ListedJob:
        read = [_read(place, one, maker.tokenizer) for place, one in enumerate(requests)]
        sizes = [maker.size(_index(place, one), one) for place, one in enumerate(read)]
        finder = prefix_finder(maker.plan)
        if finder is None:
            return cls(read, sizes)
        for one, size in zip(read, sizes):
            finder.add(under(size.adapter, prompt_of(one).ids), size.rows)
        return cls(read, sizes, finder.groups())

    def without(self, ended: Container[int]) -> ListedJob:
        """The job without the requests that have these numbers."""
        left = [place for place, one in enumerate(self.requests) if one.index not in ended]
        sizes = [self.sizes[place] for place in left]
        prefixes = None if self.prefixes is None else self.prefixes.only(left, [size.rows for size in sizes])
        return ListedJob([self.requests[place] for place in left], sizes, prefixes)

    def request(self, place: int) -> Request:
        return self.requests[place]


class Stream:
    def __init__(self, job: Job, maker: RowMaker, streamed: bool, most_shared: int | None = None) -> None:
        """`most_shared`: prefixes of more tokens are not shared; None: all that were found are."""
        self._job = job
        self._most_shared = most_shared
        self._maker = maker
        self._streamed = streamed
        self._firsts = [*accumulate((size.rows for size in job.sizes), initial=0)]  # the first row of each request
        self._made: dict[int, list[RowState]] = {}  # rows of requests that have begun
        self._done: Counter[int] = Counter()  # rows of each request that have ended
        self.prompt_tokens = self.generated_tokens = 0  # of rows that have ended

    @cached_property
    def workload(self) -> Workload:
        return workload_of_job(self._job, self._maker.plan, self._maker.spec, self._most_shared)

    @property
    def longest_shared(self) -> int:
        """Tokens of the longest prefix that rows share; 0 if they share nothing."""
        return max((prefix.tokens for prefix in self.workload.prefixes if prefix is not None), default=0)

    @property
    def asks_of_prompts(self) -> bool:
        return any(size.scores for size in self._job.sizes)

    def waiting(self) -> WaitingJob:
        return WaitingJob(self.row, self.asks_of_prompts)

    def row(self, place: int) -> RowState:
        """Makes the row at this place of the workload, and with it all others of its request."""
        request = bisect_right(self._firsts, place) - 1
        if request not in self._made:
            read = _read(request, self._job.request(request), self._maker.tokenizer)
            rows = self._maker.rows_of(_index(request, read), read, self._streamed, self._firsts[request])
            _check_size(request, self._job.sizes[request], rows)
            self._made[request] = rows
        return self._made[request][place - self._firsts[request]]

    def completions(self, ended: Iterable[RowState], ticker: Ticker) -> Iterator[Completion]:
        """Yields the completion of a request when its last row has ended."""
        for row in ended:
            self.prompt_tokens += 0 if row.number else row.prompt_len
            self.generated_tokens += row.num_generated
            request = bisect_right(self._firsts, row.row) - 1
            self._done[request] += 1
            if self._done[request] == len(self._made[request]):
                del self._done[request]
                ticker.requests_done += 1
                yield completion_of(self._made.pop(request))


def job_of(requests: Requests, maker: RowMaker) -> Job:
    """The job itself, or a job made of these requests."""
    return ListedJob.of(requests, maker) if isinstance(requests, Iterable) else requests


def _read(place: int, given: object, tokenizer: Tokenizer) -> Request:
    """A request with its number, and with the tokens of its prompt; what is not a request is a prompt."""
    request = given if isinstance(given, Request) else Request(given)
    if isinstance(request.prompt, Prompt):
        prompt = request.prompt
    else:
        (prompt,) = read_prompts([request.prompt], tokenizer)
    return Request(prompt, request.params, _index(place, request))


def _check_size(place: int, said: RequestSize, rows: Sequence[RowState]) -> None:
    """Refuses a request that differs from the size its job declared: its rows might need more than their seats have."""
    found = rows[0].prompt_len, rows[0].max_tokens, len(rows)
    if found != (said.prompt_len, said.gen_len, said.rows):
        raise ValueError(
            f"request {place} was declared with {said.prompt_len} tokens, max_tokens {said.gen_len} and n {said.rows}, "
            f"but now has {found[0]}, {found[1]} and {found[2]}; its source must not change while the job runs"
        )


def _index(place: int, request: Request) -> int:
    return place if request.index is None else request.index
