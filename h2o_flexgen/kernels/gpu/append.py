"""Rotation of heads, and the newest token of each row in the cache: one program for each head of a token.

Products are rounded as the twin rounds them, so both give the same bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from h2o_flexgen.kernels.append import RotationAngles
from h2o_flexgen.kernels.evict import Newest, Notes
from h2o_flexgen.kernels.gpu.codes import as_words

WARPS = 1  # a head has few values


def rotate(x: Tensor, turn: RotationAngles) -> Tensor:
    rows, tokens, heads, dim = x.shape
    assert x.stride(3) == 1 and turn.cos.dtype == turn.sin.dtype == x.dtype
    cos, sin = (each.expand(rows, -1, -1, -1).contiguous() for each in turn)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        rotate_heads[(rows * tokens, heads)](  # the first dimension of a grid alone goes beyond 65535
            *(x, cos, sin, out, tokens, dim, cos.shape[-1], *x.stride()[:3]),
            DIM=triton.next_power_of_2(dim),
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
    return out


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
    rows, heads, slots = image.shape[1:4]
    if turn is None:  # nothing is computed with
        image, k, v = as_words(image, k, v)
    assert k.dtype == v.dtype == image.dtype and k.stride(3) == v.stride(3) == q.stride(3) == image.stride(4) == 1
    assert notes is None or notes.positions.is_contiguous()
    positions, scores, _, noted_worth = notes or (None,) * 4
    worth = None if worth is None else worth.contiguous()
    assert noted_worth is None or worth is not None
    turned = 0 if turn is None else q.shape[2]
    out = q if turn is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    cos, sin = (image, image) if turn is None else turn
    append_heads[(turned + 2 * heads, rows)](
        *(image, newest.slots, newest.positions, q, k, v, cos, sin, out),
        *(image if each is None else each for each in (positions, scores, noted_worth, worth)),
        *(turned, heads, slots, image.shape[-1], 0 if turn is None else cos.shape[-1]),
        *(*image.stride()[:4], q.stride(0), q.stride(2), k.stride(0), k.stride(2), v.stride(0), v.stride(2)),
        TURNS=turn is not None,
        NOTES=notes is not None,
        SCORES=scores is not None,
        WORTH=noted_worth is not None,
        DIM=triton.next_power_of_2(image.shape[-1]),
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
    return out


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


@triton.jit
def append_heads(
    image, newest, texts, q, k, v, cos, sin, out, positions, scores, noted_worth, worth, turned, heads, slots, dim, half,
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
