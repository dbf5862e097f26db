"""States of rows that tokens pass one after the other, for GPUs: the gated delta rule, Mamba-2's scan, and short convolutions.

A program has some columns of a head's state in registers: they depend on no other columns. So memory is read and written once,
whatever the number of tokens, and a prompt has the bits of its tokens one by one. It differs from the twin in the last bits.
In a short convolution a program has some channels of a row, and some of its tokens at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from h2o_flexgen.kernels.gpu.launching import Launch, Seen, Type, kept_by_shape, launcher, seen, type_of
from h2o_flexgen.kernels.states import KEPT_IN, KEY_EPS, with_neighbours

COLUMNS = 8  # of a program
VALUES_OF_A_WARP = 1024  # so that a sum over keys is within one warp where these have 128 values


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    lengths: Tensor | None = None,
    is_tiled: bool = False,
    is_trial: bool = False,
) -> Tensor:
    by_value = decay.dim() == v.dim()
    decay = with_neighbours(decay) if by_value else decay
    forms = {"CORRECTS": True, "BY_VALUE": by_value, "IS_TILED": is_tiled, "ARE_LOGS": False, "IS_TRIAL": is_trial}
    return _passed(q, k, v, decay, beta, None, None, state, lengths, **forms)


def selective_scan(
    x: Tensor,
    steps: Tensor,
    rates: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor | None,
    state: Tensor,
    lengths: Tensor | None = None,
    are_logs: bool = False,
    is_trial: bool = False,
) -> Tensor:
    forms = {"CORRECTS": False, "BY_VALUE": False, "IS_TILED": False, "ARE_LOGS": are_logs, "IS_TRIAL": is_trial}
    return _passed(c, b, x, steps, None, rates, skip, state, lengths, **forms)


def _passed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sizes: Tensor,
    betas: Tensor | None,
    rates: Tensor | None,
    skips: Tensor | None,
    state: Tensor,
    lengths: Tensor | None,
    **forms: bool,
) -> Tensor:
    q, k, v, out = *map(with_neighbours, (q, k, v)), torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if out.numel():
        optional = betas, rates, skips, lengths
        known = seen(sizes if betas is None else betas), *map(type_of, optional[1:])
        launch = _pass_of(seen(q), seen(k), seen(v), seen(sizes), *known, seen(state), *forms.items())
        launch(q, k, v, sizes, *(sizes if each is None else each for each in optional), state, out)
    return out


@kept_by_shape
def _pass_of(
    q: Seen,
    k: Seen,
    v: Seen,
    sizes: Seen,
    betas: Seen,
    rates: Type,
    skips: Type,
    lengths: Type,
    state: Seen,
    *forms: tuple[str, bool],
) -> Launch:
    (rows, tokens, heads, width), (_, _, key_heads, keys) = v[0], k[0]
    assert state[0] == (rows, heads, keys, width) and state[1][1:] == (keys * width, width, 1) and state[2] in KEPT_IN
    strides = (stride for each in (q, k, v, sizes, betas) for stride in each[1][:3])
    room, columns = triton.next_power_of_2(keys), min(COLUMNS, triton.next_power_of_2(width))
    has = {"HAS_RATES": rates is not None, "HAS_SKIPS": skips is not None, "HAS_LENGTHS": lengths is not None}
    return launcher(
        pass_state_kernel,
        (rows * heads, triton.cdiv(width, columns)),
        (*strides, state[1][0], tokens, heads, key_heads, keys**-0.5, KEY_EPS),
        **dict(forms),
        **has,
        KEYS=keys,
        VALUES=width,
        ROOM=room,
        COLUMNS=columns,
        num_warps=max(1, min(16, room * columns // VALUES_OF_A_WARP)),
    )


@triton.jit
def _key_of(places: tl.tensor, is_there: tl.tensor, scale: tl.tensor, eps: tl.tensor, IS_NORMED: tl.constexpr) -> tl.tensor:
    value = tl.load(places, mask=is_there, other=0.0).to(tl.float32)
    if IS_NORMED:
        value = value * (tl.rsqrt(tl.sum(value * value, 0) + eps) * scale)
    return value


@triton.jit(do_not_specialize=["tokens"])
def pass_state_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, sizes: tl.tensor, betas: tl.tensor, rates: tl.tensor, skips: tl.tensor,
    lengths: tl.tensor, state: tl.tensor, out: tl.tensor,
    q_row: tl.tensor, q_token: tl.tensor, q_head: tl.tensor, k_row: tl.tensor, k_token: tl.tensor, k_head: tl.tensor,
    v_row: tl.tensor, v_token: tl.tensor, v_head: tl.tensor, size_row: tl.tensor, size_token: tl.tensor, size_head: tl.tensor,
    beta_row: tl.tensor, beta_token: tl.tensor, beta_head: tl.tensor,
    state_row: tl.tensor, tokens: tl.tensor, heads: tl.tensor, key_heads: tl.tensor, scale: tl.tensor, eps: tl.tensor,
    CORRECTS: tl.constexpr, BY_VALUE: tl.constexpr, IS_TILED: tl.constexpr, ARE_LOGS: tl.constexpr, IS_TRIAL: tl.constexpr,
    HAS_RATES: tl.constexpr, HAS_SKIPS: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, ROOM: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    of_rows = tl.program_id(0).to(tl.int64)
    row, head = of_rows // heads, of_rows % heads
    key_head = head % key_heads if IS_TILED else head // (heads // key_heads)
    key, column = tl.arange(0, ROOM), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_key, is_column = key < KEYS, column < VALUES
    is_there = is_key[:, None] & is_column[None, :]
    places = state + row * state_row + (head * KEYS + key[:, None]) * VALUES + column[None, :]
    own = tl.load(places, mask=is_there, other=0.0).to(tl.float32)
    rate = 1.0
    if HAS_RATES:
        rate = tl.load(rates + head).to(tl.float32)
        rate = -tl.exp(rate) if ARE_LOGS else rate
    count = tokens
    if HAS_LENGTHS:
        count = tl.load(lengths + row).to(tl.int32)
    for number in range(count):
        at = tl.cast(number, tl.int64)
        query = _key_of(q + row * q_row + at * q_token + key_head * q_head + key, is_key, scale, eps, CORRECTS)
        own_key = _key_of(k + row * k_row + at * k_token + key_head * k_head + key, is_key, 1.0, eps, CORRECTS)
        value = tl.load(v + row * v_row + at * v_token + head * v_head + column, mask=is_column, other=0.0).to(tl.float32)
        of_token = sizes + row * size_row + at * size_token + head * size_head
        if BY_VALUE:
            own = own * tl.exp(tl.load(of_token + key, mask=is_key, other=0.0))[:, None]
        else:
            size = tl.load(of_token).to(tl.float32)
            own = own * tl.exp(size * rate)
        if CORRECTS:
            beta = tl.load(betas + row * beta_row + at * beta_token + head * beta_head).to(tl.float32)
            added = (value - tl.sum(own * own_key[:, None], 0)) * beta
        else:
            added = value * size
        own = own + own_key[:, None] * added[None, :]
        read = tl.sum(own * query[:, None], 0)
        own = own.to(state.dtype.element_ty).to(tl.float32)  # as it is kept
        if HAS_SKIPS:
            read += value * tl.load(skips + head).to(tl.float32)
        made = out + ((row * tokens + at) * heads + head) * VALUES + column
        tl.store(made, read.to(out.dtype.element_ty), mask=is_column)
    for number in range(count, tokens):
        nothing = out + ((row * tokens + number) * heads + head) * VALUES + column
        tl.store(nothing, tl.zeros((COLUMNS,), out.dtype.element_ty), mask=is_column)
    if not IS_TRIAL:
        tl.store(places, own.to(state.dtype.element_ty), mask=is_there)


# -- short convolutions ----------------------------------------------------------------------------------------------------

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
        launch = _convolution_of(
            seen(x), width, weight.dtype, seen(state), type_of(bias), type_of(lengths), is_activated, is_trial
        )
        launch(x, weight, weight if bias is None else bias, state, x if lengths is None else lengths, out)
    return out


@kept_by_shape
def _convolution_of(
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
