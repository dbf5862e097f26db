"""What a study says that a policy keeps: the tokens of the definition, and those that the real loop over all layers keeps."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from h2o_flexgen.calibration.text_reading import read_texts
from h2o_flexgen.core.workload import Batch
from h2o_flexgen.evaluation.study.heavy_hitters import study
from h2o_flexgen.evaluation.study.readers import Keeper, held_after
from h2o_flexgen.kv.cache import KVCache
from h2o_flexgen.kv.slots import Coding, SlotScores
from h2o_flexgen.kv.step import KVStep
from h2o_flexgen.llm import LLM
from h2o_flexgen.models.base import Given, computed
from h2o_flexgen.models.new_tokens import NewTokens
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.policies import POLICIES
from h2o_flexgen.policies.policy import NONE, PROBE
from tests.helpers.contract import Checkpoints, distinct_prompts
from tests.policies.oracle import Head

DIM, TOKENS = 8, 70
STUDIED = tuple(name for name, policy in POLICIES.items() if policy.ranks_by not in (NONE, PROBE) and not policy.echoes)
PLAIN = Coding("plain", torch.float32, DIM)


def asked(policy: str, budget: float) -> dict[str, Any]:
    return {"kv_policy": policy, "kv_budget": budget}


@pytest.mark.parametrize("prompt_len", [1, 5, 40])
@pytest.mark.parametrize("policy", STUDIED)
def test_kept_are_those_of_the_definition_at_every_step(policy: str, prompt_len: int) -> None:
    kv_heads, group, options = 3, 2, asked(policy, 0.3)
    generator = torch.Generator().manual_seed(prompt_len)
    q, k, v = (torch.randn(1, TOKENS, heads, DIM, generator=generator) for heads in (kv_heads * group, kv_heads, kv_heads))
    keeper = Keeper(Plan.create(**options).policy, TOKENS, prompt_len, PLAIN)
    out = keeper.attend(NewTokens(2 * q, k, v))[0].view(TOKENS, kv_heads, group, DIM)
    assert keeper.gone.min() >= prompt_len, "nothing goes before the prompt is read"
    for number in range(kv_heads):
        head = Head(options, prompt_len, 0, number, None, TOKENS)
        new = slice(0, prompt_len)
        while new.stop <= TOKENS:
            mine = slice(number * group, (number + 1) * group)
            rows = (2 * q[0, new, mine], k[0, new, number], v[0, new, number])
            expected = head.attend(*(part.double().numpy() for part in rows), decodes=new.start > 0)
            np.testing.assert_allclose(out[new, number].numpy(), expected, atol=2e-5)
            held = held_after(keeper.gone[0, number], new.stop)
            assert np.flatnonzero(held).tolist() == sorted(head.kept), f"head {number}, {new.stop} tokens read"
            new = slice(new.stop, new.stop + 1)


@pytest.mark.parametrize("kind", ["opt", "llama-gqa", "neox-parallel"])
@pytest.mark.parametrize("policy", ["h2o", "tova"])
def test_layer_by_layer_is_token_by_token(kind: str, policy: str, checkpoints: Checkpoints) -> None:
    """A study takes all tokens through one layer before the next one comes; a run takes one token through all layers."""
    model, weights = checkpoints.model(kind, "float32", "float32")
    spec, prompt_len, chosen = model.spec, 9, Plan.create(**asked(policy, 0.25)).policy
    text = distinct_prompts((TOKENS,), seed=8)[0]
    occupancy = chosen.occupancy(Batch((0,), (prompt_len,), context=TOKENS), 1 + TOKENS - prompt_len)
    shape = (1, spec.kv_heads, occupancy.capacity)
    caches, notes = {}, {}
    for layer in spec.kv_layers:
        notes[layer] = SlotScores.over(torch.zeros(8 * shape[1] * shape[2], dtype=torch.uint8), chosen, shape)
        caches[layer] = KVCache(torch.zeros(2, *shape, spec.head_dim), notes[layer])
    kept = []
    with torch.inference_mode():
        for step in range(occupancy.gen_len):
            now, end = KVStep.of(occupancy.at(step), occupancy.capacity, torch.device("cpu")), prompt_len + step
            hidden = torch.tensor([text[end - 1 if step else 0 : end]])
            for layer, one in enumerate(spec.layers[:-1]):
                given = Given(now.positions, partial(caches[layer].attend, now)) if one.has_kv else Given(now.positions)
                hidden = computed(model, one, hidden, weights[layer], given)
            count = occupancy.counts(step + 1)[0]
            kept.append([[sorted(head[:count].tolist()) for head in notes[layer].positions[0]] for layer in spec.kv_layers])
    with LLM(str(checkpoints.folder(kind)), dtype="float32") as llm:
        found = study(llm, text, [policy], 0.25, prompt_len=prompt_len)
    for step, layers in enumerate(kept):
        held = held_after(found.gone[policy], prompt_len + step)
        for layer, head in np.ndindex(held.shape[:2]):
            assert np.flatnonzero(held[layer, head]).tolist() == layers[layer][head], f"step {step}, layer {layer}"


def test_a_budget_of_everything_keeps_all_and_attends_as_the_full_cache(checkpoints: Checkpoints) -> None:
    with LLM(str(checkpoints.folder("llama-gqa")), dtype="float32") as llm:
        found = study(llm, distinct_prompts((40,))[0], ["h2o", "local"], 1.0)
    assert all((gone == 41).all() for gone in found.gone.values())
    assert all(np.allclose(shares, 1.0, atol=1e-5) for shares in found.captured.values())
    assert all((each == 1).all() for each in (*found.overlap.values(), *found.heaviest_found.values()))
    assert all((each == 1).all() for each in found.survival.values())


def test_held_after_knows_neither_the_future_nor_what_has_gone() -> None:
    gone = np.array([[[3, 6, 4, 6, 6]]], dtype=np.int32)
    assert [np.flatnonzero(held_after(gone, read)).tolist() for read in range(6)] == [
        [],
        [0],
        [0, 1],
        [1, 2],
        [1, 3],
        [1, 3, 4],
    ]


def test_a_model_whose_scores_have_a_cap_is_not_studied() -> None:
    capped: Any = SimpleNamespace(spec=SimpleNamespace(name="a model", attention_cap=50.0))
    with pytest.raises(ValueError, match=r"of a model have a cap, 50, which studies .* take a model without"):
        read_texts(capped, [])
