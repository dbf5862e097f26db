"""A stream of completions: the rows of a job are made when a seat is free for them, and a request is completed when its last
row ends. Texts are held only while their rows are alive."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from h2o_flexgen.core.prefix_groups import PrefixGroups, under
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.engine.job import Job, Request, Requests, RequestSize, prefix_finder, prompt_of, workload_of_job
from h2o_flexgen.engine.reports import Ticker
from h2o_flexgen.engine.row_maker import RowMaker
from h2o_flexgen.engine.row_state import RowState, completion_of
from h2o_flexgen.engine.seated_rows import WaitingJob
from h2o_flexgen.sampling.completion import Completion
from h2o_flexgen.text.prompts import Prompt, read_prompts
from h2o_flexgen.text.tokenizer import Tokenizer


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
