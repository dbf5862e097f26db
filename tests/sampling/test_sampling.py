"""Sampling: filters equal transformers', frequencies follow the distribution, a row's token depends on nothing but itself."""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from fractions import Fraction
from typing import Any

import numpy as np
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

from h2o_flexgen.core.allowed_values import Bounds, Several
from h2o_flexgen.core.workload import MOST_TOKENS
from h2o_flexgen.formats.kernel_table import TORCH
from h2o_flexgen.kernels.pick_tokens import uniform
from h2o_flexgen.sampling.params import SAMPLING, SamplingParams
from h2o_flexgen.sampling.sampler import History, Sampler, resolve_seed, score_changes
from tests.helpers.adjusted_by_hand import adjusted_by_hand
from tests.kernels.variants import VARIANTS, used

DRAWS = 4000
ADJUSTING = [
    SamplingParams(repetition_penalty=1.7),
    SamplingParams(presence_penalty=1.5),
    SamplingParams(frequency_penalty=-0.7),
    SamplingParams(logit_bias={2: 3.5, 3: -100.0, 7: 0.5}),
    SamplingParams(allowed_token_ids=(3, 7, 11, 19)),
    SamplingParams(min_tokens=4),
    SamplingParams(no_repeat_ngram_size=1),
    SamplingParams(no_repeat_ngram_size=2, logit_bias={7: 90.0}),
    SamplingParams(repetition_penalty=0.5, presence_penalty=-1.0, frequency_penalty=0.6, logit_bias={7: 2.0}),
    SamplingParams(
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias={5: -2.0, 11: 90.0},
        allowed_token_ids=(5, 7, 11, 12, 20),
        min_tokens=3,
    ),
]
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


def behind(seen: Sequence[int]) -> History:
    return History(seen, len(seen))


