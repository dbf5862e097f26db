"""States of rows that stay as large as they are, and what each token makes of them: the gated delta rule, Mamba-2's scan, and
short convolutions.

A head's state is a matrix (key width, value width) in fp32. A token fades it, adds to it what is to be found under the token's
key, and reads from it what is found under the token's query. The delta rule adds only what is not found there yet. By that rule
a token may fade each value of a key, which is a row of the matrix, by a number of its own.

Rows may be filled up behind their last tokens: `lengths` (rows,), int64, says how many tokens of each are real. A state is then
that behind the last one. States are changed in place. Rows of them may lie apart, their heads may not.

In C tokens pass a state one by one, so that a prompt has the bits of its tokens, in whatever pieces it comes. What becomes of a
row depends on nothing but the row. Torch takes the tokens of a prompt chunk by chunk, with products of matrices.

A state may be kept in bfloat16, which takes half the memory and half the traffic. A token then works in fp32, and what it
leaves is rounded. So tokens of one call are taken one by one, in torch too. Tokens on trial leave a state as it was.

In a short convolution each channel of a token is a sum of its own last few inputs, each times a weight of its place. What a row
keeps for its next token is its last inputs, (width - 1, channels), the oldest first, in fp32. With C what becomes of a channel
of a row depends on nothing else.

Around states stand the sizes of their steps, and norms with a gate. These are computed in fp32 up to the outcome.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from h2o_flexgen.formats.kernel_sizes import STATE_CHUNK
from h2o_flexgen.kernels.native import KINDS, NO_KIND, ValuePlaces, pointer, run, threads_for
from h2o_flexgen.kernels.raw_memory import address_of
from h2o_flexgen.kernels.row_functions import in_rows

KEPT_IN = torch.float32, torch.bfloat16  # the types of a state
KEY_EPS = 1e-6  # is added to the square of a key's length, and of a query's
FEWER = 8  # times as few tokens are taken at once where each value of a key fades by itself: each pair has a number for each


# -- gated delta rule ------------------------------------------------------------------------------------------------------


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
    q, k, v, out = *map(with_neighbours, (q, k, v)), torch.empty(v.shape, dtype=v.dtype)
    by_value = decay.dim() == v.dim()
    assert not by_value or (decay.dtype == torch.float32 and decay.shape[2:] == (v.shape[2], k.shape[-1]))
    decay = with_neighbours(decay) if by_value else decay  # by its name: places keep an address, and no tensor
    fading = _by_heads(decay) if by_value else _of_each(decay)
    of_tokens = *map(_by_heads, (q, k, v)), fading, _of_each(beta), HeadNumbers.of(None), HeadNumbers.of(None)
    given = _Passing(*of_tokens, corrects=True, by_value=by_value, is_tiled=is_tiled, is_trial=is_trial)
    _pass_states(v, q, state, given, out, lengths)
    return out


def gated_delta_twin(
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
    heads, scale, out = v.shape[2], q.shape[-1] ** -0.5, torch.empty(v.shape, dtype=v.dtype, device=v.device)
    state = state.clone() if is_trial else state
    for part in _chunks(v, state, FEWER if decay.dim() == v.dim() else 1):
        there = _there(v, part, lengths)
        queries, keys = (_of_length_one(_by_head(each[:, part], heads, is_tiled)) for each in (q, k))
        fading, shares = (_only(each[:, part], there) for each in (decay, beta))
        tokens = _Tokens(queries.mul_(scale), keys, _by_head(v[:, part], heads), fading, shares)
        out[:, part] = _passed(tokens, state).transpose(1, 2)
    return out


# -- Mamba-2 ---------------------------------------------------------------------------------------------------------------


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
    x, b, c, out = *map(with_neighbours, (x, b, c)), torch.empty(x.shape, dtype=x.dtype)
    of_tokens = *map(_by_heads, (c, b, x)), _of_each(steps), ValuePlaces(), HeadNumbers.of(rates), HeadNumbers.of(skip)
    _pass_states(x, b, state, _Passing(*of_tokens, are_logs=are_logs, is_trial=is_trial), out, lengths)
    return out


def selective_scan_twin(
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
    heads, out = x.shape[2], torch.empty(x.shape, dtype=x.dtype, device=x.device)
    of_size_one = (-rates.float().exp() if are_logs else rates.float())[:, None]
    state = state.clone() if is_trial else state
    for part in _chunks(x, state):
        sizes, wide = _only(steps[:, part], _there(x, part, lengths)), _by_head(x[:, part], heads)
        q, k = (_by_head(each[:, part], heads) for each in (c, b))
        read = _passed(_Tokens(q, k, wide * sizes[..., None], sizes * of_size_one), state)
        out[:, part] = (read if skip is None else read.addcmul_(wide, skip.float()[:, None, None])).transpose(1, 2)
    return out


# -- both ------------------------------------------------------------------------------------------------------------------


def _pass_states(values: Tensor, keys: Tensor, state: Tensor, given: _Passing, out: Tensor, lengths: Tensor | None) -> None:
    (rows, tokens, heads, width), (key_heads, key_width) = values.shape, keys.shape[2:]
    assert state.shape == (rows, heads, key_width, width) and heads % key_heads == 0
    given.state, given.state_row = state_places(state)
    given.state_kind = KINDS[state.dtype]
    given.out, given.lengths = pointer(out), lengths_place(lengths)
    given.rows, given.tokens, given.heads, given.key_heads = rows, tokens, heads, key_heads
    given.key_width, given.value_width = key_width, width
    run("pass_states", given, threads_for(state.numel() * tokens))


def _by_heads(x: Tensor) -> ValuePlaces:
    return ValuePlaces.of(x.transpose(1, 2), KINDS[x.dtype])


def _of_each(x: Tensor) -> ValuePlaces:
    """Numbers of tokens (rows, tokens, heads)."""
    return _by_heads(x.unsqueeze(-1))


def state_places(state: Tensor) -> tuple[int, int]:
    """The address of a state that is written, and the bytes from one row to the next."""
    assert state.dtype in KEPT_IN and (not len(state) or state[0].is_contiguous())
    return address_of(state, writes=True), state.stride(0) * state.itemsize


def lengths_place(lengths: Tensor | None) -> int | None:
    assert lengths is None or lengths.dtype == torch.int64
    return None if lengths is None else pointer(lengths)


def with_neighbours(x: Tensor) -> Tensor:
    """Values of which the last ones lie side by side; copied only where they do not."""
    return x if x.stride(-1) == 1 else x.contiguous()


class HeadNumbers(ctypes.Structure):
    """A number of each head, or none."""

    _fields_ = (("data", ctypes.c_void_p), ("kind", ctypes.c_int))

    @classmethod
    def of(cls, numbers: Tensor | None) -> HeadNumbers:
        return cls(None, NO_KIND) if numbers is None else cls(pointer(numbers), KINDS[numbers.dtype])


class _Passing(ctypes.Structure):
    _fields_ = (
        *((name, ValuePlaces) for name in ("q", "k", "v", "sizes", "betas")),
        *((name, HeadNumbers) for name in ("rates", "skips")),
        *((name, ctypes.c_void_p) for name in ("state", "out", "lengths")),
        *((name, ctypes.c_long) for name in ("rows", "tokens", "heads", "key_heads", "key_width", "value_width", "state_row")),
        *((name, ctypes.c_int) for name in ("corrects", "by_value", "is_tiled", "are_logs", "state_kind", "is_trial")),
    )


class _Tokens(NamedTuple):
    """What tokens bring: (rows, heads, tokens, width) or (rows, heads, tokens), in fp32."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor  # its logarithm, (rows, heads, tokens), or (rows, heads, tokens, key width)
    beta: Tensor | None = None  # how much of what is not found is added; None: all of it is added, whatever is found


