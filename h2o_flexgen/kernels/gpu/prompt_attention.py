"""Attention of the tokens of a prompt, and what each key got from them, without a matrix of queries by keys.

The first kernel goes over the keys of a block of queries with a running softmax, and leaves the logarithm of each query's sum
of exponentials. With that the second one, a program for each block of keys, gathers what these got, in one fixed order: all
query heads of a group, and of each all queries. Outcomes do not depend on whether it is needed. Earlier keys that a row
lacks are not looked at.

It differs from the twin in the last bits: scores and shares are in fp32, and a block's shares are rounded to the type of the
values before they meet these."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from h2o_flexgen.formats.kernel_table import MAX, SUM
from h2o_flexgen.kernels.gpu.attention_parts import capped, highest, highest_of_rows
from h2o_flexgen.kernels.gpu.launching import launcher
from h2o_flexgen.kernels.more_keys import More

LEAST_DIM = 16  # that products of blocks take
WIDE = 128  # from here on, blocks are smaller
LOG2_E = tl.constexpr(math.log2(math.e))


class _Blocks(NamedTuple):
    """Sizes of blocks and warps, by the padded width of a head: they fit in registers, and in the shared memory of any GPU."""

    queries: int
    keys: int
    gathered: int  # keys for which a program gathers shares
    warps: int = 8
    stages: int = 2

    @classmethod
    def of(cls, padded: int) -> _Blocks:
        return cls(64, 32, 64) if padded <= WIDE else cls(32, 32, 32, warps=4)


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
    rows, heads, tokens, dim = q.shape
    kv_heads, keys = k.shape[1:3]
    assert q.stride(3) == k.stride(3) == v.stride(3) == 1 and k.dtype == v.dtype == q.dtype
    out = torch.empty(rows, tokens, heads * dim, dtype=q.dtype, device=q.device)
    weighs = torch.empty(rows, heads, tokens, dtype=torch.float32, device=q.device)
    sizes = dim**-0.5, window or keys, tokens, keys, heads, heads // kv_heads
    strides = *q.stride()[:3], *k.stride()[:3]
    padded = max(LEAST_DIM, triton.next_power_of_2(dim))
    blocks = _Blocks.of(padded)
    elsewhere = (weighs, out) if more is None else (more.scores, out if more.values is None else more.values)
    alike: Any = {"DIM": dim, "PADDED": padded, "CAP": cap or 0.0, "num_warps": blocks.warps, "num_stages": blocks.stages}
    attend = launcher(
        attend_prompt,
        (triton.cdiv(tokens, blocks.queries), heads, rows),
        (*sizes, *strides, *v.stride()[:3]),
        MORE=more is not None,
        VALUES=more is not None and more.values is not None,
        QUERIES=blocks.queries,
        KEYS=blocks.keys,
        **alike,
    )
    attend(q, k, v, before, *elsewhere, out, weighs)
    if weights is None:
        return out, None
    got = torch.empty(rows, kv_heads, keys, dtype=torch.float32, device=q.device)
    gather = launcher(
        gather_columns,
        (triton.cdiv(keys, blocks.gathered), kv_heads, rows),
        (*sizes, *strides),
        QUERIES=blocks.queries,
        KEYS=blocks.gathered,
        IS_HIGHEST=gathers == MAX,
        **alike,
    )
    gather(q, k, before, weights.float().contiguous(), weighs, got)
    return out, got


@triton.jit
def attend_keys(
    q,
    keys,
    values,
    first,
    last,
    ahead,
    window,
    token,
    most,
    total,
    made,
    scale,
    key_stride,
    value_stride,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    KEYS: tl.constexpr,
    CAP: tl.constexpr,
):
    """Goes on with keys `first` up to `last`, of which a query sees `window`, up to that `ahead` places behind its own."""
    d = tl.arange(0, PADDED)
    for start in range(first, last, KEYS):
        at = start + tl.arange(0, KEYS)
        there = (at < last)[:, None] & (d < DIM)[None, :]
        far = at.to(tl.int64)[:, None]
        key = tl.load(keys + far * key_stride + d[None, :], mask=there, other=0.0)
        score = capped(tl.dot(q, tl.trans(key), input_precision="ieee") * scale, CAP * LOG2_E)
        behind = token[:, None] + ahead - at[None, :]
        score = tl.where((at < last)[None, :] & (behind >= 0) & (behind < window), score, float("-inf"))
        top = tl.maximum(most, tl.max(score, 1))
        base = tl.where(top == float("-inf"), 0.0, top)
        faded, share = tl.exp2(most - base), tl.exp2(score - base[:, None])
        total = total * faded + tl.sum(share, 1)
        value = tl.load(values + far * value_stride + d[None, :], mask=there, other=0.0)
        made = made * faded[:, None] + tl.dot(share.to(value.dtype), value, input_precision="ieee")
        most = top
    return most, total, made


@triton.jit(do_not_specialize=["window", "tokens", "keys"])
def attend_prompt(
    q, k, v, before, more_scores, more_values, out, weighs, scale, window, tokens, keys, heads, group,
    q_row, q_head, q_token, k_row, k_head, k_key, v_row, v_head, v_key,
    MORE: tl.constexpr, VALUES: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    block, head, row = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    token, d = block * QUERIES + tl.arange(0, QUERIES), tl.arange(0, PADDED)
    there = (token < tokens)[:, None] & (d < DIM)[None, :]
    held, kv_head = keys - tokens, head // group
    query = tl.load(q + row * q_row + head * q_head + token.to(tl.int64)[:, None] * q_token + d[None, :], mask=there, other=0.0)
    own_keys, own_values = k + row * k_row + kv_head * k_head, v + row * v_row + kv_head * v_head
    most, total = tl.full((QUERIES,), float("-inf"), tl.float32), tl.zeros((QUERIES,), tl.float32)
    made, scale = tl.zeros((QUERIES, PADDED), tl.float32), scale * LOG2_E
    earlier = tl.load(before + row).to(tl.int32)
    nearest = block * QUERIES + 1 - window  # where the window of the first query begins, from that of the new tokens
    first = tl.maximum(nearest + earlier, 0)
    most, total, made = attend_keys(
        *(query, own_keys, own_values, first, earlier, earlier, window, token, most, total, made, scale, k_key, v_key),
        *(DIM, PADDED, KEYS, CAP),
    )
    first, last = held + tl.maximum(nearest, 0), held + tl.minimum(tokens, (block + 1) * QUERIES)
    most, total, made = attend_keys(
        *(query, own_keys, own_values, first, last, held, window, token, most, total, made, scale, k_key, v_key),
        *(DIM, PADDED, KEYS, CAP),
    )
    if MORE:
        place = (row * tokens + token) * heads + head
        score = tl.load(more_scores + place, mask=token < tokens, other=float("-inf")) * LOG2_E
        top = tl.maximum(most, score)
        faded, share = tl.exp2(most - top), tl.exp2(score - top)
        most, total, made = top, total * faded + share, made * faded[:, None]
        if VALUES:
            made += share[:, None] * tl.load(more_values + place[:, None] * DIM + d[None, :], mask=there, other=0.0)
    tl.store(weighs + (row * heads + head) * tokens + token, most + tl.log2(total), mask=token < tokens)
    outcome = (made / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + ((row * tokens + token)[:, None] * heads + head) * DIM + d[None, :], outcome, mask=there)


@triton.jit(do_not_specialize=["window", "tokens", "keys"])
def gather_columns(
    q,
    k,
    before,
    weights,
    weighs,
    received,
    scale,
    window,
    tokens,
    keys,
    heads,
    group,
    q_row,
    q_head,
    q_token,
    k_row,
    k_head,
    k_key,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    IS_HIGHEST: tl.constexpr,
    CAP: tl.constexpr,
):
    block, kv_head, row = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    at, d, lane = block * KEYS + tl.arange(0, KEYS), tl.arange(0, PADDED), tl.arange(0, QUERIES)
    held = keys - tokens
    earlier = tl.load(before + row).to(tl.int32)
    exists, ahead = (at < keys) & ((at >= held) | (at < earlier)), tl.where(at >= held, held, earlier)
    there = exists[:, None] & (d < DIM)[None, :]
    own = k + row * k_row + kv_head * k_head + at.to(tl.int64)[:, None] * k_key + d[None, :]
    key = tl.load(own, mask=there, other=0.0)
    got, scale = tl.zeros((KEYS, QUERIES), tl.float32), scale * LOG2_E
    first, last = counted_queries(weights + row * tokens, tokens, QUERIES)
    first = tl.maximum(first, (block * KEYS - held) // QUERIES * QUERIES)
    for member in range(group):
        head = kv_head * group + member
        for start in range(first, last, QUERIES):
            token = start + lane
            fits = (token < tokens)[:, None] & (d < DIM)[None, :]
            place = q + row * q_row + head * q_head + token.to(tl.int64)[:, None] * q_token + d[None, :]
            score = tl.dot(key, tl.trans(tl.load(place, mask=fits, other=0.0)), input_precision="ieee") * scale
            score = capped(score, CAP * LOG2_E)
            weigh = tl.load(weighs + (row * heads + head) * tokens + token, mask=token < tokens, other=0.0)
            weight = tl.load(weights + row * tokens + token, mask=token < tokens, other=0.0)
            behind = token[None, :] + (ahead - at)[:, None]
            counts = exists[:, None] & (behind >= 0) & (behind < window) & (weight != 0.0)[None, :]
            share = tl.where(counts, tl.exp2(score - weigh[None, :]) * weight[None, :], 0.0)
            got = highest(got, share) if IS_HIGHEST else got + share
    of_all = highest_of_rows(got) if IS_HIGHEST else tl.sum(got, 1)
    tl.store(received + (row * (heads // group) + kv_head) * keys + at, of_all, mask=at < keys)


@triton.jit
def counted_queries(weights, tokens, QUERIES: tl.constexpr):
    """The range of whole blocks of queries outside of which none counts."""
    lane = tl.arange(0, 1024)
    first, last = tl.full((1024,), 0, tl.int32) + tokens, tl.zeros((1024,), tl.int32)
    for start in range(0, tokens, 1024):
        token = start + lane
        counts = tl.load(weights + token, mask=token < tokens, other=0.0) != 0.0
        first, last = tl.where(counts, tl.minimum(first, token), first), tl.where(counts, token + 1, last)
    return tl.min(first) // QUERIES * QUERIES, tl.max(last)
