"""The echo of prompts: what a repetition looks at, its parts where positions are few, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_flexgen.core.workload import Batch
from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.engine.rows import BatchRows
from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.kernels.operations import prompt_attention
from h2o_flexgen.kv import prompt_reading
from h2o_flexgen.kv.step import KVStep
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.text.tokenizer import ByteTokenizer
from tests.helpers.contract import Case, Checkpoints, generate_with, hold_contract
from tests.helpers.resident import _caches, _levels, _states, _through_layers

KVZIP = (("kv_policy", "kvzip"), ("heavy", 4), ("recent", 3))
LONGEST = 127  # tokens of a prompt, of a model of 128 positions: every token of its echo is a part


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["opt", "llama-gqa", "neox-parallel", "qwen3", "qwen3-5", "bamba"])
def test_scores_are_the_highest_attention_that_transformers_gives_a_prompt_when_it_reads_it_twice(
    kind: str, checkpoints: Checkpoints
) -> None:
    (prompt,) = Case(lengths=(40,)).prompts
    model, weights = checkpoints.model(kind, "float32", "float32")
    policy, cpu = Plan.create(kv_policy="kvzip", kv_budget=1.0).policy, torch.device("cpu")
    occupancy = policy.occupancy(Batch((0,), (40,)), 1)
    now = KVStep.of(occupancy.at(0), occupancy.capacity, cpu, echoes_within=model.spec.max_positions)
    caches = _caches(model, _levels(model, policy), 1, [occupancy.capacity], False, cpu, PLAIN)
    _through_layers(model, weights, caches, [now], torch.tensor([prompt * 2]), states=_states(model, 1, cpu))
    for layer, shares in zip(caches.values(), attentions(checkpoints, kind, prompt * 2), strict=True):
        ((_, _, cache),) = layer.caches
        assert cache._scores is not None and cache._scores.scores is not None
        grouped = shares[:, 40:, :40].view(model.spec.kv_heads, -1, 40, 40)
        torch.testing.assert_close(cache._scores.scores[0], grouped.amax((1, 2)), atol=1e-5, rtol=1e-4)


def attentions(checkpoints: Checkpoints, kind: str, text: list[int]) -> list[Tensor]:
    """What each attention of transformers' model attends, (heads, tokens, tokens)."""
    model: Any = checkpoints.hf_model(kind, "float32")
    usual = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        attended = model(torch.tensor([text]), output_attentions=True).attentions
        found: list[Tensor] = [each[0] for each in attended if each is not None]
    finally:
        model.set_attn_implementation(usual)
    return found


def test_values_in_keys_are_not_copied_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, cpu = Plan.create(kv_policy="kvzip", kv_budget=1.0).policy, torch.device("cpu")
    occupancy, draw = policy.occupancy(Batch((0,), (6,)), 1), torch.Generator().manual_seed(4)
    now = KVStep.of(occupancy.at(0), occupancy.capacity, cpu, echoes_within=128)
    q, k = (torch.randn(1, heads, 12, 8, generator=draw) for heads in (4, 1))
    is_one: list[bool] = []

    def noted(q: Tensor, k: Tensor, v: Tensor, *others: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        is_one.append(k.data_ptr() == v.data_ptr())
        return prompt_attention(q, k, v, *others, **named)

    monkeypatch.setattr(prompt_reading, "prompt_attention", noted)
    once, apart = (prompt_reading.attend_with_echo(now, q, k, v, None) for v in (k, k.clone()))
    assert all(torch.equal(own, other) for own, other in zip(once, apart, strict=True))
    assert is_one == [True, True, False, False]


@pytest.mark.parametrize("kind", ["opt", "llama-gqa", "qwen3-5"])
def test_an_echo_comes_in_parts_where_positions_are_few_and_a_row_says_what_it_says_alone(
    kind: str, any_device: str, checkpoints: Checkpoints, offload: Path
) -> None:
    case = Case(kind, (30, 30, 20, 50, 40, 30), (LONGEST, 3, 100, 60), 2, 4, 1, device=any_device, policy=KVZIP)
    hold_contract(case, checkpoints, offload)
    said = []
    for rows in (4, 1):
        with case.open(checkpoints, offload, gpu_batch_size=rows) as llm:
            said.append([one.token_ids for one in generate_with(llm, case)[0]])
    assert said[0] == said[1]


def test_parts_of_an_echo_stand_behind_the_text_and_pads_count_nothing() -> None:
    states = [
        RowState(row, [1 + row] * length, SamplingParams(max_tokens=4), ByteTokenizer(50)) for row, length in enumerate((5, 2))
    ]
    batch = Batch((0, 1), (5, 2), echoes_within=8)
    plans = [Plan.create(kv_policy="kvzip", heavy=9, prefill_tokens=most) for most in (20, 19)]
    rows, fewer = (BatchRows(batch, states, plan, [plan.policy], 4, torch.device("cpu")) for plan in plans)
    (part,) = rows.parts
    assert part.tokens.tolist() == [[1] * 10, [2, 2, 0, 0, 0, 2, 2, 0, 0, 0]] and (rows.tokens, rows.prompt_tokens) == (20, 7)
    assert part.now.text_positions[:, 5:].tolist() == [[5, 6, 7, 5, 6], [2, 3, 4, 5, 6]]
    split, first, second = (part.now.echo[place] for place in (0, 1, 2))
    assert [one.places for one in part.now.echo] == [slice(0, 3), slice(3, 5), slice(0, 5)]
    assert [one.before.tolist() for one in (split, first, second)] == [[5], [5], [2]]
    assert [one.weights.tolist() for one in (split, second)] == [[[1, 1, 1]], [[1, 1, 0, 0, 0]]]
    hidden = torch.arange(20.0).view(2, 10, 1)
    assert rows.last_hidden(hidden).tolist() == [[4], [11]]
    assert [one.tokens.shape[1] for one in fewer.parts] == [10, 4]


def test_a_prompt_that_leaves_no_position_for_its_echo_is_refused(checkpoints: Checkpoints, offload: Path) -> None:
    with Case(policy=KVZIP).open(checkpoints, offload) as llm:
        with pytest.raises(
            ValueError, match=r"prompt 0 has 128 tokens, which .* repeats after them, .* give 127 tokens at most"
        ):
            llm.generate([[1] * (LONGEST + 1)], SamplingParams(max_tokens=1))
        with pytest.raises(ValueError, match=r"context is 128, but .* has 128 positions; give 1 to 127"):
            llm.converse(LONGEST + 1)
        assert llm.loaded._engine is None


def test_a_prefix_that_others_have_read_is_not_judged_by_an_echo() -> None:
    with pytest.raises(ValueError, match="'kvzip' judges a prompt by its own echo, so prefix_policy 'judged' cannot"):
        Plan.create(kv_policy="kvzip", prefix_policy="judged")
    assert Plan.create(kv_policy="kvzip", prefix_policy="judged", shared_prefixes=False).policy.echoes


@pytest.mark.parametrize("options", [{"positions": "rolling"}, {"score_decay": 0.9}])
def test_options_that_an_echo_does_not_take_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="kv_policy 'kvzip' does not take"):
        Plan.create(kv_policy="kvzip", **options)
