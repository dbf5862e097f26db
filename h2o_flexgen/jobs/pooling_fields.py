"""The fields of requests for embeddings, labels and ranks, as OpenAI and vLLM name them, and a few beyond those."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TypeAlias

from h2o_flexgen.core.allowed_values import Choice
from h2o_flexgen.core.hints import refuse_unknown, shown
from h2o_flexgen.jobs.line_fields import UNUSED, EmbeddingForm, LabelForm, Options
from h2o_flexgen.jobs.model_names import LORA
from h2o_flexgen.sampling.pooling import (
    CLASSIFYING,
    INSTEAD,
    MOST_RETURNED,
    RANKING,
    ClassifyParams,
    PoolingParams,
    read_truncate,
)
from h2o_flexgen.text.prompts import TextPair, read_documents

CLASSIFY, SCORE, RERANK = "/classify", "/v1/score", "/v1/rerank"
FIRST, SECOND, QUERY, DOCUMENTS, TOP_N, TEMPLATE = "text_1", "text_2", "query", "documents", "top_n", "template"
TRUNCATE = "truncate"
_ONLY_CHECKED = ("model", "user")  # the adapter that the first one names is read before; the other one changes nothing
OF_LABELS = frozenset((*_ONLY_CHECKED, TRUNCATE, LORA))  # the fields of all requests for labels and ranks
Given: TypeAlias = "Mapping[str, object]"


def read_label_options(given: Given, beside: Collection[str]) -> Options:
    """The options of a request for labels. A field that is null is left open."""
    return _options(CLASSIFY, given, beside, CLASSIFYING)


def read_scored(given: Given) -> tuple[list[TextPair], Options]:
    """The pairs of a request for scores: one text beside each of several, or as many on both sides."""
    options = _options(SCORE, given, (FIRST, SECOND, TEMPLATE), RANKING)
    first, second = (_texts(name, given.get(name)) for name in (FIRST, SECOND))
    if len(first) not in (1, len(second)):
        raise ValueError(f"{FIRST} has {len(first)} texts and {SECOND} has {len(second)}; give one, or as many")
    first = first * len(second) if len(first) == 1 else first
    return [_pair(one, other, given.get(TEMPLATE)) for one, other in zip(first, second, strict=True)], options


def read_ranked(given: Given) -> tuple[list[TextPair], Options]:
    """The pairs of a request for ranks: a query with each of its documents."""
    options = _options(RERANK, given, (QUERY, DOCUMENTS, TOP_N, TEMPLATE), RANKING)
    if given.get(QUERY) is None or given.get(DOCUMENTS) is None:
        raise ValueError(f"{QUERY if given.get(QUERY) is None else DOCUMENTS} is missing; a request for ranks has both")
    pairs = read_documents(given[QUERY], given[DOCUMENTS], given.get(TEMPLATE))
    if not pairs:
        raise ValueError(f"{DOCUMENTS} is empty; give one text or more")
    return pairs, options


PAIRS: Mapping[str, tuple[str, Callable[[Given], tuple[list[TextPair], Options]]]] = {
    SCORE: (SECOND, read_scored),
    RERANK: (DOCUMENTS, read_ranked),
}  # the field that may be a list, and what reads all of them


def _options(url: str, given: Given, beside: Collection[str], instead: Mapping[str, str]) -> Options:
    found = {name: value for name, value in given.items() if value is not None}
    refuse_unknown("field", found, sorted({*OF_LABELS, *beside}), instead)
    for name in found.keys() & _ONLY_CHECKED:
        UNUSED[name].value(name, found[name])
    most = MOST_RETURNED.value(TOP_N, found[TOP_N]) if TOP_N in found else None
    form = LabelForm(read_truncate(found.get(TRUNCATE)), url, most)
    return Options(ClassifyParams(ranks=url != CLASSIFY, lora_name=found.get(LORA)), form=form)  # type: ignore[arg-type]


def _texts(name: str, given: object) -> list[object]:
    several = given if isinstance(given, list) else [given]
    if not several or not all(isinstance(one, str) and one for one in several):
        raise ValueError(f"{name} is {shown(given)}; it is a text, or a list of texts")
    return several


def _pair(first: object, second: object, template: object) -> TextPair:
    (pair,) = read_documents(first, [second], template)
    return pair


FLOAT, BASE64 = "float", "base64"
ENCODING, OF_PARAMS = "encoding_format", ("pooling", "normalize", LORA)
OF_EMBEDDINGS = frozenset((*_ONLY_CHECKED, ENCODING, *OF_PARAMS, TRUNCATE))
_ENCODINGS = Choice((FLOAT, BASE64))


def read_embedding_options(given: Mapping[str, object], beside: Collection[str]) -> Options:
    """The options of a request for embeddings. A field that is null is left open."""
    found = {name: value for name, value in given.items() if value is not None}
    refuse_unknown("field", found, sorted({*OF_EMBEDDINGS, *beside}), INSTEAD)
    for name in found.keys() & _ONLY_CHECKED:
        UNUSED[name].value(name, found[name])
    params = PoolingParams(**{name: found[name] for name in OF_PARAMS if name in found})  # type: ignore[arg-type]
    encoding = _ENCODINGS.value(ENCODING, found.get(ENCODING, FLOAT))
    return Options(params, form=EmbeddingForm(read_truncate(found.get(TRUNCATE)), encoding == BASE64))
