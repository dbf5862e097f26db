"""Embeddings: under any plan a prompt has the vector that the last hidden states of transformers give it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_flexgen import SamplingParams
from h2o_flexgen.core.buffer_layout import region_bytes
from h2o_flexgen.core.site import HOST
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.engine.executor import TaskFailed
from h2o_flexgen.engine.job import Request
from h2o_flexgen.engine.stores.kv import KVStore
from h2o_flexgen.sampling.pooling import CLS, LAST, MEAN, PoolingParams
from h2o_flexgen.text.prompts import Prompt, TextPair, shortened
from h2o_flexgen.text.tokenizer import ByteTokenizer
from tests.helpers import tiny
from tests.helpers.contract import Case, Checkpoints
from tests.helpers.pairwise import in_turn
from tests.helpers.refusals import one_line

RESIDENT, ON_DISK, MIXED = (100, 0, 100, 0, 100, 0), (0, 0) * 3, (30, 30, 20, 50, 40, 30)
EVICTING = (("kv_policy", "h2o"), ("heavy", 2), ("recent", 2))
LENGTHS = (1, 37, 2, 9, 9, 64, 3)
WAYS = [(pooling, normalize) for pooling in (LAST, MEAN, CLS) for normalize in (True, False)]
PLANS = (
    Case("opt", policy=EVICTING),
    Case("llama-gqa", ON_DISK, gpu_batch_size=3, num_gpu_batches=1, kv_codec="group4"),
    Case("neox-parallel", MIXED, prefill_tokens=12),
    Case("opt-350m", MIXED, gpu_batch_size=1, schedule="row_by_row"),
    Case("gemma3-capped", ON_DISK, sep_layer=False, prefill_tokens=1),
    Case("granite-moe", MIXED, buffers=3, num_gpu_batches=4),
)


def drawn(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(tiny.VOCAB) for _ in range(length)] for length in lengths]


def by_transformers(model: Any, ids: Sequence[int], pooling: str, normalize: bool) -> Tensor:
    tokens = torch.tensor([ids])
    with torch.inference_mode():
        made = model(tokens, attention_mask=torch.ones_like(tokens), output_hidden_states=True)
    states = made.hidden_states[-1][0]
    vector = {LAST: states[-1], MEAN: states.mean(dim=0), CLS: states[0]}[pooling]
    return torch.nn.functional.normalize(vector, dim=0) if normalize else vector


def near(found: Sequence[float], wanted: Tensor, tolerance: float = 1e-5) -> bool:
    return bool((torch.tensor(found) - wanted).abs().max() <= tolerance * max(1.0, wanted.abs().max().item()))


@pytest.mark.parametrize("values", in_turn({"plan": PLANS}, nth=2))
def test_vectors_are_those_of_transformers(
    values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    """Three of the ways on the one device, the others on the other."""
    prompts, case = drawn(), replace(values["plan"], device=values["device"])
    model = checkpoints.hf_model(case.kind)
    with case.open(checkpoints, offload) as llm:
        for pooling, normalize in (WAYS[place] for place in ((0, 3, 4) if case.device == "cpu" else (1, 2, 5))):
            found = llm.embed(prompts, pooling=pooling, normalize=normalize)
            for one, ids in zip(found, prompts, strict=True):
                assert near(one.embedding, by_transformers(model, ids, pooling, normalize)), (pooling, len(ids))
                assert (one.prompt_token_ids, one.truncated_tokens) == (tuple(ids), 0)
        assert llm.stats is not None and (llm.stats.num_prompts, llm.stats.generated_tokens) == (len(prompts), 0)


def test_vectors_have_the_same_bits_under_plans_of_one_shape(checkpoints: Checkpoints, offload: Path) -> None:
    plain = Case("llama-gqa", RESIDENT)
    changes: list[dict[str, Any]] = [
        {"percent": ON_DISK},
        {"percent": MIXED, "policy": EVICTING},
        {"kv_codec": "group4", "schedule": "row_by_row"},
    ]
    vectors = []
    for change in [{}, *changes]:
        with replace(plain, **change).open(checkpoints, offload) as llm:
            vectors.append([one.embedding for one in llm.embed(drawn(), pooling=MEAN)])
    assert all(vectors[0] == others for others in vectors[1:])


@pytest.mark.parametrize("prefix_policy", ["pinned", "judged"])
def test_a_row_of_a_running_block_asks_beside_others_and_with_what_they_share(
    prefix_policy: str, checkpoints: Checkpoints, offload: Path
) -> None:
    beginning, *rest = drawn((11, 1, 30, 4, 9, 2, 6, 17))
    requests = [
        Request([*beginning, *own], PoolingParams(pooling=WAYS[place % 6][0], normalize=WAYS[place % 6][1]))
        for place, own in enumerate(rest)
    ]
    requests.insert(3, Request([*beginning, 5], SamplingParams(max_tokens=6)))
    options = {"least_prefix": 4, "prefix_policy": prefix_policy}
    case = Case("llama-gqa", ON_DISK, policy=(*EVICTING, *options.items()), prefill_tokens=12)
    model = checkpoints.hf_model(case.kind)
    with case.open(checkpoints, offload) as llm:
        found = sorted(llm.generate_stream(requests), key=lambda one: one.index)
    assert [one.embedding is None for one in found] == [place == 3 for place in range(len(requests))]
    for request, one in zip(requests, found, strict=True):
        if isinstance(params := request.params, PoolingParams):
            assert one.embedding is not None and one.token_ids == ()
            ids: Any = request.prompt
            assert near(one.embedding, by_transformers(model, ids, params.pooling, params.normalize)), one.index


@pytest.mark.parametrize("percent", [RESIDENT, ON_DISK, MIXED])
def test_layers_keep_keys_and_values_of_prompts_in_one_place(
    percent: tuple[float, ...], checkpoints: Checkpoints, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the shares of a plan: as much is promised and held as one layer of one batch keeps, and none of it moves."""
    homes, allocate = list[int](), KVStore._allocate

    def noted(store: KVStore, held: Any) -> None:
        allocate(store, held)
        homes.append(len({one.data_ptr() for one in store._in_memory.values()}) + len(store._on_disk))

    monkeypatch.setattr(KVStore, "_allocate", noted)
    case = Case("llama-gqa", percent, policy=EVICTING, num_gpu_batches=2)
    with case.open(checkpoints, offload) as llm:
        read, grown = (llm.planned(Workload((40,) * 4, gen_len)) for gen_len in (1, 2))
        llm.embed(drawn())
        streamed = [*llm.generate_stream([Request(ids, PoolingParams()) for ids in drawn()])]
        llm.generate(drawn(), SamplingParams(2))
    assert len(streamed) == len(LENGTHS) and homes[-1] > 1 and homes[0] == homes[1] == 1, homes
    block = read.blocks.first
    of_layers = [block.kv.image_bytes(layer, 0) for layer in block.spec.kv_layers]
    assert {*block.placement.kv.values()} == {HOST} and read.footprint.parts[HOST]["KV"] == region_bytes(max(of_layers))
    assert percent != RESIDENT or grown.footprint.parts[HOST]["KV"] >= 2 * sum(of_layers), "of two batches"


