"""The rotation of heads: pairs (j, j + half) of a head's first 2 * half values are turned, the rest stays.

How far a position is turned is the same in all layers, so sines and cosines are made once for a step. Each product is rounded
to the type of the values, as torch does it, so a kernel gives the same bits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Turn(NamedTuple):
    """Cosines and sines of the pairs of each token's heads, in the type of the values. (rows, tokens, 1, half)"""

    cos: Tensor
    sin: Tensor


def rotate_twin(x: Tensor, turn: Turn) -> Tensor:
    cos, sin = turn
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.sub(first * cos, second * sin, out=turned[..., :half])
    torch.add(second * cos, first * sin, out=turned[..., half : 2 * half])
    turned[..., 2 * half :] = x[..., 2 * half :]
    return turned