def some_logits(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def probabilities_of_transformers(logits: Tensor, params: SamplingParams, seen: list[int]) -> Tensor:
    ids, scores = torch.tensor([seen]), logits[None].float()
    if params.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    scores = TemperatureLogitsWarper(params.temperature)(ids, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(ids, scores)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(ids, scores)
    return scores.softmax(dim=-1)[0]


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_draws_have_the_support_and_the_frequencies_of_transformers_filters(params: SamplingParams) -> None:
    logits, seen = some_logits(1, 24)[0], [3, 3, 7, 11]
    expected = probabilities_of_transformers(logits, params, seen)
    picked = Sampler(seed=5).sample(logits.expand(DRAWS, -1), [params] * DRAWS, range(DRAWS), 0, [behind(seen)] * DRAWS)
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
    tokens = Sampler(seed=1).sample(logits.expand(600, -1), params, range(600), 2, [*map(behind, seen)]).tokens.tolist()
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
    seen = [behind([row, row + 1]) for row in range(40)]
    whole = sampler.sample(logits, [params] * 40, range(40), 6, seen).tokens
    others = [SamplingParams(), SamplingParams(temperature=3.0), SamplingParams(temperature=0.5, top_k=300)]
    for row in (0, 13, 39):
        alone = sampler.sample(logits[row : row + 1], [params], [row], [6], [seen[row]]).tokens
        mixed = sampler.sample(
            torch.cat([logits[:3], logits[row : row + 1]]),
            [*others, params],
            [50, 51, 52, row],
            [0, 1, 2, 6],
            [behind([])] * 3 + [seen[row]],
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


DRAWN = (  # by the first versions of this engine, which sorted all tokens
    (SamplingParams(temperature=1.0), [120, 975, 426, 275, 576, 298, 487, 296]),
    (SamplingParams(temperature=0.7, top_k=50), [87, 167, 629, 224, 448, 749, 786, 245]),
    (SamplingParams(temperature=1.3, top_p=0.6), [291, 261, 59, 666, 941, 239, 182, 721]),
    (SamplingParams(temperature=1.0, min_p=0.3), [359, 863, 433, 836, 168, 86, 727, 891]),
    (
        SamplingParams(temperature=0.9, top_k=300, top_p=0.8, repetition_penalty=1.4, frequency_penalty=0.3),
        [291, 30, 110, 683, 440, 222, 948, 738],
    ),
)


@pytest.mark.parametrize("variant", [*VARIANTS, TORCH])
@pytest.mark.parametrize(("params", "tokens"), DRAWN, ids=str)
def test_a_seed_draws_the_tokens_that_it_always_has(params: SamplingParams, tokens: list[int], variant: str) -> None:
    logits = torch.sin(torch.arange(8 * 1000, dtype=torch.float64).view(8, 1000) * 0.7391).float() * 4
    histories = [History([5, 17, 900, 17], 2, number=row % 2) for row in range(8)]
    with used(variant):
        assert Sampler(11).sample(logits, [params] * 8, range(8), 3, histories).tokens.tolist() == tokens


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
    assert Sampler().sample(logits, params, range(3), 0, [*map(behind, ([0, 0], [0], [0]))]).tokens.tolist() == [1, 0, 1]
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
    assert len(Sampler(0).sample(logits, params, range(3), 0, [behind([1])] * 3).tokens) == 3


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
    picked = Sampler(0).sample(logits, params, range(4), 0, [behind([0, 1])] * 4)
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


BAD: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("max_tokens", (0, 2.0, "8", True, math.nan, [3], 10**18)),
    ("temperature", (-0.1, math.nan, math.inf, "1", False, None, 10**400, 1j, 101.0)),
    ("top_k", (-2, 5.0, "5", None, 2**31)),
    ("top_p", (0.0, 1.1, math.nan, "0.5", True)),
    ("min_p", (-0.1, 2.0, None)),
    ("repetition_penalty", (0.0, 1e-300, 1e300, math.inf, "1")),
    ("seed", (-1, 2**64, 1.5, "7", True)),
    ("stop", ("", [""], ("a", ""), 7, [7], b"end", {"a": 1}, ["a" * 5000, ""])),
    ("stop_token_ids", ((-1,), 5, "5", [1.0], [True], {5: 1})),
    ("ignore_eos", (1, "yes", None)),
    ("logprobs", (-1, 1.5, True, 2**31)),
    ("n", (0, 1.0, None, 10**9)),
    ("min_tokens", (-1, 1.5, None, 10**18)),
    ("presence_penalty", (-2.1, 2.5, math.nan, "1")),
    ("frequency_penalty", (-2.1, 2.5, None)),
    ("no_repeat_ngram_size", (-1, 1.5, None, True, 10**18)),
    ("logit_bias", ({-1: 1.0}, {"5": 1.0}, {1.5: 1.0}, {1: 101.0}, {1: math.nan}, {1: "2"}, [1])),
    ("allowed_token_ids", ([], [-1], 5, ["5"])),
    ("prompt_logprobs", (-1, 0.5, True)),
    ("include_stop_str_in_output", (0, None)),
    ("skip_special_tokens", (1, "yes", None)),
    ("structured_outputs", (5, "a", ["a"], b"a")),
    ("lora_name", (5, "", ["a"], True)),
    ("response_format", (5, "text", ["a"], True)),
)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD for value in values])
def test_a_bad_value_is_refused_in_one_line_that_names_it(name: str, value: object) -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    message = str(error.value)
    assert message.startswith(f"{name} is ") and "; allowed is " in message
    assert "\n" not in message and len(message) < 200
    assert len(repr(value)) > 30 or repr(value) in message


def test_no_stop_has_three_ways_to_be_written() -> None:
    assert [SamplingParams(stop=none).stop_strings for none in (None, [], ())] == [()] * 3


@pytest.mark.parametrize("name", [name for name, one in SAMPLING.items() if isinstance(one.allowed, (Bounds, Several))])
def test_the_bounds_of_an_option_are_allowed_and_what_is_beyond_is_not(name: str) -> None:
    allowed = SAMPLING[name].allowed
    bounds = allowed.each if isinstance(allowed, Several) else allowed
    assert isinstance(bounds, Bounds)
    step = 1 if bounds.is_whole else 0.001
    most = {"max_tokens": MOST_TOKENS, "temperature": 1.0}
    ends = (bounds.most,) if bounds.without_least or name == "max_tokens" else (bounds.least, bounds.most)
    for end in ends:
        SamplingParams(**{**most, name: [end] if name == "stop_token_ids" else end})  # type: ignore[arg-type]
    for beyond in (bounds.least - step, bounds.most + step):
        with pytest.raises(ValueError, match=f"^{name} is "):
            SamplingParams(**{**most, name: [beyond] if name == "stop_token_ids" else beyond})  # type: ignore[arg-type]


