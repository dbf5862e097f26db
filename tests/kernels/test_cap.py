"""Scores of attention that come near a cap and no further: of prompts, of steps and of shared texts, in C and in torch against
float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from h2o_flexgen.formats.kernel_table import MAX, SUM
from h2o_flexgen.kernels.decode_attention import KVSlots
from h2o_flexgen.kernels.operations import decode_attention, prompt_attention, shared_attention
from tests.kernels.variants import VARIANTS, used

LINKS = ["torch", *VARIANTS]
NEAR = {torch.float32: 1e-5, torch.bfloat16: 5e-2}
ROWS, KV_HEADS, GROUP, TOKENS, DIM = 2, 2, 3, 75, 40
CAPS = (0.5, 2.0, 50.0)


def drawn(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(tokens)
    q = (5.0 * torch.randn(ROWS, KV_HEADS * GROUP, tokens, DIM, generator=draw)).to(dtype)
    k, v = (torch.randn(ROWS, KV_HEADS, TOKENS, DIM, generator=draw).to(dtype) for _ in range(2))
    return q, k, v


def capped(scores: Tensor, cap: float | None) -> Tensor:
    return scores if cap is None else cap * (scores / cap).tanh()


def exact(q: Tensor, k: Tensor, v: Tensor, cap: float, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The outcome (rows, heads, tokens, dim), shares, and what all keys weigh together."""
    k, v = (each.double().repeat_interleave(GROUP, 1) for each in (k, v))
    scores = capped(q.double() @ k.transpose(2, 3) * DIM**-0.5, cap).masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v, scores.softmax(-1), scores.logsumexp(-1)


def by_kv_head(shares: Tensor, gathers: str) -> Tensor:
    grouped = shares.view(ROWS, KV_HEADS, -1, TOKENS)
    return grouped.amax(2) if gathers == MAX else grouped.sum(2)


@pytest.mark.parametrize("variant", LINKS)
@pytest.mark.parametrize("dtype", list(NEAR))
@pytest.mark.parametrize("cap", CAPS)
def test_prompts(variant: str, dtype: torch.dtype, cap: float) -> None:
    for window, held, gathers in ((None, 0, SUM), (9, 0, MAX), (None, 30, SUM), (20, 30, SUM)):
        new = TOKENS - held
        q, k, v = drawn(new, dtype)
        with used(variant):
            before, weights = torch.full((ROWS,), held), torch.ones(ROWS, new)
            out, got = prompt_attention(q, k, v, before, weights, None, gathers, window, cap)
        own, seen = torch.arange(new)[:, None] + held, torch.arange(TOKENS)
        hidden = (seen > own) | (seen <= own - (window or TOKENS))
        expected, shares, _ = exact(q, k, v, cap, hidden)
        torch.testing.assert_close(out.double(), expected.transpose(1, 2).flatten(2), atol=NEAR[dtype], rtol=0)
        assert got is not None
        torch.testing.assert_close(got.double(), by_kv_head(shares, gathers), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", LINKS)
@pytest.mark.parametrize("dtype", list(NEAR))
@pytest.mark.parametrize("cap", CAPS)
def test_steps_and_shared_texts(variant: str, dtype: torch.dtype, cap: float) -> None:
    q, k, v = drawn(1, dtype)
    held = torch.tensor([TOKENS, 21])
    hidden = (torch.arange(TOKENS) >= held[:, None])[:, None, None]
    mask = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)
    expected, shares, weigh = exact(q, k, v, cap, hidden)
    with used(variant):
        grouped = q.view(ROWS, KV_HEADS, GROUP, DIM)
        out, got = decode_attention(grouped, KVSlots(k), KVSlots(v), held, mask, None, SUM, cap)
        shared = shared_attention(q[0].transpose(0, 1), KVSlots(k[0]), KVSlots(v[0]), cap)
    torch.testing.assert_close(out.double(), expected.view(out.shape), atol=NEAR[dtype], rtol=0)
    assert got is not None
    torch.testing.assert_close(got.double(), by_kv_head(shares, SUM), atol=1e-2 if dtype != torch.float32 else 1e-5, rtol=0)
    torch.testing.assert_close(shared.values[0].double(), expected[0].transpose(0, 1), atol=1e-5, rtol=0)
    torch.testing.assert_close(shared.scores[0].double(), weigh[0].T, atol=1e-4, rtol=0)
