"""FactsStudy: what a study of facts has found, as tables for a terminal and as one JSON document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import chain, product

import numpy as np
import torch
from torch import Tensor

from h2o_flexgen.calibration.text_reading import OnLayer, TextReading, read_texts
from h2o_flexgen.evaluation.study.heavy_hitters import percent, table
from h2o_flexgen.evaluation.study.readers import (
    Array,
    Gone,
    Keeper,
    LevelKeeper,
    attend_whole,
    attention_of,
    coding_of,
    ranks,
    studied_policies,
)
from h2o_flexgen.evaluation.tasks.recall import AskedFact, FactsAsked, asked_facts
from h2o_flexgen.kv.slots import Coding
from h2o_flexgen.llm import LLM
from h2o_flexgen.models.new_tokens import NewTokens
from h2o_flexgen.policies.head_budgets import HeadBudgets
from h2o_flexgen.policies.levels import levels_of
from h2o_flexgen.policies.policy import KVPolicy

BY_HEAD = ", head budgets"
FINDERS, LEAST_LOOK = 10, 0.01  # heads that are listed: at most so many, and those that look at the fact at all
NONE_WENT = "-"
DIGITS = 5


@dataclass(frozen=True, eq=False)
class FactsStudy:
    """Everything of a fact's tokens is (layers, kv_heads, tokens of the fact), for each text."""

    model: str
    asked: FactsAsked
    budget: float  # share of each text
    texts: tuple[AskedFact, ...]
    attention: tuple[Array, ...]  # on each token of the fact, mean of the queries that make the answer; full cache
    ranks: Mapping[str, tuple[Array, ...]]  # by policy: as shares of the context, 0 for what would be kept longest
    gone: Mapping[str, tuple[Gone, ...]]  # by policy and by how heads share the budget out: tokens read when it was evicted

    @property
    def names(self) -> tuple[str, ...]:
        """The policies with each way of sharing the budget out."""
        return tuple(self.gone)

    @cached_property
    def looked(self) -> Array:
        """The share of a head's attention that falls on the fact, mean of the texts. (layers, kv_heads)"""
        return np.asarray(np.mean([one.sum(-1) for one in self.attention], axis=0))

    @cached_property
    def finders(self) -> tuple[tuple[int, int], ...]:
        """The layers and KV heads that look at the fact most, most first; one at least."""
        best = np.argsort(-self.looked, axis=None, kind="stable")[:FINDERS]
        heads, looks = self.looked.shape[1], self.looked.ravel()[best] >= LEAST_LOOK
        return tuple((int(place) // heads, int(place) % heads) for place in best[: max(1, looks.sum())])

    @cached_property
    def held(self) -> Mapping[str, Array]:
        """The share of the fact's tokens that is held when the answer is asked for, mean of the texts. (layers, kv_heads)"""
        return {name: np.asarray(np.mean([one.mean(-1) for one in self._holds(name)], axis=0)) for name in self.names}

    @cached_property
    def reached(self) -> Mapping[str, float]:
        """The share of the full cache's attention on the fact that falls on tokens still held then."""
        total = sum(one.sum() for one in self.attention)
        return {
            name: float(sum((one * held).sum() for one, held in zip(self.attention, self._holds(name))) / total)
            for name in self.names
        }

    @cached_property
    def rank(self) -> Mapping[str, Array]:
        """The median place of the fact's tokens after the context. (layers, kv_heads)"""
        return {name: np.asarray(np.median(np.concatenate(of_texts, -1), -1)) for name, of_texts in self.ranks.items()}

    @cached_property
    def went(self) -> Mapping[str, Array]:
        """The median number of tokens after the prompt when tokens of the fact were evicted; NaN if none was. 0 is the end of
        the prompt. (layers, kv_heads)"""
        return {name: _median_steps(self.texts, of_texts) for name, of_texts in self.gone.items()}

    def policy_of(self, name: str) -> str:
        """The policy, without how its budget is shared out."""
        return name.removesuffix(BY_HEAD)

    def over_finders(self, by_head: Array) -> Array:
        """The figures of the heads that look most, most first."""
        return np.asarray(by_head[tuple(np.transpose(self.finders))])

    def _holds(self, name: str) -> list[Array]:
        return [(gone > text.asked).astype(np.float64) for text, gone in zip(self.texts, self.gone[name])]

    def as_json(self) -> dict[str, object]:
        return _as_json(self)

    def lines(self) -> list[str]:
        """The tables for a terminal."""
        return [*_of_texts(self), "", *_of_finders(self), "", *_of_policies(self)]


def _median_steps(texts: Sequence[AskedFact], gone: Sequence[Gone]) -> Array:
    steps = np.concatenate([one - text.prompt_len for text, one in zip(texts, gone)], -1).astype(np.float64)
    is_gone = np.concatenate([one <= len(text.ids) for text, one in zip(texts, gone)], -1)
    found = np.full(steps.shape[:2], np.nan)
    for head in np.ndindex(found.shape):
        if is_gone[head].any():
            found[head] = np.median(steps[head][is_gone[head]])
    return found


# -- for a terminal ----------------------------------------------------------------------------------------------------------


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


def _as_json(study: FactsStudy) -> dict[str, object]:
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


@dataclass
class FactReader:
    """Reads a text with everything kept; notes what the answer's queries look at, and how policies rank the fact."""

    text: AskedFact
    judges: Mapping[str, Keeper]  # by policy, with the kind of budget that the ranks are of
    attention: list[Tensor] = field(default_factory=list)  # by layer: (kv_heads, tokens of the fact)
    ranks: dict[str, list[Tensor]] = field(default_factory=dict)

    def attend(self, tokens: NewTokens) -> Tensor:
        """Reads all tokens in the next layer; a models.attention.Attend for one row."""
        read, fact, context = attend_whole(tokens), [*self.text.fact], slice(self.text.context_len)
        shares = attention_of(read.q, read.k, *self.text.queries, read.sink_scores).shares  # (kv_heads, group, queries, keys)
        self.attention.append(shares[..., fact].mean((1, 2)))
        for name, judge in self.judges.items():
            place = ranks(judge, tokens.part(context))[:, fact]
            self.ranks.setdefault(name, []).append(place / self.text.context_len)
        return read.out


@torch.inference_mode()
def study_facts(
    llm: LLM,
    asked: FactsAsked,
    policies: Sequence[str] = ("h2o", "snapkv", "local"),
    budget: float = 0.2,
    *,
    heads: Sequence[HeadBudgets | None] = (None,),
    on_layer: OnLayer | None = None,
) -> FactsStudy:
    """Studies facts in prose; each policy keeps the share `budget` of each text, shared out among heads in each way of `heads`
    (None: equal budgets). Answers are forced, so that all attend the same tokens. `on_layer` is called with the number of
    layers done and the number of all."""
    texts, chosen, coding = asked_facts(llm, asked), studied_policies(policies, budget), coding_of(llm)
    keepers: dict[str, list[LevelKeeper]] = {}
    for shared_out, (name, policy) in product(heads, chosen.items()):
        label = name if shared_out is None else name + BY_HEAD
        levels = levels_of(policy, shared_out, llm.spec)
        keepers[label] = [LevelKeeper(levels, len(text.ids), text.prompt_len, coding) for text in texts]
    _check_budgets(keepers.values())
    readers = [FactReader(text, _judges(chosen, text, coding)) for text in texts]
    readings = [TextReading(reader.text.ids, reader.attend) for reader in readers]
    for of_texts in keepers.values():
        readings += [TextReading(text.ids, keeper.attend) for text, keeper in zip(texts, of_texts)]
    read_texts(llm.loaded.reading, readings, on_layer)
    return FactsStudy(
        model=llm.name,
        asked=asked,
        budget=budget,
        texts=texts,
        attention=tuple(_array(reader.attention) for reader in readers),
        ranks={name: tuple(_array(reader.ranks[name]) for reader in readers) for name in chosen},
        gone={
            label: tuple(keeper.gone[..., text.fact] for text, keeper in zip(texts, of_texts))
            for label, of_texts in keepers.items()
        },
    )


def _judges(policies: Mapping[str, KVPolicy], text: AskedFact, coding: Coding) -> Mapping[str, Keeper]:
    return {name: Keeper(policy, len(text.ids), text.context_len, coding) for name, policy in policies.items()}


def _check_budgets(keepers: Iterable[Sequence[LevelKeeper]]) -> None:
    """Computes the slots of each level, so that a budget that is too small is refused before anything is loaded."""
    for keeper in chain.from_iterable(keepers):
        for level in keeper.keepers:
            _ = level.occupancy


def _array(by_layer: Sequence[Tensor]) -> Array:
    return np.asarray(torch.stack([*by_layer]).double().cpu().numpy())
