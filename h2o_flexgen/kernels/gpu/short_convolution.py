"""Short convolutions for GPUs: a program has some channels of a row, and some of its tokens at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from h2o_flexgen.kernels.gpu.launching import Launch, Seen, Type, kept_by_shape, launcher, seen, type_of
from h2o_flexgen.kernels.states import with_neighbours

CHANNELS, TOKENS = 128, 16  # that a program has at once


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    lengths: Tensor | None = None,
    is_activated: bool = True,
    is_trial: bool = False,
) -> Tensor:
    x, weight, out = with_neighbours(x), weight.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        width = weight.shape[-1]
        launch = _launch(seen(x), width, weight.dtype, seen(state), type_of(bias), type_of(lengths), is_activated, is_trial)
        launch(x, weight, weight if bias is None else bias, state, x if lengths is None else lengths, out)
    return out


@kept_by_shape
def _launch(
    x: Seen,
    width: int,
    of_weights: torch.dtype,
    state: Seen,
    bias: Type,
    lengths: Type,
    is_activated: bool,
    is_trial: bool,
) -> Launch:
    (rows, tokens, channels), (row, token, _), _ = x
    assert state[0] == (rows, width - 1, channels) and state[1][1:] == (channels, 1) and state[2] == torch.float32
    return launcher(
        convolve_kernel,
        (triton.cdiv(channels, CHANNELS), rows),
        (row, token, state[1][0], tokens, channels),
        WIDTH=width,
        ROOM=triton.next_power_of_2(width),
        HAS_BIAS=bias is not None,
        HAS_LENGTHS=lengths is not None,
        IS_ACTIVATED=is_activated,
        IS_TRIAL=is_trial,
        TOKENS=1 if tokens == 1 else TOKENS,
        CHANNELS=CHANNELS,
    )


@triton.jit
def _inputs(
    x: tl.tensor, state: tl.tensor, place: tl.tensor, channel: tl.tensor, behind: tl.tensor, token: tl.tensor,
    channels: tl.tensor, WIDTH: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The inputs (places, channels) that stand at some places: those of the state come first, then those of tokens."""
    is_channel = (channel < channels)[None, :]
    is_kept, at = place < WIDTH - 1, place - (WIDTH - 1)
    kept = tl.load(state + place[:, None] * channels + channel[None, :], mask=is_kept[:, None] & is_channel, other=0.0)
    is_new = (at >= 0) & (at < behind)
    new = tl.load(x + at[:, None].to(tl.int64) * token + channel[None, :], mask=is_new[:, None] & is_channel, other=0.0)
    return kept + new.to(tl.float32)


@triton.jit(do_not_specialize=["tokens"])
def convolve_kernel(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, state: tl.tensor, lengths: tl.tensor, out: tl.tensor,
    row_stride: tl.tensor, token_stride: tl.tensor, state_row: tl.tensor, tokens: tl.tensor, channels: tl.tensor,
    WIDTH: tl.constexpr, ROOM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    IS_ACTIVATED: tl.constexpr, IS_TRIAL: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
) -> None:  # fmt: skip
    row, channel = tl.program_id(1).to(tl.int64), tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < channels
    own, own_state = x + row * row_stride, state + row * state_row
    count = tokens
    if HAS_LENGTHS:
        count = tl.load(lengths + row).to(tl.int32)
    first = tl.zeros((CHANNELS,), tl.float32)
    if HAS_BIAS:
        first = tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)
    for start in range(0, tokens, TOKENS):
        at = start + tl.arange(0, TOKENS)
        sums = tl.zeros((TOKENS, CHANNELS), tl.float32) + first[None, :]
        for place in tl.static_range(WIDTH):
            inputs = _inputs(own, own_state, at + place, channel, count, token_stride, channels, WIDTH)
            factor = tl.load(weight + channel * WIDTH + place, mask=is_channel, other=0.0).to(tl.float32)
            sums += inputs * factor[None, :]
        if IS_ACTIVATED:
            sums = sums / (1.0 + tl.exp(-sums))
        made = tl.where((at < count)[:, None], sums, 0.0).to(out.dtype.element_ty)
        places = out + (row * tokens + at[:, None]) * channels + channel[None, :]
        tl.store(places, made, mask=(at < tokens)[:, None] & is_channel[None, :])
    if WIDTH > 1 and not IS_TRIAL:
        last = tl.arange(0, ROOM)
        kept = _inputs(own, own_state, count + last, channel, count, token_stride, channels, WIDTH)
        tl.debug_barrier()  # all threads have read what is overwritten now
        stored = (last < WIDTH - 1)[:, None] & is_channel[None, :]
        tl.store(own_state + last[:, None] * channels + channel[None, :], kept, mask=stored)
