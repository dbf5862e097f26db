"""What is said of texts that were scored by labels, in the objects of vLLM."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from h2o_flexgen.core.labels import Labels
from h2o_flexgen.jobs.label_fields import CLASSIFY, RERANK, SCORE
from h2o_flexgen.jobs.line import Line
from h2o_flexgen.jobs.line_fields import LabelForm
from h2o_flexgen.sampling.completion import Completion
from h2o_flexgen.sampling.pooling import Classification, Ranked, best_first
from h2o_flexgen.text.prompts import TextPair

Answered: TypeAlias = "Sequence[tuple[Line, Classification]]"
Said = dict[str, object]


def label_body(head: Said, counted: Said, labels: Labels, answered: Sequence[tuple[Line, Completion]]) -> Said:
    """The whole answer. `head`: its id, when it was made, and the model; `counted`: the tokens that were read."""
    told = [(line, _classified(completion, labels)) for line, completion in answered]
    return _BODIES[_form(told).url](head, counted, told)


def _classified(completion: Completion, labels: Labels) -> Classification:
    assert completion.embedding is not None, f"{completion.index} was not classified"
    ids = completion.prompt_token_ids
    return Classification(completion.index, completion.prompt, ids, labels, completion.embedding, completion.truncated_tokens)


def _labelled(head: Said, counted: Said, told: Answered) -> Said:
    data = [
        {"index": place, "label": one.label, "probs": list(one.probs), "num_classes": len(one.labels.names), **_cut(line, one)}
        for place, (line, one) in enumerate(told)
    ]
    return {**_list_of("classify", head), "data": data, "usage": counted}


def _scored(head: Said, counted: Said, told: Answered) -> Said:
    data = [
        {"index": place, "object": "score", "score": one.probs[0], **_cut(line, one)} for place, (line, one) in enumerate(told)
    ]
    return {**_list_of("score", head), "data": data, "usage": counted}


def _ranked(head: Said, counted: Said, told: Answered) -> Said:
    each = []
    for place, (line, one) in enumerate(told):
        assert isinstance(line.prompt, TextPair), "ranks are of pairs"
        each.append(Ranked(place, line.prompt.document, one.probs[0], one.truncated_tokens))
    results = [
        {
            "index": one.index,
            "document": {"text": one.document},
            "relevance_score": one.score,
            **_cut(*told[one.index]),
        }
        for one in best_first(each, _form(told).top_n)
    ]
    return {"id": f"rerank-{head['id']}", "model": head["model"], "usage": counted, "results": results}


def _list_of(kind: str, head: Said) -> Said:
    return {"id": f"{kind}-{head['id']}", "object": "list", "created": head["created"], "model": head["model"]}


def _form(told: Answered) -> LabelForm:
    form = told[0][0].options.form
    assert isinstance(form, LabelForm), "others are not scored by labels"
    return form


def _cut(line: Line, one: Classification) -> Said:
    """How many tokens are missing, if the prompt might be cut."""
    return {} if _form([(line, one)]).truncate is None else {"truncated_tokens": one.truncated_tokens}


_BODIES: Mapping[str, Callable[[Said, Said, Answered], Said]] = {CLASSIFY: _labelled, SCORE: _scored, RERANK: _ranked}
