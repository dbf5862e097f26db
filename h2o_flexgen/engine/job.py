"""A job: requests whose sizes are known, and whose texts are read when their turn comes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from h2o_flexgen.core.prefixes import PrefixFinder, PrefixGroups
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.sampling.params import SamplingParams


class Size(NamedTuple):
    """What a request may need."""

    prompt_len: int
    gen_len: int  # tokens that it may grow; 0: it only scores its prompt
    rows: int = 1  # completions
    scores: bool = False  # the log-probabilities of its prompt are asked for


@dataclass(frozen=True)
class Request:
    """A prompt and how it is to be continued."""

    prompt: object  # a Prompt, a text, token ids, or a dict of one of them
    params: SamplingParams | None = None
    index: int | None = None  # its number in the input (default: its place): completions and random numbers go by it


class Job(Protocol):
    @property
    def sizes(self) -> Sequence[Size]: ...

    @property
    def prefixes(self) -> PrefixGroups | None:
        """The groups of requests that begin alike; None if nobody looked for them."""

    def request(self, place: int) -> Request:
        """The request at this place, read again if need be."""


Requests: TypeAlias = "Job | Iterable[Request | object]"  # what is not a request is a prompt


def prefix_finder(plan: Plan) -> PrefixFinder | None:
    """Finds what requests begin with alike, as far as this plan can share it; None if it shares nothing. Where rows take copies
    that are judged, all queries that may count in that are their own."""
    if not plan.shared_prefixes:
        return None
    own = plan.policy.last_queries if plan.copies_prefixes else None
    return PrefixFinder(plan.least_prefix, own or 1)