def test_every_option_has_its_rule() -> None:
    assert [name for name, _ in BAD] == [*SAMPLING] == [each.name for each in fields(SamplingParams)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temprature": 1.0}, "'temprature' is unknown; did you mean temperature?"),
        ({"zzz": 1.0}, "'zzz' is unknown; known are max_tokens, "),
        ({"best_of": 3}, "'best_of' is not supported; make n completions"),
        ({"max_new_tokens": 3}, "'max_new_tokens' is not supported; it is called max_tokens"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens is 6; allowed is 0 to max_tokens, which is 5"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_what_could_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        SamplingParams(**options)


def test_what_other_libraries_hand_over_is_taken_as_what_it_is() -> None:
    given = SamplingParams(
        max_tokens=np.int64(4),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        top_p=Fraction(1, 2),  # type: ignore[arg-type]
        top_k=-1,
        stop=None,
        stop_token_ids=np.array([1, 2]),  # type: ignore[arg-type]
        logit_bias={np.int32(3): 1},  # type: ignore[dict-item]
        allowed_token_ids={7},  # type: ignore[arg-type]
    )
    plain = SamplingParams(4, 0.5, 0, 0.5, stop_token_ids=(1, 2), logit_bias={3: 1.0}, allowed_token_ids=(7,))
    assert given == plain and hash(given) == hash(plain)
    assert [type(value) for value in (given.max_tokens, given.temperature, given.top_p, given.stop_ids[0])] == [
        int,
        float,
        float,
        int,
    ]
    assert SamplingParams(stop_token_ids=None).stop_ids == () and SamplingParams(max_tokens=None).max_tokens is None
    assert pickle.loads(pickle.dumps(given)) == given == replace(given)


# -- what params do to logits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", ADJUSTING, ids=str)
@pytest.mark.parametrize("num_generated", [0, 2, 5])
def test_the_likeliest_token_and_the_draws_are_those_of_the_reference(params: SamplingParams, num_generated: int) -> None:
    logits, seen = some_logits(1, 24, seed=7)[0], [3, 3, 7, 11, 3, 5, 7, 7, 7][: 4 + num_generated]
    history = History(seen, 4, ends=(11, 20, 99, -1))
    wanted = torch.tensor(adjusted_by_hand(logits.tolist(), params, seen[:4], seen[4:], (11, 20)))
    (token,) = Sampler().sample(logits[None], [replace(params, temperature=0)], [0], num_generated, [history]).tokens.tolist()
    assert token == int(wanted.argmax())
    drawn = replace(params, temperature=0.8, min_p=0.01, top_p=0.9)
    expected = probabilities_of_transformers(wanted, replace(drawn, repetition_penalty=1.0), [])
    tokens = Sampler(3).sample(logits.expand(DRAWS, -1), [drawn] * DRAWS, range(DRAWS), 0, [history] * DRAWS).tokens
    counts = torch.bincount(tokens, minlength=24)
    assert not counts[expected == 0].any() and counts[expected > 10 / DRAWS].all()
    assert (counts / DRAWS - expected).abs().max() < 0.04


def test_rows_that_ask_for_nothing_see_nothing_of_those_that_do() -> None:
    logits = some_logits(3, 24)
    histories = [History([1, 2, *range(24)], 2)] * 3
    strange = SamplingParams(presence_penalty=2, logit_bias={5: 100}, allowed_token_ids=[5])
    tokens = Sampler().sample(logits, [SamplingParams(), strange, SamplingParams()], range(3), 0, histories).tokens
    assert tokens.tolist() == [int(logits[0].argmax()), 5, int(logits[2].argmax())]
    assert torch.equal(logits, some_logits(3, 24))


def test_a_batch_in_which_no_row_asks_for_changes_has_none() -> None:
    done = SamplingParams(min_tokens=3)  # which are there
    assert score_changes([SamplingParams(temperature=1.0, top_k=3), done], [History([1] * 5, 2)] * 2, 24) is None
    assert score_changes([SamplingParams(), done], [History([1] * 4, 2)] * 2, 24) is not None


def test_log_probabilities_are_of_the_logits_before_anything_is_done_to_them() -> None:
    logits, params = some_logits(1, 24), SamplingParams(logprobs=24, logit_bias={5: 50}, presence_penalty=2, temperature=0.5)
    (step,) = Sampler(0).sample(logits, [params], [0], 0, [History([1, 2, 3], 1)]).logprobs
    assert step is not None and step.chosen.token_id == 5
    wanted = logits[0].log_softmax(-1)
    assert {one.token_id: one.logprob for one in step.top} == pytest.approx(dict(enumerate(wanted.tolist())), abs=1e-5)
    assert step.chosen.logprob == pytest.approx(wanted[5].item(), abs=1e-5)


@pytest.mark.parametrize("penalty", [0.01, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_penalty_makes_a_sound_checkpoint_look_broken(penalty: float, dtype: torch.dtype) -> None:
    logits = torch.tensor([[6e4, 5e4, -6e4, 0.0]], dtype=dtype)
    params = SamplingParams(repetition_penalty=penalty, temperature=1.0)
    (token,) = Sampler(0).sample(logits, [params], [0], 0, [behind([0, 2])]).tokens.tolist()
    assert token == (0 if penalty < 1 else 1)


def test_params_that_leave_no_token_are_to_blame_and_not_the_checkpoint() -> None:
    logits, history = some_logits(2, 8), History([1], 1, ends=(3,))
    forbidden = SamplingParams(min_tokens=1, allowed_token_ids=[3])
    with pytest.raises(ValueError, match=r"prompt 12 leave no token .* step 0 .* ease allowed_token_ids or min_tokens$"):
        Sampler().sample(logits, [SamplingParams(), forbidden], [11, 12], 0, [history] * 2)
    logits[1, 5] = math.nan
    with pytest.raises(ValueError, match="logits of prompt 12 at step 0 have the maximum nan; the checkpoint"):
        Sampler().sample(logits, [SamplingParams(), forbidden], [11, 12], 0, [history] * 2)


def test_completions_of_one_prompt_draw_numbers_of_their_own_and_the_first_those_of_a_single_one() -> None:
    logits, params = torch.zeros(40, 1000), [SamplingParams(temperature=1.0)] * 40
    tokens = Sampler(4).sample(logits, params, [3] * 40, 0, [History([1], 1, number=number) for number in range(40)]).tokens
    assert len(set(tokens.tolist())) > 30
    assert tokens[0] == Sampler(4).sample(logits[:1], params[:1], [3], 0).tokens[0]
    assert (
        len({uniform(seed, row, step, number) for seed in (0, 1) for row in (0, 1) for step in (0, 1) for number in (0, 1)})
        == 16
    )


@pytest.mark.parametrize("params", ADJUSTING, ids=str)
def test_what_depends_on_the_tokens_so_far_is_refused_without_them(params: SamplingParams) -> None:
    with pytest.raises(ValueError, match="need the tokens so far"):
        Sampler().sample(torch.zeros(1, 4), [params], [0], 0)


def test_stop_may_be_one_text_or_several() -> None:
    assert SamplingParams(stop="end").stop_strings == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()


@pytest.mark.cuda
@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_a_device_draws_the_same_tokens_as_the_cpu(params: SamplingParams) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    logits, seen = some_logits(50, 2000), [behind([row]) for row in range(50)]
    on_host = Sampler(6).sample(logits, [params] * 50, range(50), 3, seen).tokens
    on_device = Sampler(6).sample(logits.cuda(), [params] * 50, range(50), 3, seen).tokens
    assert torch.equal(on_host, on_device)
