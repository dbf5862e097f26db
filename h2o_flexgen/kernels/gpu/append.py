"""Rotation of heads, and the newest token of each row in the cache: one program for each head of a token.

Products are rounded as the twin rounds them, so both give the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from h2o_flexgen.kernels.append import RotationAngles
from h2o_flexgen.kernels.evict import Newest, Notes
from h2o_flexgen.kernels.gpu.codes import as_words
from h2o_flexgen.kernels.gpu.launching import Launch, Seen, kept_by_shape, launcher, seen

EXACTLY: Mapping[str, Any] = {"num_warps": 1, "enable_fp_fusion": False}  # a head has few values


def rotate(x: Tensor, turn: RotationAngles) -> Tensor:
    rows = len(x)
    cos, sin = (each if len(each) == rows else each.expand(rows, -1, -1, -1) for each in turn)
    cos, sin = cos.contiguous(), sin.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        rotation_of(seen(x), seen(cos), seen(sin))(x, cos, sin, out)
    return out


@kept_by_shape
def rotation_of(x: Seen, cos: Seen, sin: Seen) -> Launch:
    (rows, tokens, heads, dim), strides, dtype = x
    assert strides[3] == 1 and cos == sin and cos[2] == dtype
    grid = rows * tokens, heads  # the first dimension of a grid alone goes beyond 65535
    numbers = tokens, dim, cos[0][-1], *strides[:3]
    return launcher(rotate_heads, grid, numbers, DIM=triton.next_power_of_2(dim), **EXACTLY)


def append(
    image: Tensor,
    newest: Newest,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    turn: RotationAngles | None,
    notes: Notes | None,
    worth: Tensor | None = None,
) -> Tensor:
    if turn is None:  # nothing is computed with
        image, k, v = as_words(image, k, v)
        out, cos, sin = q, image, image
    else:
        out, (cos, sin) = torch.empty(q.shape, dtype=q.dtype, device=q.device), turn
    assert notes is None or notes.positions.is_contiguous()
    positions, scores, _, noted_worth = notes or (None,) * 4
    worth = None if worth is None else worth.contiguous()
    assert noted_worth is None or worth is not None
    half = 0 if turn is None else cos.shape[-1]
    noted = positions is not None, scores is not None, noted_worth is not None
    launch = appending_of(seen(image), seen(q), seen(k), seen(v), half, *noted)
    left = (image if each is None else each for each in (positions, scores, noted_worth, worth))
    launch(image, q, k, v, cos, sin, out, *left, newest.slots, newest.positions)
    return out


@kept_by_shape
def appending_of(image: Seen, q: Seen, k: Seen, v: Seen, half: int, notes: bool, scores: bool, worth: bool) -> Launch:
    """`half`: pairs of a head that turn; none do where it is 0."""
    (_, rows, heads, slots, dim), strides, dtype = image
    assert k[2] == v[2] == dtype and k[1][3] == v[1][3] == q[1][3] == strides[4] == 1
    turned = q[0][2] if half else 0
    of_new = (each[at] for each in (q[1], k[1], v[1]) for at in (0, 2))
    return launcher(
        append_heads,
        (turned + 2 * heads, rows),
        (turned, heads, slots, dim, half, *strides[:4], *of_new),
        TURNS=half > 0,
        NOTES=notes,
        SCORES=scores,
        WORTH=worth,
        DIM=triton.next_power_of_2(dim),
        **EXACTLY,
    )


@triton.jit
def turned_head(head, cos, sin, out, dim, half, DIM: tl.constexpr):
    """Turns one head, from and to these addresses; its angles begin at `cos` and `sin`."""
    at = tl.arange(0, DIM)
    kind = head.dtype.element_ty
    turns, is_first, pair = at < 2 * half, at < half, tl.where(at < half, at, at - half)
    own = tl.load(head + at, mask=at < dim, other=0.0)
    other = tl.load(head + tl.where(is_first, at + half, at - half), mask=turns, other=0.0)
    c, s = tl.load(cos + pair, mask=turns, other=0.0), tl.load(sin + pair, mask=turns, other=0.0)
    along = (own.to(tl.float32) * c.to(tl.float32)).to(kind).to(tl.float32)
    across = (other.to(tl.float32) * s.to(tl.float32)).to(kind).to(tl.float32)
    turned = tl.where(is_first, along - across, along + across).to(kind)
    tl.store(out + at, tl.where(turns, turned, own), mask=at < dim)


@triton.jit(do_not_specialize=["tokens"])
def rotate_heads(x, cos, sin, out, tokens, dim, half, row_stride, token_stride, head_stride, DIM: tl.constexpr):
    place, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, token = place // tokens, place % tokens
    here = x + row * row_stride + token * token_stride + head * head_stride
    there = out + (place * tl.num_programs(1) + head) * dim
    turned_head(here, cos + place * half, sin + place * half, there, dim, half, DIM)


@triton.jit(do_not_specialize_on_alignment=["newest", "texts"])
def append_heads(
    image, q, k, v, cos, sin, out, positions, scores, noted_worth, worth, newest, texts, turned, heads, slots, dim, half,
    half_stride, row_stride, head_stride, slot_stride, q_row, q_head, k_row, k_head, v_row, v_head,
    TURNS: tl.constexpr, NOTES: tl.constexpr, SCORES: tl.constexpr, WORTH: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """First come the heads of the queries that turn, then the keys and what is noted of them, then the values."""
    number, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot, at = tl.load(newest + row), tl.arange(0, DIM)
    if number < turned:
        if TURNS:
            here, there = q + row * q_row + number * q_head, out + (row * turned + number) * dim
            turned_head(here, cos + row * half, sin + row * half, there, dim, half, DIM)
    elif number < turned + heads:
        head = number - turned
        here = k + row * k_row + head * k_head
        there = image + row * row_stride + head * head_stride + slot * slot_stride
        if TURNS:
            turned_head(here, cos + row * half, sin + row * half, there, dim, half, DIM)
        else:
            tl.store(there + at, tl.load(here + at, mask=at < dim), mask=at < dim)
        if NOTES:
            noted = (row * heads + head) * slots + slot
            tl.store(positions + noted, tl.load(texts + row).to(tl.int32))
            if SCORES:
                tl.store(scores + noted, 0.0)
            if WORTH:
                tl.store(noted_worth + noted, tl.load(worth + row * heads + head))
    else:
        head = number - turned - heads
        there = image + half_stride + row * row_stride + head * head_stride + slot * slot_stride
        tl.store(there + at, tl.load(v + row * v_row + head * v_head + at, mask=at < dim), mask=at < dim)