def _chunks(x: Tensor, state: Tensor, fewer: int = 1) -> Iterator[slice]:
    """The tokens that pass a state together: one, where what each leaves is rounded."""
    together = STATE_CHUNK // fewer if state.dtype == torch.float32 else 1
    return (slice(first, first + together) for first in range(0, x.shape[1], together))


def _by_head(x: Tensor, heads: int, is_tiled: bool = False) -> Tensor:
    """(rows, tokens, some of the heads, width) as (rows, heads, tokens, width), in fp32. Each head serves those that follow one
    another or, tiled, those that are as far apart as there are some."""
    wide, each = x.float().transpose(1, 2), heads // x.shape[2]
    return wide.repeat(1, each, 1, 1) if is_tiled else wide.repeat_interleave(each, dim=1)


def _of_length_one(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + KEY_EPS)


def _there(x: Tensor, part: slice, lengths: Tensor | None) -> Tensor | None:
    """The tokens (rows, 1, tokens) of a part that are real; None: all."""
    if lengths is None:
        return None
    return (torch.arange(x.shape[1], device=x.device)[part] < lengths[:, None])[:, None]


def _only(x: Tensor, there: Tensor | None) -> Tensor:
    """Numbers of tokens (rows, tokens, heads, ...) as (rows, heads, tokens, ...); zeros where no token is, which then changes
    nothing."""
    wide = x.float().transpose(1, 2)
    return wide if there is None else wide.masked_fill(~there.view(*there.shape, *[1] * (x.dim() - 3)), 0.0)


