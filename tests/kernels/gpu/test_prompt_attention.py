"""Attention over prompts in Triton, and what keys got, are torch's up to the last bits."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from h2o_flexgen.formats.kernel_table import MAX, SUM
from h2o_flexgen.kernels.gpu.prompt_attention import prompt_attention
from h2o_flexgen.kernels.more_keys import More
from h2o_flexgen.kernels.prompt_attention import prompt_attention_twin
from tests.helpers.pairwise import most_of
from tests.kernels.gpu.test_cap import CAPS

# shares are rounded before they meet values: of the size of values, which is about 1
LAST_BITS = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}


Given = tuple[Tensor, Tensor, Tensor, Tensor, "Tensor | None", "More | None"]


class Prompts(NamedTuple):
    """Rows, KV heads, heads of a group, new tokens, earlier keys, width of a head."""

    rows: int
    kv_heads: int
    group: int
    tokens: int
    held: int
    dim: int

    def made(self, dtype: torch.dtype, weighted: str, more: str) -> Given:
        draw = torch.Generator().manual_seed(sum(self))
        rows, tokens, heads, keys = self.rows, self.tokens, self.kv_heads * self.group, self.held + self.tokens
        q = 2 * torch.randn(rows, tokens, heads, self.dim, generator=draw).transpose(1, 2).to(dtype)
        k, v = (torch.randn(rows, keys, self.kv_heads, self.dim, generator=draw).transpose(1, 2).to(dtype) for _ in range(2))
        before = torch.randint(0, self.held + 1, (rows,), generator=draw)
        for row, count in enumerate(before.tolist()):  # whatever lies where a row has no key
            k[row, :, count : self.held], v[row, :, count : self.held] = torch.nan, torch.nan
        lengths = torch.randint(1, tokens + 1, (rows, 1), generator=draw)
        new = torch.arange(tokens)
        weights = {
            "none": None,
            "texts": (new < lengths) * torch.rand(rows, tokens, generator=draw),
            "last": (new == lengths - 1).float(),
            "nobody": torch.zeros(rows, tokens),
        }[weighted]
        scores, values = (torch.randn(rows, tokens, heads, width, generator=draw) for width in (1, self.dim))
        elsewhere = More(3 * scores[..., 0], None if more == "sinks" else values)
        elsewhere.scores[0, 0] = -torch.inf
        return q, k, v, before, weights, elsewhere if more else None


def expected(
    q: Tensor, k: Tensor, v: Tensor, before: Tensor, weights: Tensor | None, more: More | None, *how: Any
) -> tuple[Tensor, Tensor | None]:
    """Torch's, of the same values in fp32."""
    return prompt_attention_twin(*(x.float().nan_to_num() for x in (q, k, v)), before, weights, more, *how)


CASES = [
    (Prompts(2, 2, 1, 70, 0, 16), "texts", ""),
    (Prompts(2, 1, 3, 70, 30, 20), "last", "sinks"),
    (Prompts(3, 1, 2, 9, 40, 64), "texts", "texts"),
    (Prompts(1, 1, 1, 1, 0, 8), "nobody", ""),
    (Prompts(2, 1, 2, 130, 3, 24), "none", "texts"),
    (Prompts(1, 1, 1, 33, 0, 130), "texts", ""),
]


CHOICES = {("prompts", "weighted", "more"): CASES, "dtype": list(LAST_BITS), "window": (None, 1, 40), "cap": CAPS}


PLAINEST = [
    dict(zip(("prompts", "weighted", "more"), case), dtype=dtype, window=None, cap=None)
    for case, dtype in zip(CASES, (torch.float32, torch.float16, torch.float32, torch.float32, torch.float16, torch.float32))
]  # what most models ask: pairs alone would leave it to bfloat16, whose outcomes may be off by more


@pytest.mark.parametrize("values", [*PLAINEST, *most_of(CHOICES, share=0.6)])
def test_outcomes_and_sums_are_torchs(values: dict[str, Any], gpu: torch.device) -> None:
    names = "prompts", "weighted", "more", "dtype", "window", "cap"
    prompts, weighted, more, dtype, window, cap = (values[name] for name in names)
    given = prompts.made(dtype, weighted, more)
    there = [
        x if x is None else More(*(None if y is None else y.to(gpu) for y in x)) if isinstance(x, More) else x.to(gpu)
        for x in given
    ]
    for gathers in (SUM,) if weighted == "none" else (SUM, MAX):
        out, got = prompt_attention(*there, gathers, window, cap)  # type: ignore[arg-type]
        expected_out, expected_got = expected(*given, gathers, window, cap)
        torch.testing.assert_close(out.float().cpu(), expected_out, rtol=LAST_BITS[dtype], atol=LAST_BITS[dtype])
        assert out.dtype == dtype and (got is None) == (expected_got is None)
        if got is not None:
            torch.testing.assert_close(got.cpu(), expected_got, rtol=1e-5, atol=1e-5)
            alone, _ = prompt_attention(*there[:4], None, there[5], SUM, window, cap)  # type: ignore[arg-type]
            assert torch.equal(out, alone)


def test_a_row_has_the_same_bits_in_any_company(gpu: torch.device) -> None:
    q, k, v, before, weights, _ = Prompts(3, 2, 1, 20, 0, 16).made(torch.float32, "texts", "")
    assert weights is not None
    some = [x.to(gpu) for x in (q, k, v, before, weights)]
    for together, alone in zip(prompt_attention(*some), prompt_attention(*(x[1:2] for x in some))):
        assert together is not None and alone is not None
        assert torch.equal(together[1:2], alone)


def test_what_is_no_number_stays_so_and_in_its_row(gpu: torch.device) -> None:
    q, k, v, before, weights, _ = Prompts(2, 1, 1, 5, 0, 16).made(torch.float32, "texts", "")
    q[0, 0, 3, 2] = torch.nan
    out, sums = prompt_attention(*(x.to(gpu) for x in (q, k, v, before, weights)))  # type: ignore[union-attr]
    assert sums is not None and weights is not None and weights[0, 3] > 0
    assert out.isnan().all(-1).tolist() == [[False, False, False, True, False], [False] * 5]
    assert sums.isnan().tolist() == [[[True] * 4 + [False]], [[False] * 5]]  # the keys that this query sees
    _, highest = prompt_attention(*(x.to(gpu) for x in (q, k, v, before, weights)), gathers=MAX)  # type: ignore[arg-type]
    assert highest is not None and torch.equal(highest.isnan(), sums.isnan())
