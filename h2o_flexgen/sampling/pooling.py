"""How a prompt is embedded: the hidden states of its tokens become one vector, and no token is picked."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from h2o_flexgen.core.allowed_values import TRUTH, Bounds, Choice
from h2o_flexgen.core.hints import refuse_unknown
from h2o_flexgen.core.option import check_options, option, options_of
from h2o_flexgen.core.workload import MOST_TOKENS
from h2o_flexgen.sampling.params import SamplingParams

Truncate: TypeAlias = "int | bool | None"  # to so many tokens, or to as many as can be read
LAST, MEAN, CLS = "last", "mean", "cls"
TRUNCATE = Bounds(1, MOST_TOKENS, note=" tokens, True (as many as the model has positions for), or None (no prompt is cut)")
INSTEAD: Mapping[str, str] = {
    "dimensions": "vectors are as wide as the model; cut them, and normalise them again",
    "normalise": "it is called normalize",
    "pooling_type": "it is called pooling",
    "truncate_prompt_tokens": "it is called truncate",
}


@dataclass(frozen=True)
class PoolingParams(SamplingParams):
    """How one prompt is embedded. The states are those behind the last norm of the model."""

    max_tokens: int | None = option(0, Bounds(0, 0))
    pooling: str = option(LAST, Choice((LAST, MEAN, CLS)))  # that of the last token, of all of them, or of the first one
    normalize: bool = option(True, TRUTH)  # to the length 1

    def __new__(cls, *given: object, **named: object) -> PoolingParams:
        refuse_unknown("option", named, POOLING, INSTEAD)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        check_options(self, PoolingParams)

    @property
    def asks_of_prompt(self) -> bool:
        return True


POOLING = options_of(PoolingParams)


def read_truncate(given: object) -> Truncate:
    if given is None or given is False:
        return None
    number: int | bool = given is True or TRUNCATE.value("truncate", given)
    return number


def most_read(truncate: Truncate, longest: int) -> int | None:
    """The tokens of a prompt that are read at most, of so many that can be; None: longer prompts are refused."""
    if truncate is None:
        return None
    return longest if truncate is True else min(longest, truncate)


@dataclass(frozen=True)
class Embedding:
    """The vector of a prompt, in fp32."""

    index: int  # of the prompt in the input
    prompt: str | None  # None if token ids were given
    prompt_token_ids: tuple[int, ...]  # that were read
    embedding: array[float]
    truncated_tokens: int = 0  # of the prompt, that were left out
