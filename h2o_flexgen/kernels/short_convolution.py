"""Short convolutions: each channel of a token is a sum of its own last few inputs, each times a weight of its place.

What a row keeps for its next token is its last inputs, (width - 1, channels), the oldest first, in fp32. It is changed in
place, unless tokens are on trial; rows of it may lie apart. Rows of tokens may be filled up, as `states.py` says. With C what
becomes of a channel of a row depends on nothing else.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.nn import functional

from h2o_flexgen.kernels.native import KINDS, NO_KIND, pointer, run, threads_for
from h2o_flexgen.kernels.raw_memory import address_of
from h2o_flexgen.kernels.states import lengths_place, state_places, with_neighbours


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    lengths: Tensor | None = None,
    is_activated: bool = True,
    is_trial: bool = False,
) -> Tensor:
    x, out = with_neighbours(x), torch.empty(x.shape, dtype=x.dtype)
    (rows, tokens, channels), width = x.shape, weight.shape[-1]
    assert state.shape == (rows, width - 1, channels) and state.dtype == torch.float32 and weight.numel() == width * channels
    assert bias is None or bias.shape == (channels,)
    place, state_row = state_places(state)
    given = _Convolution(
        *(address_of(x), pointer(weight), None if bias is None else pointer(bias)),
        *(place, pointer(out), lengths_place(lengths)),
        *(rows, tokens, channels, width, x.stride(0) * x.itemsize, x.stride(1) * x.itemsize, state_row),
        *(KINDS[x.dtype], KINDS[weight.dtype], NO_KIND if bias is None else KINDS[bias.dtype], is_activated, is_trial),
    )
    run("short_convolution", given, threads_for(x.numel() * width))
    return out


def short_convolution_twin(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    lengths: Tensor | None = None,
    is_activated: bool = True,
    is_trial: bool = False,
) -> Tensor:
    tokens, weight = x.shape[1], weight.flatten(1).float()
    seen = torch.cat((state, x.float()), dim=1)
    out = seen[:, :tokens] * weight[:, 0]
    for place in range(1, weight.shape[1]):
        out.addcmul_(seen[:, place : place + tokens], weight[:, place])
    out = out if bias is None else out.add_(bias.float())
    if not is_trial:
        state.copy_(_last_inputs(seen, state.shape[1], lengths))
    return (functional.silu(out, inplace=True) if is_activated else out).to(x.dtype)


class _Convolution(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "state", "out", "lengths")),
        *((name, ctypes.c_long) for name in ("rows", "tokens", "channels", "width", "x_row", "x_token", "state_row")),
        *((name, ctypes.c_int) for name in ("kind", "weight_kind", "bias_kind", "is_activated", "is_trial")),
    )


def _last_inputs(seen: Tensor, count: int, lengths: Tensor | None) -> Tensor:
    if lengths is None:
        return seen[:, seen.shape[1] - count :]
    places = lengths[:, None] + torch.arange(count, device=seen.device)
    return seen.gather(1, places[..., None].expand(-1, -1, seen.shape[2]))
