"""Offloaded texts equal resident ones: at the size of OPT-1.3B on a GPU, where copies take time, and with
a tiny model elsewhere. Tokens are drawn, so that last bits of logits count, from weights that are drawn as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen.llm import LLM
from h2o_flexgen.sampling.params import SamplingParams
from tests.helpers.contract import Checkpoints

RESIDENT = (100, 0, 100, 0, 100, 0)
OFFLOADED = {"on the host": (0, 100, 0, 100, 0, 100), "in part": (30, 70, 40, 60, 50, 50)}
PLANS: dict[str, dict[str, Any]] = {
    "full": {},
    "h2o": {"kv_policy": "h2o", "kv_budget": 0.3},
    "4 bits": {"weight_codec": "group4", "kv_codec": "group4"},
}
LARGE, SMALL = (256, 8), (24, 4)  # tokens of a prompt, and generated


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_offloaded_texts_are_those_of_a_resident_model(
    plan: dict[str, Any], any_device: str, checkpoints: Checkpoints, offload: Path
) -> None:
    is_large = any_device == "cuda"
    model = "facebook/opt-1.3b" if is_large else str(checkpoints.folder("opt"))
    prompt_len, gen_len = LARGE if is_large else SMALL
    prompts = [[2 + (7 * row + 13 * place) % 97 for place in range(prompt_len)] for row in range(8)]

    def texts(percent: tuple[float, ...]) -> list[list[int]]:
        options = {"dtype": "float16" if is_large else "float32", "tokenizer": "bytes", "offload_dir": offload, **plan}
        sizes = {"gpu_batch_size": 4, "num_gpu_batches": 2}
        with LLM(model, dummy_weights=True, device=any_device, percent=percent, **sizes, **options) as llm:
            params = SamplingParams(max_tokens=gen_len, temperature=1.0, ignore_eos=True)
            return [one.token_ids for one in llm.generate(prompts, params, seed=11)]

    expected = texts(RESIDENT)
    assert len({tuple(tokens) for tokens in expected}) == len(prompts), "texts differ, so that taking one for another is seen"
    for place, percent in OFFLOADED.items():
        assert texts(percent) == expected, place
