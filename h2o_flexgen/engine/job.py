"""A job: requests of known sizes. Their texts are read when their turn comes."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from h2o_flexgen.core.buffer_layout import PrefixLayout
from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.prefix_groups import PrefixFinder, PrefixGroups, SharedPrefix
from h2o_flexgen.core.seats import SeatNeed
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.sampling.completion import Completion
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.text.prompts import Prompt


class RequestSize(NamedTuple):
    """What a request may need."""

    prompt_len: int
    gen_len: int  # tokens that it may grow; 0: it only scores its prompt
    rows: int = 1  # completions
    scores: bool = False  # the log-probabilities of its prompt are asked for
    adapter: int = 0  # its number; 0: none


@dataclass(frozen=True)
class Request:
    """A prompt and how it is to be continued."""

    prompt: object  # a Prompt, a text, token ids, or a dict of one of them
    params: SamplingParams | None = None
    index: int | None = None  # its number in the input (default: its place): completions and random numbers go by it


@dataclass(frozen=True)
class BrokenRequest:
    """A request that cannot be run to its end."""

    index: int  # its number in the input, as in a Completion
    reason: str


Outcome: TypeAlias = "Completion | BrokenRequest"


def prompt_of(request: Request) -> Prompt:
    assert isinstance(request.prompt, Prompt), "requests are read before rows are made of them"
    return request.prompt


def without_number(reason: str, number: int) -> str:
    """The reason without the prompt's number, for callers that know a prompt by its line or by the request they sent."""
    return reason.replace(f"prompt {number} ", "the prompt ")


class Job(Protocol):
    @property
    def sizes(self) -> Sequence[RequestSize]: ...

    @property
    def prefixes(self) -> PrefixGroups | None:
        """The groups of requests that begin alike; None if they were not looked for."""

    def request(self, place: int) -> Request:
        """The request at this place, read again if need be."""


class DivisibleJob(Job, Protocol):
    def without(self, ended: Container[int]) -> DivisibleJob:
        """The job without the requests that have these numbers."""


Requests: TypeAlias = "Job | Iterable[Request | object]"  # what is not a request is a prompt


def workload_of_job(job: Job, plan: Plan, spec: ModelSpec, most_shared: int | None = None) -> Workload:
    """All rows of a job, each with what it may need, and what it shares with others. `most_shared`: prefixes of more tokens are
    not shared; None: all that were found are."""
    shared, sizes, copies = job.prefixes, job.sizes, plan.copies_prefixes
    policies = [level.policy for level in plan.levels(spec)]
    beside = PrefixLayout.of(spec, 1, plan.prefix_note_bytes).beside
    known: dict[tuple[SharedPrefix, int, int], SharedPrefix | None] = {}  # equal ones are one: a job may have a million rows

    def prefix_of(request: int, size: RequestSize) -> SharedPrefix | None:
        found = None if shared is None else shared.of(request, beside)
        if found is None or (most_shared is not None and found.tokens > most_shared):
            return None
        kind = found, size.prompt_len, size.gen_len
        if kind not in known:
            need = SeatNeed.behind(found, size.prompt_len, size.gen_len, copies)
            known[kind] = found if all(policy.suits(need) for policy in policies) else None
        return known[kind]

    needs = [SeatNeed(size.prompt_len, size.gen_len) for size in sizes for _ in range(size.rows)]
    prefixes = [prefix for request, size in enumerate(sizes) for prefix in [prefix_of(request, size)] * size.rows]
    return Workload.running(needs, prefixes, copies)


def prefix_finder(plan: Plan) -> PrefixFinder | None:
    """Finds the common beginnings of requests that this plan can share; None if it shares nothing."""
    return PrefixFinder(plan.least_prefix, plan.least_own) if plan.shares_prefixes else None
