"""Scores: in one pass they are those of transformers, token by token they are those of the cache that a policy keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from h2o_flexgen import SamplingParams
from h2o_flexgen.core.site import Site
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.engine import scoring
from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.engine.scoring import Scored, decode_groups
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.workload_plan import WorkloadPlan
from h2o_flexgen.schedule.ops import Op
from h2o_flexgen.text.tokenizer import ByteTokenizer
from tests.engine.test_shrink import fail_at
from tests.helpers import tiny
from tests.helpers.contract import POLICIES, UNLIKE, Case, Checkpoints
from tests.helpers.pairwise import in_turn
from tests.helpers.samples import first_of

Pairs = list[tuple[list[int], list[int]]]
ON_DISK, MIXED = (0, 0) * 3, (30, 30, 20, 50, 40, 30)
PLANS = (
    Case("opt"),
    Case("llama-gqa", ON_DISK, gpu_batch_size=3, num_gpu_batches=1),
    Case("neox-parallel", MIXED, prefill_tokens=12),
    Case("opt-350m", MIXED, gpu_batch_size=1, schedule="row_by_row"),
    Case("qwen2-wordy", ON_DISK, sep_layer=False, prefill_tokens=1),
    Case("llama31", MIXED, buffers=3, num_gpu_batches=4),
)


def ragged_pairs(seed: int = 0, count: int = 9) -> Pairs:
    """Of very different lengths, short behind long and long behind short."""
    random = Random(seed)

    def text(length: int) -> list[int]:
        return [random.randrange(tiny.VOCAB) for _ in range(length)]

    return [(text(random.choice((1, 3, 30))), text(random.choice((1, 2, 2, 5, 30)))) for _ in range(count)]


def by_transformers(checkpoints: Checkpoints, kind: str, pairs: Pairs, stored: str = "float32") -> list[Scored]:
    model: Any = checkpoints.hf_model(kind, stored)
    scored = []
    for index, (before, after) in enumerate(pairs):
        ids = torch.tensor([[*before, *after]])
        with torch.inference_mode():
            logits = model(ids, attention_mask=torch.ones_like(ids)).logits[0, len(before) - 1 : -1].log_softmax(-1)
        own = logits[torch.arange(len(after)), torch.tensor(after)]
        scored.append(Scored(index, tuple(own.tolist()), tuple(logits.argmax(-1).tolist())))
    return scored


def near(these: Sequence[Scored], those: Sequence[Scored], tolerance: float = 1e-4) -> bool:
    for one, other in zip(these, those, strict=True):
        assert (one.index, one.greedy) == (other.index, other.greedy)
        assert one.logprobs == pytest.approx(other.logprobs, abs=tolerance)
    return True


@pytest.mark.parametrize("values", in_turn({"plan": PLANS}, nth=2))
def test_scores_are_those_of_transformers_in_one_pass_and_token_by_token(
    values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    pairs, case = ragged_pairs(), replace(values["plan"], device=values["device"])
    wanted = by_transformers(checkpoints, case.kind, pairs)
    with case.open(checkpoints, offload) as llm:
        assert near(llm.score(pairs), wanted) and near(llm.score(pairs, by="prefill"), wanted)
        assert llm.stats is not None and (llm.stats.num_prompts, llm.stats.generated_tokens) == (len(pairs), 0)
        assert near(llm.score(pairs, by="decode"), wanted)
        assert llm.stats.generated_tokens == sum(len(after) for _, after in pairs)


@pytest.mark.parametrize("kind", first_of(["qwen2-wordy", "opt"], 1))
def test_packed_weights_score_the_same_in_one_pass_and_token_by_token(
    kind: str, checkpoints: Checkpoints, offload: Path
) -> None:
    pairs = ragged_pairs()
    with Case(kind, ON_DISK, weight_codec="group8").open(checkpoints, offload) as llm:
        assert near(llm.score(pairs, by="decode"), llm.score(pairs), 1e-3)


def test_few_positions_at_once_score_as_many_do(
    checkpoints: Checkpoints, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs, sizes = ragged_pairs(), list[int]()
    monkeypatch.setattr("h2o_flexgen.planning.working_space.LOGITS_AT_ONCE", 7 * tiny.VOCAB)
    with Case("neox-parallel").open(checkpoints, offload) as llm:
        head = llm.loaded.model.head

        def noting(hidden: torch.Tensor, weights: Any) -> torch.Tensor:
            sizes.append(len(hidden))
            return head(hidden, weights)

        monkeypatch.setattr(llm.loaded.model, "head", noting)
        assert near(llm.score(pairs), by_transformers(checkpoints, "neox-parallel", pairs))
    assert max(sizes) == 7 and sum(sizes) == sum(len(after) for _, after in pairs) and sizes.count(7) > len(sizes) / 2


def test_answers_that_differ_in_their_last_token_are_scored_with_one_text(checkpoints: Checkpoints, offload: Path) -> None:
    question, other = [5, 6, 7, 8], [9] * 6
    pairs: Pairs = [(question, [1]), (other, [2, 3]), (question, [4]), ([5, 6], [7, 8, 1]), (other, [2, 9]), (question, [1])]
    with Case("llama-gqa").open(checkpoints, offload) as llm:
        scored = llm.score(pairs)
        assert llm.stats is not None and (llm.stats.num_prompts, llm.stats.prompt_tokens) == (2, 4 + 7)
    assert near(scored, by_transformers(checkpoints, "llama-gqa", pairs))
    assert scored[0] == replace(scored[5], index=0) and scored[3].logprobs[-1] == scored[0].logprobs[0]


def test_what_logits_of_many_positions_hold_is_counted(checkpoints: Checkpoints, offload: Path) -> None:
    with Case("qwen2-wordy").open(checkpoints, offload) as llm:
        workload = Workload.uniform(4, 100, 1)
        few, many = (WorkloadPlan(llm.spec, llm.plan, workload, Site(), scored_at_once=count) for count in (0, 150))
        more = many.footprint.total("host") - few.footprint.total("host")
        assert more > 140 * llm.spec.vocab * 4
        assert replace(many, scored_at_once=10**6).footprint == replace(many, scored_at_once=200).footprint
        llm.loaded.limits = replace(llm.limits, host=llm.limits.needs(few.footprint, "host"))
        with pytest.raises(ValueError, match="working space"):
            llm.score([([1] * 90, [2] * 10)] * 4)


@pytest.mark.parametrize("policy", first_of(UNLIKE[1:], 4), ids=lambda one: str(dict(one)))
def test_a_score_with_eviction_is_that_of_forced_tokens_and_depends_on_no_other_pair(
    policy: tuple[tuple[str, Any], ...], checkpoints: Checkpoints, offload: Path
) -> None:
    pairs = [(before[:20], after[:20]) for before, after in ragged_pairs(count=5)]
    with Case("llama-gqa", MIXED, policy=policy).open(checkpoints, offload) as llm:
        scored = llm.score(pairs)
        for index, (before, after) in enumerate(pairs):
            params = SamplingParams(max_tokens=len(after), logprobs=1)
            (alone,) = llm.generate([before], params, forced=[after])
            assert alone.logprobs is not None and alone.token_ids == tuple(after)
            assert scored[index].logprobs == pytest.approx([step.chosen.logprob for step in alone.logprobs], abs=1e-4)
        full = by_transformers(checkpoints, "llama-gqa", pairs)
        assert any(abs(one.logprob - other.logprob) > 0.01 for one, other in zip(scored, full)), "something was forgotten"


def test_blocks_of_few_tokens_do_not_wait_for_those_of_many() -> None:
    tokenizer = ByteTokenizer(300)
    rows = [
        RowState(index, [1] * before, SamplingParams(max_tokens=after), tokenizer)
        for index, (before, after) in enumerate([(3, 5), (4, 90), (2, 5), (9, 5), (1, 80)])
    ]
    share, slots = Plan.create(kv_policy="h2o"), Plan.create(kv_policy="h2o", heavy=2, recent=2)
    pairs = [
        [[row.index for row in group] for group in decode_groups(rows, replace(plan, gpu_batch_size=2))]
        for plan in (share, slots, Plan())
    ]
    assert pairs == [[[1], [4], [0, 2, 3]], [[1, 4], [3, 0], [2]], [[1, 4], [3, 0], [2]]]


def test_scoring_goes_on_in_smaller_blocks_when_memory_runs_out(
    checkpoints: Checkpoints, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs, case = ragged_pairs(), Case("llama-gqa", MIXED, gpu_batch_size=4)
    fail_at(monkeypatch, Op.COMPUTE, step=0, most_rows=4)
    with case.open(checkpoints, offload) as llm, pytest.warns(RuntimeWarning, match="memory ran out"):
        assert near(llm.score(pairs), by_transformers(checkpoints, "llama-gqa", pairs))


def test_texts_come_again_when_memory_runs_out_at_their_logits(
    checkpoints: Checkpoints, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores, calls = scoring._scores, 0

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MemoryError
        return scores(*args)

    monkeypatch.setattr(scoring, "_scores", failing)
    pairs, case = ragged_pairs(), Case("llama-gqa", gpu_batch_size=4)
    with case.open(checkpoints, offload) as llm, pytest.warns(RuntimeWarning, match="memory ran out"):
        assert near(llm.score(pairs), by_transformers(checkpoints, "llama-gqa", pairs))


@pytest.mark.parametrize("by", ["prefill", "decode"])
def test_every_scored_token_is_told(by: str, checkpoints: Checkpoints, offload: Path) -> None:
    told: list[tuple[int, int]] = []
    pairs = ragged_pairs()
    with Case().open(checkpoints, offload) as llm:
        llm.score(pairs, by=by, on_token=lambda row, token, text: told.append((row, token)))
    assert [[token for row, token in told if row == index] for index in range(len(pairs))] == [after for _, after in pairs]


@pytest.mark.parametrize(
    ("options", "by", "message"),
    [
        ({}, "magic", "by is 'magic'; allowed are 'prefill', 'decode'"),
        ({"policy": POLICIES[1]}, "prefill", "kv_policy 'h2o' cannot be scored by 'prefill', where every token sees the full"),
        ({"kv_codec": "group4"}, "prefill", "kv_codec 'group4' cannot be scored by 'prefill'"),
    ],
)
def test_a_way_that_would_be_an_oracle_is_refused(
    options: dict[str, Any], by: str, message: str, checkpoints: Checkpoints, offload: Path
) -> None:
    with Case(**options).open(checkpoints, offload) as llm, pytest.raises(ValueError, match=message):
        llm.score([([1], [2])], by=by)


def test_packed_kv_is_scored_token_by_token(checkpoints: Checkpoints, offload: Path) -> None:
    with Case(kv_codec="group4").open(checkpoints, offload) as llm:
        assert llm.score([([1, 2], [3, 4, 5])]) == llm.score([([1, 2], [3, 4, 5])], by="decode")


@pytest.mark.parametrize("by", ["prefill", "decode"])
def test_pairs_that_cannot_be_scored_are_refused(by: str, checkpoints: Checkpoints, offload: Path) -> None:
    with Case().open(checkpoints, offload) as llm:
        assert llm.score([], by=by) == []
        for pairs, message in (
            ([([1], [2]), ([1], [])], "continuation 1 is empty"),
            ([([], [2])], "prompt 0 is empty"),
            ([([1], [tiny.VOCAB])], f"row 0 is forced to take the token id {tiny.VOCAB}"),
            ([([1] * 100, [2] * (tiny.POSITIONS - 98))], "prompt 0 has 100 tokens and 30 are to be generated"),
        ):
            with pytest.raises(ValueError, match=message):
                llm.score(pairs, by=by)  # type: ignore[arg-type]
        (longest,) = llm.score([([1] * 100, [2] * (tiny.POSITIONS - 99))], by=by)
        assert len(longest.logprobs) == 29
