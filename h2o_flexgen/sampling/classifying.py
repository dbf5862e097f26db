"""How a prompt is classified, and what comes of it: the head's score for each label, of the prompt's last token."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from h2o_flexgen.core.allowed_values import Bounds
from h2o_flexgen.core.hints import shown
from h2o_flexgen.core.labels import Labels
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.sampling.pooling import INSTEAD as OF_EMBEDDINGS
from h2o_flexgen.sampling.pooling import PoolingParams

CLASSIFYING = {"truncate_prompt_tokens": OF_EMBEDDINGS["truncate_prompt_tokens"]}
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
        return ClassifyParams(ranks=self.ranks, labels=labels)


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
