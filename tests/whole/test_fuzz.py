"""Random plans, ragged prompts, random params and rows that end when they like. A failure names its seed and its case."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from h2o_flexgen.core.site import DEVICE, HOST
from h2o_flexgen.formats.kernel_table import EXACT, INT8, TORCH
from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.kernels import native
from h2o_flexgen.llm import LLM
from h2o_flexgen.sampling.completion import Completion
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.schedule import SCHEDULES
from tests.clocked.backend import IS_POSSIBLE
from tests.clocked.context import sound
from tests.clocked.tensor import NAME as CLOCKED
from tests.helpers import tiny
from tests.helpers.contract import (
    BESIDE_SCANS,
    BY_HEAD,
    POLICIES,
    PUBLISHED,
    WEIGHTS,
    Case,
    Checkpoints,
    Logits,
    fits,
    kept_as,
    recorded_logits,
)
from tests.helpers.samples import first_of

SHORTEST_BY_HEAD = 4  # tokens of a prompt of which every head has a slot
NEAR = (
    "mistral-near",
    "qwen3-moe-near",
    "phi3-near",
    "starcoder2-near",
)  # windows everywhere, within which texts of policies that evict must stay
KINDS = [kind for kind in tiny.KINDS if kind not in ("mistral", *NEAR)] + ["mistral"]


def random_share(random: Random) -> tuple[int, int]:
    device = random.choice([0, 0, 100, random.randint(0, 100)])
    return device, random.choice([0, 100 - device, random.randint(0, 100 - device)])


def random_weights(random: Random) -> tuple[str, str, str, str]:
    """A kind of model whose weights are stored as values, how they are, and what becomes of them."""
    weight_codec, compute = random.choice([*WEIGHTS, WEIGHTS[0]])
    return random.choice(KINDS), random.choice(["float32", "float32", "bfloat16"]), weight_codec, compute


def random_case(random: Random, devices: Sequence[str]) -> Case:
    kind, stored, weight_codec, compute = random.choice(PUBLISHED) if random.random() < 0.25 else random_weights(random)
    policy = random.choice([own for own in (*POLICIES, *BY_HEAD) if fits(kind, own)])
    shortest = SHORTEST_BY_HEAD if policy in BY_HEAD else 1
    return Case(
        kind=kind,
        percent=(*random_share(random), *random_share(random), *random_share(random)),
        lengths=tuple(max(shortest, random.choice([1, 2, random.randint(1, 30)])) for _ in range(random.randint(1, 12))),
        gen_len=random.choice([1, 2, random.randint(1, 12)]),
        gpu_batch_size=random.randint(1, 5),
        num_gpu_batches=random.randint(1, 5),
        buffers=random.randint(1, 4),
        sep_layer=random.random() < 0.7,
        overlap=random.random() < 0.8,
        schedule=random.choice([*SCHEDULES, "zigzag", "zigzag"]),
        device=random.choice(devices),
        stored=stored,
        policy=policy,
        weight_codec=weight_codec,
        compute=compute,
        kv_codec=kept_as(kind, random.choice([PLAIN, PLAIN, "group4", "group8"])),
        attend_on=DEVICE if kind in BESIDE_SCANS else random.choice([DEVICE, HOST]),
    )


def random_params(random: Random, gen_len: int) -> SamplingParams:
    max_tokens = random.randint(1, gen_len)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=random.choice([0.0, 0.0, 0.7, 1.5]),
        top_k=random.choice([0, 5, 50]),
        top_p=random.choice([1.0, 0.9]),
        min_p=random.choice([0.0, 0.02]),
        repetition_penalty=random.choice([1.0, 1.2]),
        seed=random.choice([None, 3]),
        stop_token_ids=[random.randrange(tiny.VOCAB) for _ in range(random.choice([0, 4, 20]))],
        logprobs=random.choice([None, 2]),
        min_tokens=min(max_tokens, random.choice([0, 0, 3])),
        presence_penalty=random.choice([0.0, 0.0, 1.5]),
        no_repeat_ngram_size=random.choice([0, 0, 2]),
        frequency_penalty=random.choice([0.0, 0.0, -0.5]),
        logit_bias=random.choice([None, None, {random.randrange(tiny.VOCAB): 4.0}]),
        allowed_token_ids=random.choice([None, None, None, range(0, tiny.VOCAB, 2)]),
        prompt_logprobs=random.choice([None, None, 1]),
    )


Made = tuple[list[Completion], Logits]


def generate(case: Case, params: Sequence[SamplingParams], checkpoints: Checkpoints, offload: Path) -> Made:
    with case.open(checkpoints, offload) as llm, recorded_logits() as logits:
        completions = llm.generate(case.prompts, params, seed=11)
        check_books(llm, completions)
    assert len(logits) == sum(len(each.token_ids) for each in completions), "a row was computed after its end"
    return completions, logits


def check_books(llm: LLM, completions: Sequence[Completion]) -> None:
    assert llm.stats is not None and llm.loaded._memories is not None
    assert llm.stats.generated_tokens == sum(len(each.token_ids) for each in completions)
    assert llm.loaded._memories.disk.meter.used_bytes == 0


def hold(seed: int, checkpoints: Checkpoints, offload: Path, devices: Sequence[str] = ("cpu", "pretended")) -> None:
    """The tokens of a random plan are those of the plainest one: all resident, one row at a time."""
    random = Random(seed)
    case = random_case(random, devices)
    with sound() if case.device == CLOCKED else nullcontext():
        hold_case(case, random, seed, checkpoints, offload)


def hold_case(case: Case, random: Random, seed: int, checkpoints: Checkpoints, offload: Path) -> None:
    params = [random_params(random, case.gen_len) for _ in case.lengths]
    plain = replace(
        case, percent=(0, 100, 0, 100, 0, 100), gpu_batch_size=1, num_gpu_batches=1, buffers=1, schedule="zigzag", device="cpu"
    )
    try:
        completions, logits = generate(case, params, checkpoints, offload)
        expected, of_plain = generate(plain, params, checkpoints, offload)
        for got, wanted in zip(completions, expected, strict=True):
            assert (got.token_ids, got.finish_reason, got.text) == (wanted.token_ids, wanted.finish_reason, wanted.text)
            check_logprobs(got, wanted)
        if case.compute == INT8 and case.device == "cpu" and native.in_use() != TORCH:
            assert all(torch.equal(own, of_plain[place]) for place, own in logits.items()), "logits have other bits"
        if case.kv_policy.keeps_all and (case.weight_codec, case.kv_codec, case.compute) == (PLAIN, PLAIN, EXACT):
            greedy_rows_equal_transformers(case, params, completions, checkpoints)
    except BaseException as error:
        raise AssertionError(f"seed {seed}: Case({case})\nparams {params}") from error


def check_logprobs(got: Completion, wanted: Completion) -> None:
    for own, other in ((got.logprobs, wanted.logprobs), (got.prompt_logprobs, wanted.prompt_logprobs)):
        assert (own is None) == (other is None)
        for mine, theirs in zip(own or (), other or (), strict=True):
            assert mine is None or theirs is None or mine.chosen.logprob == pytest.approx(theirs.chosen.logprob, abs=1e-4)
            assert (mine is None) == (theirs is None)


def greedy_rows_equal_transformers(
    case: Case, params: Sequence[SamplingParams], completions: Sequence[Completion], checkpoints: Checkpoints
) -> None:
    """Of one row that neither samples nor changes scores."""
    for row, own in enumerate(params):
        if own.is_greedy and not own.changes_scores and own.min_tokens == 0:
            tokens = list(completions[row].token_ids)
            assert tokens == checkpoints.greedy(case, row, len(tokens))[0]
            return


@pytest.mark.parametrize("seed", first_of(range(30), 10))
def test_random_plans_generate_what_the_plainest_plan_generates(
    seed: int, checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    hold(seed, checkpoints, offload)


@pytest.mark.fuzz
def test_many_more_random_plans(fuzz_seed: int, checkpoints: Checkpoints, offload: Path, pretended: None) -> None:
    hold(fuzz_seed, checkpoints, offload, ("cpu", "pretended", CLOCKED) if IS_POSSIBLE else ("cpu", "pretended"))