def _passed(tokens: _Tokens, state: Tensor) -> Tensor:
    """What tokens read: (rows, heads, tokens, value width)."""
    wide = state.float()  # itself, if it is as wide
    chunk = _chunk if tokens.decay.dim() == 3 else _chunk_by_values
    read = _step(tokens, wide) if tokens.q.shape[2] == 1 else chunk(tokens, wide)
    if wide is not state:
        state.copy_(wide)
    return read


def _step(tokens: _Tokens, state: Tensor) -> Tensor:
    q, k, v, decay, beta = tokens
    state.mul_(decay.exp()[..., None] if decay.dim() == 3 else decay.exp().transpose(2, 3))
    added = v if beta is None else (v - k @ state) * beta[..., None]
    state.add_(k.transpose(2, 3) * added)
    return q @ state


def _chunk(tokens: _Tokens, state: Tensor) -> Tensor:
    """What each token of a chunk adds depends on what those before it have added: a triangular system of equations."""
    q, k, v, decay, beta = tokens
    faded = decay.cumsum(-1)
    between = (faded[..., :, None] - faded[..., None, :]).exp_().tril()  # how much of what one adds is left for another
    left = faded.exp()[..., None]
    added = v
    if beta is not None:
        system = (k * beta[..., None]) @ k.transpose(2, 3) * between
        missing = (v - left * (k @ state)) * beta[..., None]
        added = torch.linalg.solve_triangular(system, missing, upper=False, unitriangular=True)
    out = left * (q @ state) + (q @ k.transpose(2, 3) * between) @ added
    until_end = (faded[..., -1:] - faded).exp()[..., None]
    state.mul_(left[..., -1:, :]).add_((k * until_end).transpose(2, 3) @ added)
    return out


def _chunk_by_values(tokens: _Tokens, state: Tensor) -> Tensor:
    """The same by the delta rule where each value of a key fades by itself. A token meets what another has added by the sum of
    products of their values, each as much as is left of it."""
    q, k, v, decay, beta = tokens
    assert beta is not None
    faded = decay.cumsum(2)
    between = (faded[..., :, None, :] - faded[..., None, :, :]).clamp_(max=0.0).exp_()  # (rows, heads, tokens, tokens, values)
    left, until_end = faded.exp(), (faded[..., -1:, :] - faded).exp()
    asking, keys = ((between * k[..., None, :, :] @ each[..., None]).squeeze(-1).tril() for each in (q, k * beta[..., None]))
    missing = (v - (k * left) @ state) * beta[..., None]
    added = torch.linalg.solve_triangular(keys, missing, upper=False, unitriangular=True)
    out: Tensor = (q * left) @ state + asking @ added
    state.mul_(left[..., -1:, :].transpose(2, 3)).add_((k * until_end).transpose(2, 3) @ added)
    return out


