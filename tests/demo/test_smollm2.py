"""SmolLM2-135M-Instruct, read in place from its GGUF file: what the engine says on every tier is what transformers says with
the same values, and its perplexity is llama.cpp's.

What scripts/fetch_smollm2 fetches is needed."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from h2o_flexgen import LLM, SamplingParams
from h2o_flexgen.checkpoints.model_places import SMOLLM2, held_out_prose
from h2o_flexgen.cli.main import main
from tests.helpers.dequantised import dequantised_model

pytestmark = pytest.mark.smollm2

TIERS = {  # percent of weights, KV and hidden states; batches
    "memory": ((100, 0, 100, 0, 100, 0), 1),
    "host": ((0, 100, 0, 100, 0, 100), 1),
    "disk": ((0, 0, 0, 0, 0, 0), 2),
    "all of them": ((30, 40, 30, 40, 0, 100), 2),
}
# On a processor memory and host are one, and the last has parts there and on the disk.
BY_DEFAULT = [*(pytest.param(tier, marks=pytest.mark.slow) for tier in ("memory", "host", "disk")), "all of them"]
NEAR = 1e-4  # of logits, whose largest are about 30
LITTLE = 1.5  # times as far
# `llama-perplexity -m FILE -f h2o_flexgen/demo/held_out.txt -c 512`, of llama.cpp 0c1e57098, behind four chunks
LLAMA_CPP_PERPLEXITY, CHUNKS, CHUNK = 28.4228, 4, 512
ALIKE = 0.005  # of the perplexity: llama.cpp rounds what it multiplies matrices with to 8 bits


class Said(NamedTuple):
    prompts: list[tuple[int, ...]]
    tokens: list[tuple[int, ...]]
    logits: list[Tensor]  # of the first rows: (tokens, vocabulary)


@cache
def reference(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """The model of transformers."""
    return dequantised_model(SMOLLM2.path).to(dtype)


def beginnings(count: int) -> list[str]:
    """Beginnings of paragraphs, of 6 to 35 words."""
    paragraphs = [words for line in held_out_prose().splitlines() if len(words := line.split()) > 40]
    return [" ".join(words[: 6 + number % 30]) for number, words in enumerate(paragraphs[:count])]


def said_on(tier: str, count: int, tokens: int, folder: Path, heard: int) -> Said:
    """What so many rows say; the logits of some of them are kept."""
    percent, batches = TIERS[tier]
    logits: list[list[Tensor]] = [[] for _ in range(heard)]

    def told(row: int, number: int, of_token: Tensor) -> None:
        if row < heard:
            assert number == len(logits[row])
            logits[row].append(of_token.clone())

    options = {"gpu_batch_size": -(-count // batches), "num_gpu_batches": batches, "dtype": "float32", "offload_dir": folder}
    with LLM(SMOLLM2.name, percent=percent, **options) as llm:
        greedy = SamplingParams(max_tokens=tokens, ignore_eos=True)
        done = llm.generate(beginnings(count), greedy, on_logits=told)
    return Said([one.prompt_token_ids for one in done], [one.token_ids for one in done], list(map(torch.stack, logits)))


def logits_of(dtype: torch.dtype, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> Tensor:
    """The logits of transformers for these tokens, each behind those before it."""
    with torch.inference_mode():
        logits: Tensor = reference(dtype)(torch.tensor([prompt + tokens])).logits[0]
    return logits[len(prompt) - 1 : -1]


kept_logits = cache(logits_of)


@cache
def are_greedy(prompt: tuple[int, ...], tokens: tuple[int, ...]) -> bool:
    """True if each token is what transformers finds likeliest behind those before it: then they are its own greedy tokens."""
    return tuple(logits_of(torch.float32, prompt, tokens).argmax(-1).tolist()) == tokens


@pytest.mark.parametrize("tier", BY_DEFAULT)
def test_on_every_tier_it_says_what_transformers_says(tier: str, tmp_path: Path) -> None:
    said = said_on(tier, 4, 3, tmp_path, heard=4)
    for prompt, tokens, logits in zip(*said):
        wanted = kept_logits(torch.float32, prompt, tokens)
        torch.testing.assert_close(logits, wanted, atol=NEAR, rtol=0)
        assert tuple(wanted.argmax(-1).tolist()) == tokens


@pytest.mark.slow
@pytest.mark.parametrize("tier", TIERS)
def test_on_every_tier_fifty_long_texts_are_those_of_transformers(tier: str, tmp_path: Path) -> None:
    """So far into a text, float32 itself strays by more than 1e-4: the logits may stray no further than transformers' own do,
    or little."""
    said = said_on(tier, 50, 200, tmp_path, heard=5)
    assert [row for row, text in enumerate(zip(said.prompts, said.tokens)) if not are_greedy(*text)] == []
    strays, theirs = 0.0, 0.0
    for prompt, tokens, logits in zip(*said):
        exact = kept_logits(torch.float64, prompt, tokens)
        strays = max(strays, _furthest(logits, exact))
        theirs = max(theirs, _furthest(kept_logits(torch.float32, prompt, tokens), exact))
    assert strays <= LITTLE * theirs


def _furthest(logits: Tensor, exact: Tensor) -> float:
    return float((logits - exact).abs().max())


@pytest.mark.slow
def test_transformers_reads_the_same_values_and_tokens() -> None:
    place = {"pretrained_model_name_or_path": str(SMOLLM2.path.parent), "gguf_file": SMOLLM2.file}
    theirs = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32).state_dict()
    ours = reference().state_dict()
    assert theirs.keys() == ours.keys()
    assert [name for name, value in ours.items() if not torch.equal(value, theirs[name])] == []
    with LLM(SMOLLM2.name) as llm:
        text = held_out_prose()
        assert llm.tokenizer.encode(text) == AutoTokenizer.from_pretrained(**place)(text)["input_ids"]


@pytest.mark.slow
def test_its_perplexity_is_that_of_llama_cpp() -> None:
    with LLM(SMOLLM2.name, gpu_batch_size=CHUNKS) as llm:
        ids = llm.tokenizer.encode(held_out_prose())[: CHUNKS * CHUNK]
        losses = _losses(llm, [ids[start : start + CHUNK] for start in range(0, len(ids), CHUNK)])
    assert math.exp(sum(losses) / len(losses)) == pytest.approx(LLAMA_CPP_PERPLEXITY, rel=ALIKE)


def _losses(llm: LLM, chunks: Sequence[Sequence[int]]) -> list[float]:
    """The losses as llama.cpp takes them: those of a chunk's second half, but for its first token."""
    pairs = [(chunk[: CHUNK // 2 + 1], chunk[CHUNK // 2 + 1 :]) for chunk in chunks]
    return [-logprob for scored in llm.score(pairs) for logprob in scored.logprobs]


def test_it_answers_with_nothing_but_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--model", SMOLLM2.name, "--prompt", "The capital of France is", "--gen-len", "4"]) == 0
    assert "Paris" in capsys.readouterr().out


def test_a_chat_follows_the_template_of_its_file() -> None:
    with LLM(SMOLLM2.name, gpu_batch_size=1) as llm:
        asked = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
        (answer,) = llm.chat([asked], SamplingParams(max_tokens=16))
    assert "<|im_start|>user\nWhat is the capital" in str(answer.prompt)
    assert "Paris" in answer.text and answer.finish_reason == "stop"


@pytest.mark.slow
def test_it_is_evaluated(tmp_path: Path) -> None:
    asked = ["--tasks", "perplexity", "--policies", "full", "--examples", "2", "--window", "40"]
    assert main(["evaluate", "--model", SMOLLM2.name, *asked, "--output", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    (cell,) = found["tasks"]["perplexity"]["cells"]
    assert 20 < cell["figures"][0]["value"] < 300  # so few tokens stand before; at random it would be 49152
