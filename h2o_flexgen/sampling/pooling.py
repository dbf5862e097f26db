"""Prompts that are read and not continued: the states of their tokens become one vector, or the head has a score for each
label. No token is picked."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from h2o_flexgen.core.allowed_values import TRUTH, Bounds, Choice
from h2o_flexgen.core.hints import refuse_unknown, shown
from h2o_flexgen.core.labels import Labels
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


CLASSIFYING = {"truncate_prompt_tokens": INSTEAD["truncate_prompt_tokens"]}
RANKING = {**CLASSIFYING, "top_k": "it is called top_n", "return_documents": "documents are always returned"}
MOST_RETURNED = Bounds(1, 1 << 24, note=" documents, or None (all)")


@dataclass(frozen=True)
class ClassifyParams(PoolingParams):
    """How one prompt is classified."""

    ranks: bool = False  # its one score is wanted, and not labels
    labels: Labels | None = None  # those of the model, once that is known

    def __new__(cls, ranks: bool = False, labels: Labels | None = None, **others: object) -> ClassifyParams:
        return object.__new__(cls)

    def under(self, labels: Labels | None, model: str) -> SamplingParams:
        """The same for the labels of a model. One that does not suit is refused."""
        if labels is None:
            raise ValueError(
                f"{model} has no head for classification (it is no checkpoint of a ...ForSequenceClassification); "
                "give one that has, or use embed"
            )
        if self.ranks and len(labels.names) > 1:
            named = shown(", ".join(labels.names))
            raise ValueError(
                f"{model} has {len(labels.names)} labels ({named}), and ranking takes a model with one; use classify"
            )
        return replace(self, labels=labels)


@dataclass(frozen=True)
class Classification:
    """What the model says of a prompt."""

    index: int  # of the prompt in the input
    prompt: str | None  # None if token ids were given
    prompt_token_ids: tuple[int, ...]  # that were read
    labels: Labels
    scores: array[float]  # of the head, one for each label, in fp32
    truncated_tokens: int = 0  # of the prompt, that were left out

    @property
    def probs(self) -> tuple[float, ...]:
        """Probabilities of the labels: together 1, or each by itself where the checkpoint says so or has one. A regression has
        its scores."""
        return self.labels.shares(self.scores)

    @property
    def label(self) -> str:
        """The likeliest label."""
        return self.labels.names[max(range(len(self.scores)), key=self.scores.__getitem__)]


@dataclass(frozen=True)
class Ranked:
    """A document, and how well it answers a query."""

    index: int  # of the document in the input
    document: str
    score: float
    truncated_tokens: int = 0


def best_first(each: Sequence[Ranked], top_n: int | None) -> list[Ranked]:
    """The best documents, or all; of equals the earlier ones first."""
    most = None if top_n is None else MOST_RETURNED.value("top_n", top_n)
    return sorted(each, key=lambda one: -one.score)[:most]
