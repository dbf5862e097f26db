"""Options of sampling, as users meet them: their tokens are those of the plain resident loop and of a reference on its logits,
whatever the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from h2o_flexgen import SamplingParams
from h2o_flexgen.core.site import Site
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.kernels.pick_tokens import uniform
from h2o_flexgen.planning import working_space
from h2o_flexgen.planning.workload_plan import WorkloadPlan
from h2o_flexgen.sampling.completion import Completion
from h2o_flexgen.schedule.ops import Op
from tests.engine.test_shrink import case_of, fail_at
from tests.helpers import tiny
from tests.helpers.adjusted_by_hand import adjusted_by_hand, picked_by_hand
from tests.helpers.contract import POLICIES, Case, Checkpoints, distinct_prompts
from tests.helpers.resident import resident_generate
from tests.helpers.samples import every_nth

ON_DISK, MIXED = (0, 0) * 3, (30, 30, 20, 50, 40, 30)
SEED, GEN_LEN = 5, 7
PLANS = (
    Case("opt", gen_len=GEN_LEN),
    Case("llama-gqa", ON_DISK, gen_len=GEN_LEN, policy=POLICIES[1], gpu_batch_size=3, num_gpu_batches=1),
    Case("neox-parallel", MIXED, gen_len=GEN_LEN, policy=POLICIES[2], prefill_tokens=12, kv_codec="group4"),
    Case("opt-350m", MIXED, gen_len=GEN_LEN, policy=POLICIES[3], gpu_batch_size=1, schedule="row_by_row"),
    Case("qwen3", ON_DISK, gen_len=GEN_LEN, policy=POLICIES[6], schedule="flexgen_barrier", sep_layer=False),
    Case("qwen2-wordy", MIXED, gen_len=GEN_LEN, policy=POLICIES[8], buffers=3, kv_codec="group8", weight_codec="group8"),
    Case("qwen2", MIXED, gen_len=GEN_LEN, weight_codec="group4", compute="int8"),
)


def different_options(stops: Sequence[int]) -> list[SamplingParams]:
    """Of five rows: greedy and sampled ones, with one option and with many; `stops` would end a row early."""
    many: dict[str, Any] = {"presence_penalty": 1.5, "frequency_penalty": -0.4, "logit_bias": {7: 2.0, 9: -100.0}}
    allowed = list(range(0, tiny.VOCAB, 3))
    return [
        SamplingParams(GEN_LEN, frequency_penalty=2.0, logit_bias=dict.fromkeys(range(20), 3.0)),
        SamplingParams(GEN_LEN, min_tokens=4, stop_token_ids=stops, ignore_eos=True),
        SamplingParams(GEN_LEN, 1.2, repetition_penalty=1.2, **many),
        SamplingParams(GEN_LEN, 0.9, top_k=20, top_p=0.9, min_p=0.01, presence_penalty=2.0, min_tokens=2, stop_token_ids=[4]),
        SamplingParams(
            GEN_LEN, allowed_token_ids=allowed, repetition_penalty=1.5, presence_penalty=-2.0, no_repeat_ngram_size=2
        ),
    ]


def hold_reference(case: Case, checkpoints: Checkpoints, params: Sequence[SamplingParams], found: Sequence[Completion]) -> None:
    """Every token is the one that the reference picks of the logits that the resident loop has behind those before it."""
    model, weights = checkpoints.model(case.kind, case.stored, case.dtype, format=case.weight_codec, compute=case.compute)
    forced = [[*one.token_ids, *[0] * case.gen_len][: case.gen_len] for one in found]
    for rows in case.batches():
        prompts, own = [case.prompts[row] for row in rows], [forced[row] for row in rows]
        policy, at_once, format = case.kv_policy, case.prefill_tokens, case.kv_codec
        logits = resident_generate(model, weights, prompts, case.gen_len, False, policy, at_once, format, own)
        for place, row in enumerate(rows):
            for step, token in enumerate(found[row].token_ids):
                before, ends = list(found[row].token_ids[:step]), params[row].stop_ids
                scores = adjusted_by_hand(logits[step][place].tolist(), params[row], prompts[place], before, ends)
                assert token == picked_by_hand(scores, params[row], uniform(SEED, row, step)), (row, step, str(case))


@pytest.mark.parametrize("case", every_nth(PLANS, 2), ids=str)
def test_tokens_are_those_of_the_reference_on_the_logits_of_the_resident_loop(
    case: Case, checkpoints: Checkpoints, offload: Path
) -> None:
    with case.open(checkpoints, offload) as llm:
        plain = llm.generate(case.prompts, SamplingParams(GEN_LEN))
        params = different_options(plain[1].token_ids)
        found = llm.generate(case.prompts, params, seed=SEED)
    hold_reference(case, checkpoints, params, found)
    assert len(found[1].token_ids) > 4 and not set(found[1].token_ids[:4]) & set(plain[1].token_ids)
    assert all(token % 3 == 0 for token in found[4].token_ids) and 9 not in found[2].token_ids


@pytest.mark.parametrize("policy", [POLICIES[0], POLICIES[1]], ids=lambda one: str(dict(one)))
def test_a_row_that_starts_anew_goes_on_with_its_penalties_and_its_least_tokens(
    policy: tuple[tuple[str, Any], ...], checkpoints: Checkpoints, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of(policy=policy, lengths=(5, 9, 2, 7, 4))
    with case.open(checkpoints, offload) as llm:
        plain = llm.generate(case.prompts, SamplingParams(GEN_LEN))
        five = [replace(one, prompt_logprobs=1) for one in different_options(plain[1].token_ids)]
        params = [replace(one, n=1 if one.is_greedy else 3) for one in five]
        wanted = llm.generate(case.prompts, params, seed=SEED)
    fail_at(monkeypatch, Op.COMPUTE, step=3, most_rows=4)
    heard: dict[int, list[int]] = {}
    with case.open(checkpoints, offload) as llm, pytest.warns(RuntimeWarning, match="memory ran out"):
        found = llm.generate(
            case.prompts, params, seed=SEED, on_token=lambda row, token, _: heard.setdefault(row, []).append(token)
        )
        assert llm.stats is not None and llm.stats.num_prompts == len(case.prompts)
    tokens = [list(output.token_ids) for one in wanted for output in one.outputs]
    assert heard == dict(enumerate(tokens)) and len(tokens) == 9
    assert [bare(one) for one in found] == [bare(one) for one in wanted]
    for one, other in zip(found, wanted):
        assert one.prompt_logprobs is not None and other.prompt_logprobs is not None
        for step, twin in zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            assert step is not None and twin is not None and step.chosen.token_id == twin.chosen.token_id
            assert step.chosen.logprob == pytest.approx(twin.chosen.logprob, abs=1e-4)


def bare(completion: Completion) -> object:
    """Without log-probabilities, whose last bits depend on how many rows are computed at once."""
    return [(output.index, output.token_ids, output.text, output.finish_reason) for output in completion.outputs]


# -- several completions -------------------------------------------------------------------------------------------------


def test_several_completions_are_grouped_differ_and_come_again_under_any_plan(
    any_device: str, checkpoints: Checkpoints, offload: Path
) -> None:
    counts = (3, 1, 2, 4, 1)
    params = [SamplingParams(6, 1.5, n=count, logprobs=0, presence_penalty=0.5) for count in counts]
    first: list[object] = []
    for case in (Case("llama-gqa"), Case("llama-gqa", MIXED, gpu_batch_size=3, num_gpu_batches=3, device=any_device)):
        with case.open(checkpoints, offload) as llm:
            found = llm.generate(case.prompts, params, seed=SEED)
            single = llm.generate(case.prompts, [replace(one, n=1) for one in params], seed=SEED)
        assert [one.index for one in found] == list(range(5))
        for one, alone, prompt, count in zip(found, single, case.prompts, counts):
            assert one.prompt_token_ids == tuple(prompt) and [output.index for output in one.outputs] == [*range(count)]
            assert len({output.token_ids for output in one.outputs}) == count
            assert (one.text, one.token_ids) == (one.outputs[0].text, one.outputs[0].token_ids)
            assert bare(alone) == bare(replace(one, others=())), "the first of several is the only one of one"
            for output in one.outputs:
                assert output.logprobs is not None
                assert output.cumulative_logprob == sum(step.chosen.logprob for step in output.logprobs) < 0
        first.append([bare(one) for one in found])
    assert first[0] == first[1]


def test_several_greedy_completions_are_the_one_that_there_is(checkpoints: Checkpoints, offload: Path) -> None:
    with Case(gpu_batch_size=2, num_gpu_batches=2).open(checkpoints, offload) as llm:
        (one,), (several,) = (llm.generate([[5, 6]], SamplingParams(6, n=n)) for n in (1, 3))
    assert [output.token_ids for output in several.outputs] == [one.token_ids] * 3


def test_the_second_completion_of_one_seed_is_not_the_first_of_another(checkpoints: Checkpoints, offload: Path) -> None:
    with Case().open(checkpoints, offload) as llm:
        found = [llm.generate([[5, 6]], SamplingParams(8, 1.5, n=3, seed=seed))[0].outputs for seed in (3, 4, 5)]
    assert len({output.token_ids for outputs in found for output in outputs}) == 9


def test_forced_tokens_are_those_of_every_completion_of_their_prompt(checkpoints: Checkpoints, offload: Path) -> None:
    with Case().open(checkpoints, offload) as llm:
        params = SamplingParams(6, 1.5, n=3, frequency_penalty=1.0)
        found = llm.generate([[5, 6], [7]], params, seed=1, forced=[[9, 10], [11]])
    for one, forced in zip(found, ((9, 10), (11,))):
        assert all(output.token_ids[: len(forced)] == forced for output in one.outputs)
        assert len({output.token_ids for output in one.outputs}) == 3


# -- log-probabilities of prompts ----------------------------------------------------------------------------------------


def assert_as_transformers(found: Sequence[Completion], checkpoints: Checkpoints, case: Case, counts: Sequence[int]) -> None:
    model: Any = checkpoints.hf_model(case.kind, case.stored)
    for one, prompt, count in zip(found, case.prompts, counts, strict=True):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            wanted = model(ids, attention_mask=torch.ones_like(ids)).logits[0].log_softmax(-1)
        assert one.prompt_logprobs is not None and len(one.prompt_logprobs) == len(prompt) and one.prompt_logprobs[0] is None
        for step, token, row in zip(one.prompt_logprobs[1:], prompt[1:], wanted):
            assert step is not None and step.chosen.token_id == token and len(step.top) == count
            assert step.chosen.logprob == pytest.approx(row[token].item(), abs=1e-4)
            assert [top.logprob for top in step.top] == pytest.approx(row.topk(count).values.tolist(), abs=1e-4)
            assert all(top.logprob == pytest.approx(row[top.token_id].item(), abs=1e-4) for top in step.top)


@pytest.mark.parametrize("case", [replace(case, weight_codec="plain", compute="exact") for case in PLANS], ids=str)
def test_those_of_prompts_are_those_of_transformers_whatever_is_then_kept(
    case: Case, checkpoints: Checkpoints, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(working_space, "LOGITS_AT_ONCE", 4 * tiny.VOCAB)
    case, counts = replace(case, lengths=(5, 9, 1, 7, 4)), (0, 3, 2, 1, 5)
    with case.open(checkpoints, offload) as llm:
        params = [SamplingParams(2, prompt_logprobs=count, logit_bias={3: 100}) for count in counts]
        found = llm.generate(case.prompts, params)
        silent = llm.generate(case.prompts, [replace(one, prompt_logprobs=None) for one in params])
    assert_as_transformers(found, checkpoints, case, counts)
    assert [one.token_ids for one in found] == [one.token_ids for one in silent]
    assert all(one.prompt_logprobs is None for one in silent)


def test_completions_of_one_prompt_share_its_log_probabilities(checkpoints: Checkpoints, offload: Path) -> None:
    case = Case("neox-parallel", lengths=(6,))
    with case.open(checkpoints, offload) as llm:
        found = llm.generate(case.prompts, SamplingParams(2, 1.0, n=3, prompt_logprobs=2))
    assert_as_transformers(found, checkpoints, case, (2,))


def test_what_logits_of_prompts_hold_is_counted_before_anything_is_loaded(checkpoints: Checkpoints, offload: Path) -> None:
    prompts = distinct_prompts((100,) * 4)
    with Case("qwen2-wordy").open(checkpoints, offload) as llm:
        fits = WorkloadPlan(llm.spec, llm.plan, Workload.uniform(4, 100, 1), Site()).footprint
        llm.loaded.limits = replace(llm.limits, host=llm.limits.needs(fits, "host"))
        with pytest.raises(ValueError, match="working space"):
            llm.generate(prompts, SamplingParams(1, prompt_logprobs=0))
        assert llm.loaded._engine is None


# -- what a model can do -------------------------------------------------------------------------------------------------


def test_without_a_number_a_row_goes_on_as_far_as_the_model_has_positions(checkpoints: Checkpoints, offload: Path) -> None:
    room = tiny.POSITIONS + 1
    prompts = distinct_prompts((room - 3, room - 1, room - 6))
    with Case(lengths=(1, 1, 1)).open(checkpoints, offload) as llm:
        found = llm.generate(prompts, SamplingParams(max_tokens=None))
        assert [len(one.token_ids) for one in found] == [3, 1, 6]
        assert all(one.finish_reason == "length" for one in found)
        assert found == llm.generate(prompts, [SamplingParams(max_tokens=count) for count in (3, 1, 6)])
        with pytest.raises(ValueError, match=r"prompt 1 has 129 tokens .* has 128 positions"):
            llm.generate([[5], [5] * room], SamplingParams(max_tokens=None))
        with pytest.raises(ValueError, match="min_tokens is 7, but after prompt 0 there is room for 6 tokens"):
            llm.generate(prompts[2:], SamplingParams(max_tokens=None, min_tokens=7))


def test_rolling_positions_want_a_number(checkpoints: Checkpoints, offload: Path) -> None:
    rolling = (("kv_policy", "streaming"), ("sinks", 1), ("recent", 3), ("positions", "rolling"))
    with Case("llama-gqa", policy=rolling).open(checkpoints, offload) as llm:
        with pytest.raises(ValueError, match="max_tokens of prompt 0 is None, but with rolling positions a text has no end"):
            llm.generate([[5, 6]], SamplingParams(max_tokens=None))
        with llm.converse() as talk, pytest.raises(ValueError, match="max_tokens is None, but this conversation has no end"):
            talk.reply([5, 6], SamplingParams(max_tokens=None))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"stop_token_ids": [3, tiny.VOCAB]}, "stop_token_ids"),
        ({"logit_bias": {tiny.VOCAB: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": [1, tiny.VOCAB]}, "allowed_token_ids"),
    ],
)
def test_tokens_that_the_model_does_not_have_are_refused_by_name(
    options: dict[str, Any], name: str, checkpoints: Checkpoints, offload: Path
) -> None:
    message = f"{name} has the token id {tiny.VOCAB}; .* knows 0 to {tiny.VOCAB - 1}"
    with Case().open(checkpoints, offload) as llm:
        with pytest.raises(ValueError, match=message):
            llm.generate([[5]], SamplingParams(**options))
        with llm.converse() as talk, pytest.raises(ValueError, match=message):
            talk.reply([5], SamplingParams(**options))


# -- conversations -------------------------------------------------------------------------------------------------------


def test_a_reply_is_what_generate_says_behind_the_whole_text(checkpoints: Checkpoints, offload: Path) -> None:
    """Penalties count what the reply has generated, and repetition all that was said."""
    turns, case = ([5, 6, 7], [8, 9], [10]), Case("llama-gqa", MIXED)
    params = [replace(one, temperature=0) for one in different_options([4, 5])]
    replies: list[list[tuple[int, ...]]] = []
    with case.open(checkpoints, offload) as llm:
        for options in params:
            with llm.converse() as talk:
                replies.append([talk.reply(turn, options).completion.token_ids for turn in turns])
        for options, own in zip(params, replies):
            text: list[int] = []
            for turn, reply in zip(turns, own):
                text += turn
                assert llm.generate([text], options)[0].token_ids == reply
                text += reply


def test_a_conversation_takes_what_there_is_room_for_and_says_what_it_cannot_do(
    checkpoints: Checkpoints, offload: Path
) -> None:
    with Case().open(checkpoints, offload) as llm, llm.converse(context=12) as talk:
        with pytest.raises(ValueError, match="n is 2, but a conversation has one reply to each turn"):
            talk.reply([5], SamplingParams(n=2, temperature=1.0))
        with pytest.raises(ValueError, match="prompt_logprobs are not available in a conversation"):
            talk.reply([5], SamplingParams(prompt_logprobs=1))
        for params, fills in (
            (SamplingParams(max_tokens=20, min_tokens=15), True),
            (SamplingParams(max_tokens=None), True),
            (SamplingParams(max_tokens=9), False),
        ):
            talk.reset()
            reply = talk.reply([5, 6, 7, 8], params)
            assert len(reply.completion.token_ids) == 9 and reply.fills_context == fills
