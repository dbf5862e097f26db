"""Short convolutions: each channel of a token is a sum of its own last few inputs, each times a weight of its place.

What a row keeps for its next token is its last inputs, (width - 1, channels), the oldest first, in fp32. It is changed in
place; rows of it may lie apart. Rows of tokens may be filled up, as `states.py` says.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def short_convolution_twin(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, lengths: Tensor | None = None, is_activated: bool = True
) -> Tensor:
    tokens, weight = x.shape[1], weight.flatten(1).float()
    seen = torch.cat((state, x.float()), dim=1)
    out = seen[:, :tokens] * weight[:, 0]
    for place in range(1, weight.shape[1]):
        out.addcmul_(seen[:, place : place + tokens], weight[:, place])
    out = out if bias is None else out.add_(bias.float())
    state.copy_(_last_inputs(seen, state.shape[1], lengths))
    return (functional.silu(out, inplace=True) if is_activated else out).to(x.dtype)


def _last_inputs(seen: Tensor, count: int, lengths: Tensor | None) -> Tensor:
    if lengths is None:
        return seen[:, seen.shape[1] - count :]
    places = lengths[:, None] + torch.arange(count, device=seen.device)
    return seen.gather(1, places[..., None].expand(-1, -1, seen.shape[2]))
