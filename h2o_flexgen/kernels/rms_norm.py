"""RMS norm: computed in fp32 and rounded before the weight is applied, the order that models with it were trained with."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm_twin(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype).mul_(weight)
