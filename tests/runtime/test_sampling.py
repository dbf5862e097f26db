"""Sampling: filters equal transformers', frequencies follow the distribution, a row's token depends on nothing but itself."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from h2o_flexgen.runtime.sampling import Sampler, resolve_seed, uniform
from h2o_flexgen.runtime.sampling_params import SamplingParams

DRAWS = 4000
FILTERS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.3, top_p=0.8),
    SamplingParams(temperature=1.0, min_p=0.1),
    SamplingParams(temperature=1.5, top_k=12, top_p=0.9, min_p=0.02),
    SamplingParams(temperature=0.9, top_k=4, top_p=0.6),
    SamplingParams(temperature=2.0, top_p=0.95, min_p=0.15),
    SamplingParams(temperature=1.0, repetition_penalty=1.8),
    SamplingParams(temperature=0.8, repetition_penalty=0.6, top_k=6),
    SamplingParams(temperature=1.0, top_k=1000),
]


def some_logits(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def probabilities_of_transformers(logits: Tensor, params: SamplingParams, seen: list[int]) -> Tensor:
    ids, scores = torch.tensor([seen]), logits[None].float()
    if params.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    scores = TemperatureLogitsWarper(params.temperature)(ids, scores)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(ids, scores)
    return scores.softmax(dim=-1)[0]


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_draws_have_the_support_and_the_frequencies_of_transformers_filters(params: SamplingParams) -> None:
    logits, seen = some_logits(1, 24)[0], [3, 3, 7, 11]
    expected = probabilities_of_transformers(logits, params, seen)
    picked = Sampler(seed=5).sample(logits.expand(DRAWS, -1), [params] * DRAWS, range(DRAWS), 0, [seen] * DRAWS)
    counts = torch.bincount(picked.tokens, minlength=24)
    assert not counts[expected == 0].any()
    assert counts[expected > 10 / DRAWS].all()
    wanted = expected * DRAWS
    chi_square = ((counts - wanted) ** 2 / wanted)[wanted > 5].sum().item()
    freedom = int((wanted > 5).sum())
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom) + 5


def test_each_row_is_filtered_by_its_own_params() -> None:
    logits = some_logits(1, 24)[0]
    params = [FILTERS[row % len(FILTERS)] for row in range(600)]
    seen = [[row % 5, 11] for row in range(600)]
    tokens = Sampler(seed=1).sample(logits.expand(600, -1), params, range(600), 2, seen).tokens.tolist()
    for row, token in enumerate(tokens):
        assert probabilities_of_transformers(logits, params[row], seen[row])[token] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_ties_with_the_last_of_top_k_stays(dtype: torch.dtype) -> None:
    logits = torch.tensor([0.0, 2, 1, 1, 1, -3], dtype=dtype)
    picked = Sampler(0).sample(logits.expand(300, -1), [SamplingParams(temperature=1.0, top_k=2)] * 300, range(300), 0)
    assert set(picked.tokens.tolist()) == {1, 2, 3, 4}


def test_a_wide_vocabulary_is_filtered_exactly() -> None:
    logits, params = some_logits(1, 30_000)[0], SamplingParams(temperature=1.0, top_p=0.3)
    expected = probabilities_of_transformers(logits, params, [])
    tokens = Sampler(3).sample(logits.expand(200, -1), [params] * 200, range(200), 0).tokens
    assert (expected[tokens] > 0).all()
    assert len(set(tokens.tolist())) > 100


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_a_rows_token_does_not_depend_on_its_batch_mates(params: SamplingParams) -> None:
    logits, sampler = some_logits(40, 301), Sampler(seed=9)
    seen = [[row, row + 1] for row in range(40)]
    whole = sampler.sample(logits, [params] * 40, range(40), 6, seen).tokens
    others = [SamplingParams(), SamplingParams(temperature=3.0), SamplingParams(temperature=0.5, top_k=300)]
    for row in (0, 13, 39):
        alone = sampler.sample(logits[row : row + 1], [params], [row], [6], [seen[row]]).tokens
        mixed = sampler.sample(
            torch.cat([logits[:3], logits[row : row + 1]]),
            [*others, params],
            [50, 51, 52, row],
            [0, 1, 2, 6],
            [[]] * 3 + [seen[row]],
        ).tokens
        assert alone.item() == mixed[3].item() == whole[row].item()


def test_rows_with_equal_logits_draw_differently_and_a_seed_repeats_them() -> None:
    logits, params = torch.zeros(64, 1000), [SamplingParams(temperature=1.0)] * 64
    first = Sampler(seed=4).sample(logits, params, range(64), 0).tokens
    assert len(set(first.tolist())) > 50
    assert torch.equal(first, Sampler(seed=4).sample(logits, params, range(64), 0).tokens)
    assert not torch.equal(first, Sampler(seed=4).sample(logits, params, range(64), 1).tokens)
    assert not torch.equal(first, Sampler(seed=5).sample(logits, params, range(64), 0).tokens)


def test_a_rows_own_seed_goes_before_the_calls() -> None:
    logits, params = torch.zeros(8, 1000), [SamplingParams(temperature=1.0, seed=77)] * 8
    assert torch.equal(
        Sampler(1).sample(logits, params, range(8), 0).tokens, Sampler(2).sample(logits, params, range(8), 0).tokens
    )


def test_uniform_numbers_fill_the_unit_interval_evenly() -> None:
    drawn = [uniform(7, row, step) for row in range(50) for step in range(40)]
    assert len(set(drawn)) == len(drawn)
    tenths = torch.bincount(torch.tensor([int(number * 10) for number in drawn]), minlength=10)
    assert len(tenths) == 10
    assert ((tenths - 200).abs() < 70).all()


def test_resolve_seed_keeps_a_given_seed_and_makes_fresh_ones_otherwise() -> None:
    assert resolve_seed(0) == 0
    assert resolve_seed(2**64 - 1) == 2**64 - 1
    assert resolve_seed(None) != resolve_seed(None)
    with pytest.raises(ValueError, match="seed is -1"):
        resolve_seed(-1)


def test_the_largest_seed_and_row_can_be_drawn_from() -> None:
    assert 0 <= uniform(2**64 - 1, 10**6, 10**6) < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_lowest_id_of_the_largest(dtype: torch.dtype) -> None:
    logits = torch.zeros(3, 5000, dtype=dtype)
    logits[0, [17, 4000]] = 2
    logits[1, [4999, 1]] = 3
    tokens = Sampler().sample(logits, [SamplingParams()] * 3, range(3), 0).tokens
    assert tokens.tolist() == [17, 1, 0]
    assert tokens.dtype == torch.int64


def test_greedy_rows_see_their_repetition_penalty_and_others_do_not() -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0], [2.0, 1.9, -1.0], [-1.0, -1.1, -9.0]])
    params = [SamplingParams(repetition_penalty=1.5), SamplingParams(), SamplingParams(repetition_penalty=1.5)]
    assert Sampler().sample(logits, params, range(3), 0, [[0, 0], [0], [0]]).tokens.tolist() == [1, 0, 1]
    assert logits[0, 0] == 2.0


def test_tiny_temperatures_are_greedy() -> None:
    logits = some_logits(30, 100)
    tokens = Sampler().sample(logits, [SamplingParams(temperature=1e-9)] * 30, range(30), 0).tokens
    assert torch.equal(tokens, logits.argmax(dim=-1))


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.5)], ids=str
)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_broken_logits_are_refused_naming_prompt_and_step(params: SamplingParams, value: float) -> None:
    logits = some_logits(3, 50)
    logits[1, 20] = value
    with pytest.raises(ValueError, match=f"prompt 11 at step 4 have the maximum {value}"):
        Sampler().sample(logits, [params] * 3, [10, 11, 12], 4)


def test_logits_made_in_inference_mode_are_sampled_outside_of_it() -> None:
    with torch.inference_mode():
        logits = some_logits(3, 50)
    params = [SamplingParams(), SamplingParams(temperature=1.0, top_k=4), SamplingParams(repetition_penalty=2.0, logprobs=1)]
    assert len(Sampler(0).sample(logits, params, range(3), 0, [[1]] * 3).tokens) == 3


def test_tokens_of_minus_infinity_are_never_drawn() -> None:
    logits = torch.full((500, 40), -math.inf)
    logits[:, [7, 30]] = 0
    for params in (SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=10, top_p=0.99, min_p=0.01)):
        assert set(Sampler(2).sample(logits, [params] * 500, range(500), 0).tokens.tolist()) == {7, 30}


def test_given_tokens_take_the_place_of_picked_ones_and_logprobs_are_theirs() -> None:
    logits = some_logits(4, 24)
    params = [SamplingParams(logprobs=1), SamplingParams(temperature=1.0, logprobs=1)] * 2
    picked = Sampler(3).sample(logits, params, range(4), 0)
    forced = Sampler(3).sample(logits, params, range(4), 0, given=[None, None, 9, 11])
    assert forced.tokens.tolist() == [*picked.tokens.tolist()[:2], 9, 11] and forced.logprobs[:2] == picked.logprobs[:2]
    for row, token in ((2, 9), (3, 11)):
        step = forced.logprobs[row]
        assert step is not None and step.chosen.token_id == token
        assert step.chosen.logprob == pytest.approx(logits[row].log_softmax(-1)[token].item(), abs=1e-6)
        assert step.top[0].token_id == int(logits[row].argmax())


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = some_logits(4, 60)
    params = [
        SamplingParams(logprobs=3),
        SamplingParams(),
        SamplingParams(logprobs=0, temperature=5.0, top_k=20),
        SamplingParams(logprobs=100, repetition_penalty=3.0),
    ]
    picked = Sampler(0).sample(logits, params, range(4), 0, [[0, 1]] * 4)
    expected = logits.log_softmax(dim=-1)
    assert picked.logprobs[1] is None
    for row, count in ((0, 3), (2, 0), (3, 60)):
        step = picked.logprobs[row]
        assert step is not None
        assert step.chosen.token_id == picked.tokens[row].item()
        assert step.chosen.logprob == pytest.approx(expected[row, step.chosen.token_id].item(), abs=1e-5)
        values, ids = expected[row].topk(count)
        assert [one.token_id for one in step.top] == ids.tolist()
        assert [one.logprob for one in step.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_equally_likely_alternatives_come_by_token_id_whatever_the_batch_asks() -> None:
    logits = torch.zeros(2, 3000)
    for mate in (2, 50):
        picked = Sampler().sample(logits, [SamplingParams(logprobs=2), SamplingParams(logprobs=mate)], range(2), 0)
        assert [one.token_id for one in picked.logprobs[0].top] == [0, 1]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("seed", -1),
        ("seed", 2**64),
        ("stop", ("a", "")),
        ("stop_token_ids", (-1,)),
        ("logprobs", -1),
    ],
)
def test_a_bad_value_is_refused_in_one_line_that_names_it(name: str, value: object) -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert str(error.value).startswith(f"{name} is {value!r}; allowed is")
    assert "\n" not in str(error.value)


def test_a_penalty_without_the_ids_seen_is_refused() -> None:
    with pytest.raises(ValueError, match="repetition_penalty"):
        Sampler().sample(torch.zeros(1, 4), [SamplingParams(repetition_penalty=2.0)], [0], 0)


def test_stop_may_be_one_text_or_several() -> None:
    assert SamplingParams(stop="end").stop_strings == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()


@pytest.mark.cuda
@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_a_device_draws_the_same_tokens_as_the_cpu(params: SamplingParams) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    logits, seen = some_logits(50, 2000), [[row] for row in range(50)]
    on_host = Sampler(6).sample(logits, [params] * 50, range(50), 3, seen).tokens
    on_device = Sampler(6).sample(logits.cuda(), [params] * 50, range(50), 3, seen).tokens
    assert torch.equal(on_host, on_device)
