"""States of rows: the heads of Qwen3.6-35B-A3B, Kimi-Linear 48B-A3B and Granite 4 H, their convolutions and their norms."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_flexgen.kernels.gpu.norms import gated_norm
from h2o_flexgen.kernels.gpu.states import gated_delta, selective_scan, short_convolution
from tests.kernels.gpu.launch import Launch

ROWS = 4


def made(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def delta(tokens: int) -> None:
    q, k = (made(ROWS, tokens, 16, 128) for _ in range(2))
    decay, state = made(ROWS, tokens, 32, dtype=torch.float32), made(ROWS, 32, 128, 128, dtype=torch.float32)
    gated_delta(q, k, made(ROWS, tokens, 32, 128), decay, made(ROWS, tokens, 32), state, made(ROWS, dtype=torch.int64))


def delta_by_value(tokens: int) -> None:
    q, k, v = (made(ROWS, tokens, 32, 128) for _ in range(3))
    decay, state = made(ROWS, tokens, 32, 128, dtype=torch.float32), made(ROWS, 32, 128, 128, dtype=torch.float32)
    gated_delta(q, k, v, decay, made(ROWS, tokens, 32), state, made(ROWS, dtype=torch.int64))


def scan() -> None:
    x, b, c = made(ROWS, 1, 48, 64), made(ROWS, 1, 1, 128), made(ROWS, 1, 1, 128)
    rates, state = made(48, dtype=torch.float32), made(ROWS, 48, 128, 64, dtype=torch.float32)
    selective_scan(x, made(ROWS, 1, 48, dtype=torch.float32), rates, b, c, rates, state, None, are_logs=True)


def convolved(tokens: int) -> None:
    x, state = made(ROWS, tokens, 8192), made(ROWS, 3, 8192, dtype=torch.float32)
    short_convolution(x, made(8192, 1, 4), made(8192), state, made(ROWS, dtype=torch.int64))


def normed() -> None:
    x = made(ROWS, 1, 32, 128)
    gated_norm(x, x, made(128, dtype=torch.float32), 1e-6)


STATE, CONVOLUTION = {"pass_state_kernel": 16}, {"convolve_kernel": 16}
LAUNCHES = (
    Launch("delta rule of a prompt", lambda: delta(512), 144, STATE, kernels=1),
    Launch("delta rule by values of keys", lambda: delta_by_value(512), 144, STATE, kernels=1, is_rare=True),
    Launch("scan of a step", scan, 144, STATE, kernels=1),
    Launch("convolution of a prompt", lambda: convolved(512), 168, CONVOLUTION, kernels=1),
    Launch("convolution of a step", lambda: convolved(1), 64, CONVOLUTION, kernels=1),
    Launch("gated norm", normed, 64, {"norm_group": 8}, kernels=1),
)