# -- step sizes ------------------------------------------------------------------------------------------------------------
# softplus(x + bias), no further than bounds; times a rate where there is one. So it is the logarithm of a decay. A rate may be
# that of several neighbours.

SIZING = 16  # values that are worked on in about the time of one softplus


def step_sizes(
    x: Tensor,
    bias: Tensor | None,
    rates: Tensor | None = None,
    are_logs: bool = False,
    least: float = 0.0,
    most: float = inf,
) -> Tensor:
    rows, out = in_rows(x), torch.empty(x.shape, dtype=torch.float32)
    of_rate = 1 if rates is None else x.shape[-1] // len(rates)
    assert (bias is None or bias.shape == x.shape[-1:]) and (rates is None or len(rates) * of_rate == x.shape[-1])
    given = _Steps(
        *(address_of(rows), pointer(out), HeadNumbers.of(bias), HeadNumbers.of(rates)),
        *(*rows.shape, rows.stride(0) * x.itemsize, of_rate),
        *(least, most, KINDS[x.dtype], are_logs and rates is not None),
    )
    run("step_sizes", given, threads_for(SIZING * x.numel()))
    return out


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
    of_rates = -rates.float().exp() if are_logs else rates.float()
    sizes.unflatten(-1, (len(rates), -1)).mul_(of_rates[:, None])
    return sizes


class _Steps(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "out")),
        *((name, HeadNumbers) for name in ("bias", "rates")),
        *((name, ctypes.c_long) for name in ("rows", "heads", "x_row", "of_rate")),
        *((name, ctypes.c_float) for name in ("least", "most")),
        *((name, ctypes.c_int) for name in ("kind", "are_logs")),
    )


# -- gated norm ------------------------------------------------------------------------------------------------------------
# RMS norm of each of several groups of a row, and a gate by silu, which comes before the norm or behind it.


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int = 1, gate_first: bool = False) -> Tensor:
    rows, gates, out = in_rows(x), in_rows(gate), torch.empty(x.shape, dtype=x.dtype)
    assert rows.shape == gates.shape and weight.shape == x.shape[-1:] and len(weight) % groups == 0
    given = _GatedNorm(
        *(address_of(rows), address_of(gates), pointer(weight), pointer(out)),
        *(len(rows), groups, len(weight) // groups, rows.stride(0) * x.itemsize, gates.stride(0) * gate.itemsize, eps),
        *(KINDS[x.dtype], KINDS[gate.dtype], KINDS[weight.dtype], gate_first),
    )
    run("gated_norm", given, threads_for(x.numel()))
    return out


def gated_norm_twin(x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int = 1, gate_first: bool = False) -> Tensor:
    wide, opened = x.float(), functional.silu(gate.float())
    if gate_first:
        wide = wide * opened
    of_groups = wide.unflatten(-1, (groups, -1))
    normed = of_groups * torch.rsqrt(of_groups.square().mean(-1, keepdim=True) + eps)
    made: Tensor = normed.flatten(-2).mul_(weight.float())
    return (made if gate_first else made.mul_(opened)).to(x.dtype)


class _GatedNorm(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "gate", "weight", "out")),
        *((name, ctypes.c_long) for name in ("rows", "groups", "width", "x_row", "gate_row")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("kind", "gate_kind", "weight_kind", "gate_first")),
    )


# -- short convolutions ----------------------------------------------------------------------------------------------------


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
