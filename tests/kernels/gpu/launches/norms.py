"""RMS norm of a step, and of the heads of a prompt."""

from __future__ import annotations

import torch

from h2o_flexgen.kernels.gpu.norms import rms_norm
from tests.kernels.gpu.launch import Launch


def normed(*shape: int) -> None:
    x = torch.empty(shape, dtype=torch.float16, device="meta")
    rms_norm(x, x[..., 0, :].flatten()[: shape[-1]], 1e-6)


LAUNCHES = (
    Launch("8192 wide", lambda: normed(8, 8192), loads={"norm_row": 16}),
    Launch("heads", lambda: normed(4, 512, 8, 128), registers=64),
)
