"""A study of facts: where the fact stands, which heads look at it, which still hold it, and how policies rank it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from h2o_flexgen.checkpoints.model_places import DEMO, held_out_prose
from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.evaluation.study import readers
from h2o_flexgen.evaluation.study.facts import FactsStudy, study_facts
from h2o_flexgen.evaluation.study.readers import Keeper, LevelKeeper, held_after, ranks
from h2o_flexgen.evaluation.study.study_pictures import draw_facts
from h2o_flexgen.evaluation.tasks.recall import FactsAsked, asked_facts
from h2o_flexgen.kv.cache import KVCache
from h2o_flexgen.kv.slots import Coding
from h2o_flexgen.llm import LLM
from h2o_flexgen.models.new_tokens import NewTokens
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.policies.by_position import Full
from h2o_flexgen.policies.head_budgets import HeadBudgets
from h2o_flexgen.policies.levels import Level

DIM, TOKENS, PROMPT, KV_HEADS, GROUP = 8, 40, 30, 3, 2
PLAIN = Coding("plain", torch.float32, DIM)
ASKED = FactsAsked(held_out_prose(), length=200, examples=1, depth=0.1, seed=3)
POLICIES = ("h2o", "snapkv", "local")
BY_HEADS = "local, head budgets"


def budgets_of(spec: ModelSpec) -> HeadBudgets:
    """The heads of the second layer, which copy in the demo model, keep all."""
    layers, heads = len(spec.kv_layers), spec.kv_heads
    rest = (0.2 * layers - 1) / (layers - 1)
    return HeadBudgets("demo", "made", (0.2,), (tuple((1.0 if layer == 1 else rest,) * heads for layer in range(layers)),))


@pytest.fixture(scope="module")
def studied() -> FactsStudy:
    with LLM(DEMO, dtype="float32") as llm:
        return study_facts(llm, ASKED, POLICIES, 0.2, heads=(None, budgets_of(llm.spec)))


def test_a_fact_stands_in_its_context_as_it_is_asked_for() -> None:
    with LLM(DEMO, dtype="float32") as llm:
        visible = asked_facts(llm, ASKED)
        hidden = asked_facts(llm, replace(ASKED, question="hidden", mentions=3))
        with pytest.raises(ValueError, match=r"texts of 99999 tokens are asked for, but .* positions; give fewer"):
            asked_facts(llm, replace(ASKED, length=99999))
    for text, repeated in zip(visible, hidden):
        answer = text.ids[text.asked :]
        assert [text.ids[place] for place in text.fact] == [*answer] and max(text.fact) < text.context_len
        assert (text.prompt_len, repeated.prompt_len) == (text.asked, repeated.context_len)
        assert len(repeated.fact) == 3 * len(answer)
        assert text.queries == (text.asked - 1, text.asked - 1 + len(answer)), "the last token of the answer asks for nothing"
    assert [text.kind for text in visible] == ["passkey", "lookup"]


def test_a_reader_that_finds_the_fact_holds_it_or_has_lost_it(studied: FactsStudy) -> None:
    assert {layer for layer, _ in studied.finders[:2]} == {1} and studied.looked[1].min() > 0.3
    assert all(studied.looked[head] >= 0.01 for head in studied.finders) and len(studied.finders) < studied.looked.size
    assert studied.held["local"].max() == 0 and studied.reached["local"] == 0, "a window has left the fact behind"
    assert studied.held[BY_HEADS][1].min() == 1 and studied.reached[BY_HEADS] > 0.95
    assert np.isnan(studied.went[BY_HEADS][1]).all() and (studied.went["local"] == 0).all()
    assert studied.reached["local"] < studied.reached["h2o"] < studied.reached[BY_HEADS]


def test_it_says_all_of_it(studied: FactsStudy) -> None:
    told = json.loads(json.dumps(studied.as_json(), allow_nan=False))
    assert told["policies"].keys() == {*POLICIES, *(f"{name}, head budgets" for name in POLICIES)}
    assert told["attention_by_layer_and_head"] == pytest.approx(studied.looked, abs=1e-5)
    assert told["policies"][BY_HEADS]["went_after_by_layer_and_head"][1] == [None] * studied.looked.shape[1]
    said = studied.lines()
    assert "1 passkey, 1 lookup" in said[0] and "said once at 10 % of the text" in said[1]
    for name in studied.names:
        assert sum(line.startswith(f"{name}  ") for line in said) == 1


def test_a_picture_is_written(studied: FactsStudy, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_facts(studied, tmp_path / "facts.png")
    assert (tmp_path / "facts.png").read_bytes().startswith(b"\x89PNG")


def test_policies_that_cannot_be_studied_are_refused() -> None:
    with LLM(DEMO, dtype="float32") as llm:
        for name, why in (("full", "keeps everything"), ("kvzip", "by an echo"), ("kvzap", "asks a probe")):
            with pytest.raises(ValueError, match=f"kv_policy '{name}' .*{why}"):
                study_facts(llm, ASKED, [name])


# -- readers ---------------------------------------------------------------------------------------------------------------


def drawn() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, TOKENS, heads, DIM, generator=generator) for heads in (KV_HEADS * GROUP, KV_HEADS, KV_HEADS))
    return 2 * q, k, v


@pytest.mark.parametrize("name", ["h2o", "snapkv", "local"])
def test_heads_of_a_level_keep_as_by_themselves(name: str) -> None:
    policy, (q, k, v) = Plan.create(kv_policy=name, kv_budget=0.3).policy, drawn()
    mixed = LevelKeeper((Level(Full(), ((1,),)), Level(policy, ((0, 2),))), TOKENS, PROMPT, PLAIN)
    alike, whole = (Keeper(one, TOKENS, PROMPT, PLAIN) for one in (policy, Full()))
    out, of_alike, of_whole = (
        reader.attend(NewTokens(q, k, v)).view(TOKENS, KV_HEADS, -1).numpy() for reader in (mixed, alike, whole)
    )
    for head, (expected, keeper) in enumerate([(of_alike, alike), (of_whole, whole), (of_alike, alike)]):
        np.testing.assert_allclose(out[:, head], expected[:, head], atol=1e-6)
        assert np.array_equal(mixed.gone[0, head], keeper.gone[0, head])
    assert (mixed.gone[0, 1] == TOKENS + 1).all() and (mixed.gone[0, 0] <= TOKENS).any()


@pytest.mark.parametrize("name", ["h2o", "local"])
def test_values_that_are_in_keys_are_not_kept_beside_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, (q, k, _) = Plan.create(kv_policy=name, kv_budget=0.3).policy, drawn()
    sets: list[int] = []

    def noted(image: torch.Tensor, *others: Any, **named: Any) -> KVCache:
        sets.append(len(image))
        return KVCache(image, *others, **named)

    monkeypatch.setattr(readers, "KVCache", noted)
    apart, joint = (Keeper(policy, TOKENS, PROMPT, coding) for coding in (PLAIN, replace(PLAIN, values_in_keys=DIM - 2)))
    expected, out = (keeper.attend(NewTokens(q, k, k)).view(TOKENS, -1, DIM)[..., 2:] for keeper in (apart, joint))
    torch.testing.assert_close(out, expected)
    assert sets == [2, 1] and np.array_equal(joint.gone, apart.gone)


@pytest.mark.parametrize("name", ["h2o", "snapkv", "tova", "local", "random"])
def test_the_best_by_rank_are_those_that_are_kept(name: str) -> None:
    q, k, v = (each[:, :PROMPT] for each in drawn())
    policy = Plan.create(kv_policy=name, kv_budget=0.4).policy
    keeper = Keeper(policy, PROMPT, PROMPT, PLAIN)
    places = ranks(keeper, NewTokens(q, k, v)).numpy()
    assert np.array_equal(np.sort(places), np.tile(np.arange(PROMPT), (KV_HEADS, 1))), "every place is taken once"
    keeper.attend(NewTokens(q, k, v))
    budget = keeper.occupancy.budgets[0]
    is_protected = np.arange(PROMPT) >= PROMPT - budget.prompt_window
    for head in range(KV_HEADS):
        kept = held_after(keeper.gone[0, head], PROMPT)
        others = np.flatnonzero(~is_protected)
        best = sorted(others, key=lambda token: places[head, token])[: budget.slots - budget.prompt_window]
        assert sorted(best) == np.flatnonzero(kept & ~is_protected).tolist()
