"""States of rows that stay as large as they are, and what each token makes of them: the gated delta rule and Mamba-2's scan.

A head's state is a matrix (key width, value width) in fp32. A token fades it, adds to it what is to be found under the token's
key, and reads from it what is found under the token's query. The delta rule adds only what is not found there yet.

Rows may be filled up behind their last tokens: `lengths` (rows,), int64, says how many tokens of each are real. A state is then
that behind the last one. States are changed in place. Rows of them may lie apart, their heads may not.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64  # tokens of a prompt that the twins take at once
KEY_EPS = 1e-6  # is added to the square of a key's length, and of a query's


# -- gated delta rule ------------------------------------------------------------------------------------------------------


def gated_delta_twin(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    lengths: Tensor | None = None,
    is_tiled: bool = False,
) -> Tensor:
    heads, width = v.shape[2], q.shape[-1]
    there = _there(v, lengths)
    tokens = _Tokens(
        _of_length_one(_by_head(q, heads, is_tiled)).mul_(width**-0.5),
        _of_length_one(_by_head(k, heads, is_tiled)),
        _by_head(v, heads),
        _only(decay, there),
        _only(beta, there),
    )
    return _passed(tokens, state, v.dtype)


# -- Mamba-2 ---------------------------------------------------------------------------------------------------------------


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
) -> Tensor:
    heads = x.shape[2]
    sizes = _only(steps, _there(x, lengths))
    wide = _by_head(x, heads)
    fading = sizes * (-rates.float().exp() if are_logs else rates.float())[:, None]
    tokens = _Tokens(_by_head(c, heads), _by_head(b, heads), wide * sizes[..., None], fading)
    out = _passed(tokens, state, torch.float32)
    return (out if skip is None else out + wide.transpose(1, 2) * skip.float()[:, None]).to(x.dtype)


# -- both ------------------------------------------------------------------------------------------------------------------


class _Tokens(NamedTuple):
    """What tokens bring: (rows, heads, tokens, width) or (rows, heads, tokens), in fp32."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor  # its logarithm
    beta: Tensor | None = None  # how much of what is not found is added; None: all of it is added, whatever is found

    def part(self, first: int, behind: int) -> _Tokens:
        return _Tokens(*(None if each is None else each[:, :, first:behind] for each in self))  # type: ignore[arg-type]


def _by_head(x: Tensor, heads: int, is_tiled: bool = False) -> Tensor:
    """(rows, tokens, some of the heads, width) as (rows, heads, tokens, width), in fp32. Each head serves those that follow one
    another or, tiled, those that are as far apart as there are some."""
    wide, each = x.float().transpose(1, 2), heads // x.shape[2]
    return wide.repeat(1, each, 1, 1) if is_tiled else wide.repeat_interleave(each, dim=1)


def _of_length_one(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + KEY_EPS)


def _there(x: Tensor, lengths: Tensor | None) -> Tensor | None:
    """True for tokens (rows, 1, tokens) that are real. None stands for all."""
    if lengths is None:
        return None
    return (torch.arange(x.shape[1], device=x.device) < lengths[:, None])[:, None]


def _only(x: Tensor, there: Tensor | None) -> Tensor:
    """Numbers of tokens (rows, tokens, heads) as (rows, heads, tokens); zeros where no token is, which then changes nothing."""
    wide = x.float().transpose(1, 2)
    return wide if there is None else wide.masked_fill(~there, 0.0)


def _passed(tokens: _Tokens, state: Tensor, dtype: torch.dtype) -> Tensor:
    """Tokens one after the other, or many of them at once. -> (rows, tokens, heads, value width)"""
    count, made = tokens.q.shape[2], list[Tensor]()
    for first in range(0, count, CHUNK):
        part = tokens.part(first, first + CHUNK)
        made.append(_step(part, state) if part.q.shape[2] == 1 else _chunk(part, state))
    out = torch.cat(made, dim=2) if made else torch.empty_like(tokens.v)
    return out.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format)


def _step(tokens: _Tokens, state: Tensor) -> Tensor:
    q, k, v, decay, beta = tokens
    state.mul_(decay.exp()[..., None])
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
