"""Attention of the tokens of a prompt, and what each key got from them. In C and in torch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from h2o_flexgen.formats.kernel_sizes import (
    SCORED_BYTES,
    WIDTH_OF_TORCH,
    PromptRoom,
    mask_bytes,
    prompt_parts,
    prompt_threads,
)
from h2o_flexgen.formats.kernel_table import MAX, SUM
from h2o_flexgen.kernels.more_keys import More, MoreKeys
from h2o_flexgen.kernels.native import KINDS, ValuePlaces, pointer, run

# -- column sums -----------------------------------------------------------------------------------------------------------
# Causal attention with memory linear in the prompt: what every key got from the queries, and what these got where each has
# one more key. Queries are taken block by block, and each block sees all of its keys at once: so a softmax is whole, shares
# are exact, and no matrix of queries by keys is ever held.


class Near(NamedTuple):
    """A window: a token sees so many tokens, itself included."""

    before: Tensor  # (rows,): keys of each row before its queries
    window: int

    def of(self, rows: slice, queries: slice, keys: int, held: int) -> Tensor:
        """The mask of keys too far away for these queries, (rows, queries, keys): the first `held` stand before all queries."""
        places, own = torch.arange(keys, device=self.before.device), self.before[rows, None, None]
        turns = torch.where(places < held, places, places - held + own)  # among the keys that a row has
        asked = torch.arange(queries.start, queries.stop, device=self.before.device)[:, None] + own
        return asked - turns >= self.window


def column_sums(q: Tensor, k: Tensor, weights: Tensor, is_held: Tensor | None, scored_bytes: int, gathers: str = SUM) -> Tensor:
    """Sums, for every key, the probabilities times the weight of their query, over queries and over the query heads of a group,
    or finds the highest of them: q (rows, heads, tokens, dim), k (rows, kv_heads, keys, dim), weights (rows, tokens) -> (rows,
    kv_heads, keys), fp32. If there are more keys than queries, the first ones stand before all queries; `is_held` (rows, 1,
    earlier keys) says which of them exist. At most `scored_bytes` of probabilities are held at once."""
    rows, heads, tokens, dim = q.shape
    kv_heads, keys = k.shape[1:3]
    held = keys - tokens
    got = torch.zeros(rows, kv_heads, keys, dtype=torch.float32, device=q.device)
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, tokens, dim)
    counted = weights.ne(0).any(0).nonzero()[:, 0]
    first = int(counted[0]) if len(counted) else tokens  # earlier queries have no weight
    for row, start, end in _blocks(rows, first, tokens, max(1, scored_bytes // (4 * heads * keys))):
        there = None if is_held is None else is_held[row]
        shares = probabilities(grouped[row, :, :, start:end], k[row, :, : held + end], there)
        _gather(got[row, :, : held + end], shares, weights[row, start:end], gathers)
    return got


def outcome_and_sums(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor | None,
    is_held: Tensor | None,
    more: More | None,
    scored_bytes: int,
    gathers: str = SUM,
    near: Near | None = None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The outcome (rows, tokens, heads * dim) where each query has one more key, sees only what is near, or has scores within a
    cap, and what keys got where there are weights. Shapes and the rest as above."""
    rows, heads, tokens, dim = q.shape
    kv_heads, keys = k.shape[1:3]
    held, group = keys - tokens, heads // kv_heads
    out = q.new_empty(rows, tokens, heads, dim)
    got = None if weights is None else torch.zeros(rows, kv_heads, keys, dtype=torch.float32, device=q.device)
    grouped = q.reshape(rows, kv_heads, group, tokens, dim)
    for row, start, end in _blocks(rows, 0, tokens, max(1, scored_bytes // (4 * heads * keys))):
        there = None if is_held is None else is_held[row]
        scores = _scores(grouped[row, :, :, start:end], k[row, :, : held + end], there, cap)
        if near is not None:
            far = near.of(row, slice(start, end), held + end, held).repeat(1, group, 1).unsqueeze(1)
            scores.masked_fill_(far, -torch.inf)
        own = None if more is None else more.scores[row, start:end].transpose(1, 2).reshape(*scores.shape[:3], 1)
        every = scores if own is None else torch.cat((scores, own), dim=-1)
        shares, share = torch.softmax(every, dim=-1).split((held + end, every.shape[-1] - held - end), dim=-1)
        made = (shares @ v[row, :, : held + end].float()).view(-1, heads, end - start, dim).transpose(1, 2)
        if more is not None and more.values is not None:
            made = made + share.reshape(-1, heads, end - start, 1).transpose(1, 2) * more.values[row, start:end]
        out[row, start:end] = made.to(q.dtype)
        if got is not None and weights is not None:
            _gather(got[row, :, : held + end], shares, weights[row, start:end], gathers)
    return out.view(rows, tokens, heads * dim), got


def _gather(got: Tensor, shares: Tensor, weights: Tensor, gathers: str) -> None:
    """Adds to `got` (rows, kv_heads, keys) what keys get from queries, or keeps the highest of both there. The queries' shares
    are (rows, kv_heads, group * queries, keys), and their weights (rows, queries). Shares may be overwritten."""
    weight = weights[:, None, None].repeat(1, 1, 1, shares.shape[2] // weights.shape[1])
    if gathers == MAX:
        got.copy_(torch.maximum(got, shares.mul_(weight.transpose(2, 3)).amax(2)))
    else:
        got += (weight @ shares)[:, :, 0]


def _blocks(rows: int, first: int, tokens: int, queries: int) -> Iterator[tuple[slice, int, int]]:
    together = max(1, queries // max(1, tokens - first))  # short prompts go several rows at a time
    for row in range(0, rows, together):
        for start in range(first, tokens, queries):
            yield slice(row, min(row + together, rows)), start, min(start + queries, tokens)


def probabilities(q: Tensor, k: Tensor, is_held: Tensor | None, sink_scores: Tensor | None = None) -> Tensor:
    """q (rows, kv_heads, group, queries, dim), k (rows, kv_heads, keys, dim) up to the last query -> (rows, kv_heads, group *
    queries, keys). What falls to sinks, with scores (heads,), is let go."""
    scores = _scores(q, k, is_held)
    if sink_scores is None:
        return torch.softmax(scores, dim=-1)
    own = (
        sink_scores.float()
        .view(k.shape[1], -1)
        .repeat_interleave(q.shape[3], dim=1)[None, :, :, None]
        .expand(len(q), -1, -1, -1)
    )
    return torch.softmax(torch.cat((scores, own), dim=-1), dim=-1)[..., :-1]


def _scores(q: Tensor, k: Tensor, is_held: Tensor | None, cap: float | None = None) -> Tensor:
    rows, kv_heads, group, queries, dim = q.shape
    scores = q.float().reshape(rows, kv_heads, group * queries, dim) @ k.float().transpose(2, 3)
    scores.mul_(dim**-0.5)
    if cap is not None:
        scores.div_(cap).tanh_().mul_(cap)
    later = torch.ones(queries, queries, dtype=torch.bool, device=q.device).triu_(1)
    scores.view(rows, kv_heads, group, queries, -1)[..., -queries:].masked_fill_(later, -torch.inf)
    if is_held is not None:
        scores[..., : is_held.shape[-1]].masked_fill_(~is_held.unsqueeze(1), -torch.inf)
    return scores


# -- prompt attention ------------------------------------------------------------------------------------------------------
# Attention of the tokens of a prompt, and what each key got from them, in C and in torch. The two differ in the last bits:
# C sums in another order, and keeps scores and shares in float32. In C a row's outcome depends only on the row itself and
# on the largest number of earlier keys in its batch.


def prompt_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    before: Tensor,
    weights: Tensor | None,
    more: More | None = None,
    gathers: str = SUM,
    window: int | None = None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    assert k.dtype == v.dtype == q.dtype
    rows, heads, tokens, dim = q.shape
    kv_heads, keys = k.shape[1:3]
    assert v.shape == k.shape == (rows, kv_heads, keys, dim) and (before.shape, before.dtype) == ((rows,), torch.int64)
    assert weights is None or weights.shape == (rows, tokens)
    assert more is None or more.values is None or more.values.shape == (rows, tokens, heads, dim)
    out = torch.empty(rows, tokens, heads * dim, dtype=q.dtype)
    got = None if weights is None else torch.empty(rows, kv_heads, keys, dtype=torch.float32)
    weights = None if weights is None else weights.float().contiguous()
    parts, laid = prompt_parts(heads // kv_heads), PromptRoom.of(keys, dim)
    threads = prompt_threads(rows, kv_heads * parts, torch.get_num_threads())
    room = torch.empty(threads, laid.end, dtype=torch.float32)
    of_parts = torch.empty(rows, kv_heads, parts, keys, dtype=torch.float32) if got is not None and parts > 1 else None
    given = _Prompt(
        *(ValuePlaces.of(x, KINDS[x.dtype]) for x in (q, k, v)),
        pointer(before),
        *(None if x is None else pointer(x) for x in (weights, out, got, of_parts)),
        MoreKeys.of(more),
        pointer(room),
        *laid,
        *(rows, heads, kv_heads, tokens, keys, dim, window or keys, parts),
        dim**-0.5,
        gathers == MAX,
        cap or 0.0,
    )
    run("prompt_attention", given, threads)
    return out, got


def prompt_attention_twin(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    before: Tensor,
    weights: Tensor | None,
    more: More | None = None,
    gathers: str = SUM,
    window: int | None = None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    held = k.shape[2] - q.shape[2]
    is_held = torch.arange(held, device=k.device) < before[:, None, None] if held else None  # (rows, 1, held)
    if window is not None:
        return outcome_and_sums(q, k, v, weights, is_held, more, SCORED_BYTES, gathers, Near(before, window), cap)
    if more is not None or cap is not None or q.shape[3] > WIDTH_OF_TORCH:
        return outcome_and_sums(q, k, v, weights, is_held, more, SCORED_BYTES, gathers, cap=cap)
    got = None if weights is None else column_sums(q, k, weights, is_held, SCORED_BYTES, gathers)
    return _attend_causally(q, k, v) if is_held is None else _attend_seen(q, k, v, is_held), got


def _attend_causally(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows, heads, tokens, head_dim = q.shape
    if heads != k.shape[1]:  # torch's own grouping takes an n x n path on many devices and versions; this never does
        k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    # padding stands behind the text, so causal attention hides it from every token that counts
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=tokens > 1)
    return out.transpose(1, 2).reshape(rows, tokens, heads * head_dim)


def _attend_seen(q: Tensor, k: Tensor, v: Tensor, is_held: Tensor) -> Tensor:
    """Attention with masks, which are made for some queries at a time."""
    (rows, heads, tokens, _), (kv_heads, keys) = q.shape, k.shape[1:3]
    queries = max(1, SCORED_BYTES // (rows * keys * mask_bytes(heads // kv_heads)))
    made = [_attend_masked(q, k, v, is_held, slice(start, start + queries)) for start in range(0, tokens, queries)]
    return made[0] if len(made) == 1 else torch.cat(made, dim=1)


def _attend_masked(q: Tensor, k: Tensor, v: Tensor, is_held: Tensor, queries: slice) -> Tensor:
    """The query heads of a group are laid one behind the other along the queries."""
    held, q = k.shape[2] - q.shape[2], q[:, :, queries]
    rows, heads, tokens, head_dim = q.shape
    kv_heads, seen = k.shape[1], held + queries.start + tokens
    mask = _seen(is_held, queries.start, tokens).repeat(1, heads // kv_heads, 1).unsqueeze(1)
    asked = q.reshape(rows, kv_heads, -1, head_dim)
    out = functional.scaled_dot_product_attention(asked, k[:, :, :seen], v[:, :, :seen], attn_mask=mask)
    # no view: on some devices the outcome has another layout than the queries
    return out.reshape(rows, heads, tokens, head_dim).transpose(1, 2).reshape(rows, tokens, heads * head_dim)


def _seen(is_held: Tensor, first: int, tokens: int) -> Tensor:
    """The mask of which key tokens from `first` on see, (rows, tokens, keys up to the last of them)."""
    causal = torch.ones(tokens, first + tokens, dtype=torch.bool, device=is_held.device).tril_(first)
    return torch.cat((is_held.expand(-1, tokens, -1), causal.expand(len(is_held), -1, -1)), dim=2)


class _Prompt(ctypes.Structure):
    _fields_ = (
        *((name, ValuePlaces) for name in ("q", "keys", "values")),
        *((name, ctypes.c_void_p) for name in ("before", "weights", "out", "got", "of_parts")),
        ("more", MoreKeys),
        ("room", ctypes.c_void_p),
        *((f"wide_{name}", ctypes.c_long) for name in PromptRoom._fields),
        *(
            (name, ctypes.c_long)
            for name in ("rows", "heads", "kv_heads", "new_tokens", "all_tokens", "dim", "window", "parts")
        ),
        ("scale", ctypes.c_float),
        ("is_highest", ctypes.c_int),
        ("cap", ctypes.c_float),
    )
