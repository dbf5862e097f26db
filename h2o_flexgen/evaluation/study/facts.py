"""Studies which KV heads look at a noted fact while a model answers with it, and whether these heads still hold it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, product

import numpy as np
import torch
from torch import Tensor

from h2o_flexgen.evaluation.study.asked_facts import AskedFact, FactsAsked, asked_facts
from h2o_flexgen.evaluation.study.facts_study import BY_HEAD, FactsStudy
from h2o_flexgen.evaluation.study.kept_tokens import Keeper, LevelKeeper, ranks
from h2o_flexgen.evaluation.study.studied_policies import coding_of, studied_policies
from h2o_flexgen.evaluation.study.study_scores import Array
from h2o_flexgen.evaluation.study.text_attention import attention_of
from h2o_flexgen.evaluation.study.text_reading import OnLayer, TextReading, read_texts
from h2o_flexgen.evaluation.study.whole import attend_whole
from h2o_flexgen.kv.coding import Coding
from h2o_flexgen.llm import LLM
from h2o_flexgen.models.new_tokens import NewTokens
from h2o_flexgen.policies.head_budgets import HeadBudgets
from h2o_flexgen.policies.levels import levels_of
from h2o_flexgen.policies.policy import KVPolicy


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
    (None: all keep as much). Answers are forced, so that all attend the same tokens. `on_layer` is called with the number of
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
    read_texts(llm, readings, on_layer)
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