def test_a_prompt_that_is_cut_says_so_and_a_long_one_is_refused(checkpoints: Checkpoints, offload: Path) -> None:
    long, longest = drawn((tiny.POSITIONS + 5, tiny.POSITIONS))
    with Case("opt").open(checkpoints, offload) as llm:
        assert "128 positions" in one_line(lambda: llm.embed([long]))
        whole, cut, few = llm.embed([longest, long], truncate=True) + llm.embed([long], truncate=7)
        assert (whole.truncated_tokens, cut.truncated_tokens, few.truncated_tokens) == (0, 5, tiny.POSITIONS - 2)
        assert cut.prompt_token_ids == tuple(long[: tiny.POSITIONS]) and few.prompt_token_ids == tuple(long[:7])
        assert few.embedding == llm.embed([long[:7]])[0].embedding
        assert one_line(lambda: llm.embed([long], truncate=0)).startswith("truncate is 0; ")
        assert one_line(lambda: llm.embed([long], pooling="max")).startswith("pooling 'max' is unknown; known: last, mean")
        assert "it is called truncate" in one_line(lambda: llm.embed([long], truncate_prompt_tokens=5))
        assert llm.embed([]) == []


class _Ending(ByteTokenizer):
    """Puts a token before each text and one behind it."""

    def encode(self, text: str) -> list[int]:
        return [1, *super().encode(text), 2]

    def encode_pair(self, first: str, second: str) -> list[int]:
        return [*self.encode(first), *super().encode(second), 3]


def test_a_cut_text_keeps_what_its_tokenizer_puts_behind_it() -> None:
    tokenizer = _Ending(300)
    cut = shortened(Prompt("abcdef", tuple(tokenizer.encode("abcdef"))), 4, tokenizer)
    assert (cut.ids, cut.left_out) == ((1, *ByteTokenizer(300).encode("ab"), 2), 4)
    assert shortened(Prompt(None, (1, 5, 6, 2)), 2, tokenizer).ids == (1, 5)
    pair = shortened(TextPair("ab", "cdef").read_with(tokenizer), 7, tokenizer)
    assert (pair.ids, pair.left_out) == ((*tokenizer.encode("ab"), *ByteTokenizer(300).encode("cd"), 3), 2)
    assert shortened(TextPair("ab", "cdef").read_with(ByteTokenizer(300)), 4, ByteTokenizer(300)).ids == (
        *ByteTokenizer(300).encode("abcd"),
    )


def test_a_vector_that_is_not_finite_is_an_error(checkpoints: Checkpoints, offload: Path) -> None:
    with Case("opt").open(checkpoints, offload) as llm:
        llm.load()
        states = llm.loaded.model.last_states
        llm.loaded.model.last_states = lambda *given: states(*given) * float("inf")  # type: ignore[method-assign]
        with pytest.raises(TaskFailed, match="the embedding of prompt 0 is not finite; "):
            llm.embed(drawn((4,)))
