"""What a study of facts says: tables for a terminal, and one JSON document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np

from h2o_flexgen.evaluation.study.study_report import percent, table
from h2o_flexgen.evaluation.study.study_scores import Array

if TYPE_CHECKING:
    from h2o_flexgen.evaluation.study.facts import FactsStudy

NONE_WENT = "-"
DIGITS = 5


# -- for a terminal ----------------------------------------------------------------------------------------------------------


def lines(study: FactsStudy) -> list[str]:
    return [*_of_texts(study), "", *_of_finders(study), "", *_of_policies(study)]


def _of_texts(study: FactsStudy) -> Iterator[str]:
    asked, kinds = study.asked, Counter(text.kind for text in study.texts)
    yield f"facts under {study.model}: {', '.join(f'{count} {kind}' for kind, count in kinds.items())}"
    times = "once" if asked.mentions == 1 else f"{asked.mentions} times"
    where = f"facts said {times} at {100 * asked.depth:g} % of the text"
    yield f"texts of {asked.length} tokens, {where}, questions {asked.question}"


def _of_finders(study: FactsStudy) -> Iterator[str]:
    yield f"the {len(study.finders)} KV heads, of {study.looked.size}, that look at the fact most while they answer"
    rows = [
        [
            str(layer),
            str(head),
            percent(study.looked[layer, head]),
            *(percent(study.held[name][layer, head]) for name in study.names),
        ]
        for layer, head in study.finders
    ]
    rows.append(["all", "", percent(study.looked.mean()), *(percent(study.held[name].mean()) for name in study.names)])
    yield from table(["layer", "head", "attention", *study.names], rows)
    yield "attention: of what the head attends in the full cache, the share on the fact's tokens"
    yield f"policies: the share of the fact's tokens that is held when the answer is asked for, at a budget of {_budget(study)}"


def _of_policies(study: FactsStudy) -> Iterator[str]:
    yield f"what happens to the fact in these {len(study.finders)} heads"
    rows = []
    for name in study.names:
        went = study.over_finders(study.went[name])
        rank = study.over_finders(study.rank[study.policy_of(name)])
        found = NONE_WENT if np.isnan(went).all() else f"{np.nanmedian(went):g}"
        held = percent(study.over_finders(study.held[name]).mean())
        rows.append([name, held, percent(study.reached[name]), percent(float(np.median(rank))), found])
    yield from table(["policy", "held", "reached", "rank", "went after"], rows)
    yield "reached: of all heads' attention on the fact, the share on tokens that are still held"
    yield "rank: of the context, the share that is ranked above the fact's tokens before the question is read, the median"
    yield f"went after: tokens read after the prompt, the median; 0: at the prompt's end; {NONE_WENT}: none went"


def _budget(study: FactsStudy) -> str:
    return f"{100 * study.budget:g} %"


# -- JSON ------------------------------------------------------------------------------------------------------------------


def as_json(study: FactsStudy) -> dict[str, object]:
    asked = {name: value for name, value in asdict(study.asked).items() if name != "prose"}
    return {
        "model": study.model,
        "asked": {**asked, "texts": dict(Counter(text.kind for text in study.texts))},
        "budget": study.budget,
        "attention_by_layer_and_head": _rounded(study.looked),
        "finders": [{"layer": layer, "head": head} for layer, head in study.finders],
        "rank_by_policy_layer_and_head": {name: _rounded(rank) for name, rank in study.rank.items()},
        "policies": {name: _policy(study, name) for name in study.names},
    }


def _policy(study: FactsStudy, name: str) -> dict[str, object]:
    return {
        "held_by_finders": float(study.over_finders(study.held[name]).mean()),
        "reached_attention": study.reached[name],
        "held_by_layer_and_head": _rounded(study.held[name]),
        "went_after_by_layer_and_head": _rounded(study.went[name]),
    }


def _rounded(by_head: Array) -> list[list[float | None]]:
    """Nothing for NaN, which JSON does not have."""
    return [[None if np.isnan(one) else round(float(one), DIGITS) for one in layer] for layer in by_head]
