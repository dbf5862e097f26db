"""What a study counts is what transformers computes: probabilities, sparsity, accumulated scores, and what is held of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from h2o_flexgen.evaluation.study import readers
from h2o_flexgen.evaluation.study.heavy_hitters import HeavyHitterStudy, study
from h2o_flexgen.evaluation.study.readers import Attention, attention_in_blocks
from h2o_flexgen.llm import LLM
from tests.helpers import tiny
from tests.helpers.contract import distinct_prompts

KINDS = ("opt", "opt-350m", "llama-gqa", "gpt-oss-far", "qwen3", "neox-parallel", "neox-sequential")
TOKENS, PROMPT = 60, 13
TEXT = distinct_prompts((TOKENS,), seed=5)[0]
POLICIES = ("h2o", "tova", "local")

Attentions = NDArray[np.float64]  # (layers, heads, queries, keys)
Studied = tuple[HeavyHitterStudy, Attentions, Attentions]


@pytest.fixture(scope="module", params=KINDS)
def studied(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Studied:
    """A study, the probabilities that it saw, and those of transformers."""
    return _studied(request.param, tmp_path_factory.mktemp(request.param))


def _studied(kind: str, folder: Path) -> Studied:
    model: Any = tiny.save_tiny(kind, folder / "model", seed=2)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = torch.cat(model(torch.tensor([TEXT]), output_attentions=True).attentions).double().numpy()
    seen = np.zeros_like(expected)
    layers = iter(range(len(seen)))

    def recording(q: Tensor, k: Tensor, sink_scores: Tensor | None = None) -> list[Attention]:
        """In blocks that are far smaller than the text."""
        layer, blocks = next(layers), list(attention_in_blocks(q, k, 4 * len(q) * TOKENS * 7, sink_scores))
        for first, shares in blocks:
            queries, keys = shares.shape[2:]
            seen[layer, :, first : first + queries, :keys] = shares.flatten(0, 1).numpy()
        return blocks

    with pytest.MonkeyPatch.context() as patch, LLM(str(folder / "model"), dtype="float32", offload_dir=folder) as llm:
        patch.setattr(readers, "attention_in_blocks", recording)
        return study(llm, TEXT, POLICIES, 0.25, prompt_len=PROMPT), seen, expected


def test_probabilities_are_those_of_transformers(studied: Studied) -> None:
    _, seen, expected = studied
    np.testing.assert_allclose(seen, expected, atol=1e-5, rtol=0)
    np.testing.assert_allclose(seen.sum(-1), expected.sum(-1), atol=1e-5)
    assert (seen.sum(-1) < 1.0 + 1e-5).all()


def test_sparsity_counts_what_is_far_below_the_largest_of_a_row(studied: Studied) -> None:
    found, seen, _ = studied
    for layer, head in np.ndindex(seen.shape[:2]):
        small = visible = 0
        for query in range(TOKENS):
            row = seen[layer, head, query, : query + 1].astype(np.float32)
            small += int((row < np.float32(0.01) * row.max()).sum())
            visible += query + 1
        assert found.sparsity[layer, head] == pytest.approx(small / visible, abs=1e-6)
    assert 0 < found.sparsity.mean() < 1


def test_scores_are_column_sums_over_queries_and_the_heads_of_a_group(studied: Studied) -> None:
    found, _, expected = studied
    layers, kv_heads, tokens = found.scores.shape
    columns = expected.sum(2).reshape(layers, kv_heads, -1, tokens).sum(2)
    np.testing.assert_allclose(found.scores, columns, atol=1e-4, rtol=0)
    assert (np.diff(found.sorted_scores) <= 0).all()


def test_captured_is_the_attention_of_the_queries_behind_the_prompt_to_what_is_held(studied: Studied) -> None:
    found, _, expected = studied
    layers, kv_heads, _ = found.scores.shape
    grouped = expected.reshape(layers, kv_heads, -1, TOKENS, TOKENS).mean(2)
    assert found.names == ("oracle", *POLICIES)
    for name, gone in found.gone.items():
        for layer, head in np.ndindex(layers, kv_heads):
            held = 0.0
            for query in range(PROMPT, TOKENS):
                there = [key for key in range(query + 1) if key == query or gone[layer, head, key] > query]
                held += grouped[layer, head, query, there].sum()
            assert found.captured[name][layer, head] == pytest.approx(held / (TOKENS - PROMPT), abs=1e-5)


def test_the_oracle_holds_what_gets_most_in_the_whole_text(studied: Studied) -> None:
    found, _, _ = studied
    gone = found.gone["oracle"]
    for layer, head in np.ndindex(gone.shape[:2]):
        heaviest = set(np.argsort(-found.scores[layer, head])[: found.slots].tolist())
        assert set(np.flatnonzero(gone[layer, head] > TOKENS).tolist()) == heaviest
        others = [place for place in range(TOKENS) if place not in heaviest]
        assert gone[layer, head, others].tolist() == [max(PROMPT, place + 1) for place in others]
