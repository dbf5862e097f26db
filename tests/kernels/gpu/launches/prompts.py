"""Attention over prompts, with sums, with one more key, and with a window and a cap. Triton has no products of blocks for GPUs
before Ampere."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_flexgen.formats.kernel_table import MAX, SUM
from h2o_flexgen.kernels.gpu.prompt_attention import prompt_attention
from h2o_flexgen.kernels.more_keys import More
from tests.kernels.gpu.launch import Launch

ROWS, HEADS, KV_HEADS, TOKENS, HELD = 4, 32, 8, 512, 64
SINCE = 80  # the capability of Ampere


def made(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def attended(
    dim: int, more: bool, dtype: torch.dtype, gathers: str, window: int | None = None, cap: float | None = None
) -> None:
    q = made(ROWS, TOKENS, HEADS, dim, dtype=dtype).transpose(1, 2)
    k = made(ROWS, HELD + TOKENS, KV_HEADS, dim, dtype=dtype).transpose(1, 2)
    wide = (made(ROWS, TOKENS, HEADS, dtype=torch.float32), made(ROWS, TOKENS, HEADS, dim, dtype=torch.float32))
    weights = made(ROWS, TOKENS, dtype=torch.float32)
    before, elsewhere = made(ROWS, dtype=torch.int64), More(*wide) if more else None
    prompt_attention(q, k, k, before, weights, elsewhere, gathers, window, cap)


WIDE = {"attend_prompt": 16, "gather_columns": 16}
NARROW = {"attend_prompt": 4, "gather_columns": 4}
LAUNCHES = (
    Launch("heads of 128", lambda: attended(128, True, torch.float16, MAX), 192, WIDE, NARROW, SINCE, is_rare=True),
    Launch("heads of 256, capped", lambda: attended(256, False, torch.bfloat16, SUM, 128, 50.0), 255, WIDE, NARROW, SINCE),
)
