"""What stands around states of rows: the sizes of their steps, and norms with a gate. In fp32 up to the outcome."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor
from torch.nn import functional

# -- step sizes ------------------------------------------------------------------------------------------------------------
# softplus(x + bias), no further than bounds; times a rate where there is one. So it is the logarithm of a decay.


def step_sizes_twin(
    x: Tensor,
    bias: Tensor | None,
    rates: Tensor | None = None,
    are_logs: bool = False,
    least: float = 0.0,
    most: float = inf,
) -> Tensor:
    wide = x.float() if bias is None else x.float() + bias.float()
    sizes = functional.softplus(wide).clamp_(least, most)
    if rates is None:
        return sizes
    return sizes.mul_(-rates.float().exp() if are_logs else rates.float())


# -- gated norm ------------------------------------------------------------------------------------------------------------
# RMS norm of each of several groups of a row, and a gate by silu, which comes before the norm or behind it.


def gated_norm_twin(x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int = 1, gate_first: bool = False) -> Tensor:
    wide, opened = x.float(), functional.silu(gate.float())
    if gate_first:
        wide = wide * opened
    of_groups = wide.unflatten(-1, (groups, -1))
    normed = of_groups * torch.rsqrt(of_groups.square().mean(-1, keepdim=True) + eps)
    made: Tensor = normed.flatten(-2).mul_(weight.float())
    return (made if gate_first else made.mul_(opened)).to(x.dtype)
