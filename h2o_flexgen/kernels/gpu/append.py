"""Rotation of heads, and the newest token of each row in the cache: one program for each head of a token.

Products are rounded as the twin rounds them, so both give the same bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from h2o_flexgen.formats.grouped import GROUP as GROUP_VALUES
from h2o_flexgen.formats.grouped import Grouped, groups_of
from h2o_flexgen.kernels.append import RotationAngles
from h2o_flexgen.kernels.evict import Newest, Notes
from h2o_flexgen.kernels.gpu.codes import GROUP, as_float32, in_words, widest_word
from h2o_flexgen.kernels.gpu.group_codes import encoded_groups
from h2o_flexgen.kernels.gpu.launching import ALIGNED, NOT_IN_WORDS, InWords, Launch, Seen, kept_by_shape, launcher, seen
from h2o_flexgen.kernels.raw_memory import begins_behind

WORD = 4  # bytes of codes that are written at once
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
    v: Tensor | None,
    turn: RotationAngles | None,
    notes: Notes | None,
    worth: Tensor | None = None,
) -> Tensor:
    v = k if v is None else v  # it is not written then
    begin = None if turn is not None else begins_behind(ALIGNED, image, k, v)  # where nothing is computed with
    forms = begin, seen(image), seen(q), seen(k), seen(v)
    return _launched(appending_of, forms, (image, newest, q, k, v, turn, notes, worth))


def append_coded(
    image: Tensor,
    newest: Newest,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    turn: RotationAngles | None,
    notes: Notes | None,
    worth: Tensor | None,
    format: Grouped,
) -> Tensor:
    """The same of an image in groups: keys and values are encoded before they are put there."""
    v = k if v is None else v
    forms = format.bits, seen(image), seen(q), seen(k), seen(v)
    return _launched(coding_of, forms, (image, newest, q, k, v, turn, notes, worth))


def _launched(launch_of: Callable[..., Launch], forms: Sequence[object], given: Sequence[Any]) -> Tensor:
    image, newest, q, k, v, turn, notes, worth = given
    out, (cos, sin) = (q, (image, image)) if turn is None else (torch.empty(q.shape, dtype=q.dtype, device=q.device), turn)
    assert notes is None or notes.positions.is_contiguous()
    positions, scores, _, noted_worth = notes or (None,) * 4
    worth = None if worth is None else worth.contiguous()
    assert noted_worth is None or worth is not None
    noted = positions is not None, scores is not None, noted_worth is not None
    launch = launch_of(*forms, 0 if turn is None else cos.shape[-1], *noted)
    left = [image if each is None else each for each in (positions, scores, noted_worth, worth)]
    launch(image, q, k, v, cos, sin, out, *left, newest.slots, newest.positions)
    return out


@kept_by_shape
def appending_of(
    begin: int | None, image: Seen, q: Seen, k: Seen, v: Seen, half: int, notes: bool, scores: bool, worth: bool
) -> Launch:
    """`begin`: where image, keys and values begin behind a multiple of any word, if they may be moved in words. `half`: pairs
    of a head that turn; none do where it is 0."""
    assert k[2] == v[2] == image[2]
    words = NOT_IN_WORDS
    if begin is not None:
        words = InWords(widest_word(begin, image, k, v), (0, 2, 3))
        image, k, v = (in_words(each, words.word) for each in (image, k, v))
    return _launch(append_heads, image[0][-1], image, (q, k, v), half, (notes, scores, worth), words)


@kept_by_shape
def coding_of(bits: int, image: Seen, q: Seen, k: Seen, v: Seen, half: int, notes: bool, scores: bool, worth: bool) -> Launch:
    dim, strides = k[0][-1], image[1]
    assert image[2] == torch.uint8 and image[0][-1] == Grouped(bits).nbytes((dim,), 0) and k[0] == v[0] and k[2] == v[2]
    assert all(stride % WORD == 0 for size, stride in zip(image[0], strides[:4]) if size > 1)
    groups = triton.next_power_of_2(groups_of(dim))
    forms = {"BITS": bits, "GROUPS": groups, "WHOLE": dim % GROUP_VALUES == 0}
    return _launch(append_coded_heads, dim, image, (q, k, v), half, (notes, scores, worth), NOT_IN_WORDS, forms)


def _launch(
    kernel: Any,
    dim: int,
    image: Seen,
    new: tuple[Seen, Seen, Seen],
    half: int,
    noted: tuple[bool, bool, bool],
    words: InWords,
    forms: Mapping[str, int] = MappingProxyType({}),
) -> Launch:
    (sets, rows, heads, slots, _), strides, _ = image
    assert all(each[1][3] == 1 for each in new) and strides[4] == 1
    turned = new[0][0][2] if half else 0
    of_new = (each[1][at] for each in new for at in (0, 2))
    numbers = turned, heads, slots, dim, half, *strides[:4], *of_new
    notes = dict(zip(("NOTES", "SCORES", "WORTH"), noted, strict=True))
    constants = {"TURNS": half > 0, **notes, **forms, "DIM": triton.next_power_of_2(dim), **EXACTLY}
    return launcher(kernel, (turned + sets * heads, rows), numbers, words, **constants)


@triton.jit
def turned_values(head, cos, sin, at, there, half):
    """The values of a head at these places, turned; its angles begin at `cos` and `sin`."""
    kind = head.dtype.element_ty
    turns, is_first, pair = there & (at < 2 * half), at < half, tl.where(at < half, at, at - half)
    own = tl.load(head + at, mask=there, other=0.0)
    other = tl.load(head + tl.where(is_first, at + half, at - half), mask=turns, other=0.0)
    c, s = tl.load(cos + pair, mask=turns, other=0.0), tl.load(sin + pair, mask=turns, other=0.0)
    along = (own.to(tl.float32) * c.to(tl.float32)).to(kind).to(tl.float32)
    across = (other.to(tl.float32) * s.to(tl.float32)).to(kind).to(tl.float32)
    turned = tl.where(is_first, along - across, along + across).to(kind)
    return tl.where(turns, turned, own)


@triton.jit
def turned_head(head, cos, sin, out, dim, half, DIM: tl.constexpr):
    """Turns one head, from and to these addresses."""
    at = tl.arange(0, DIM)
    tl.store(out + at, turned_values(head, cos, sin, at, at < dim, half), mask=at < dim)


@triton.jit(do_not_specialize=["tokens"])
def rotate_heads(x, cos, sin, out, tokens, dim, half, row_stride, token_stride, head_stride, DIM: tl.constexpr):
    place, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, token = place // tokens, place % tokens
    here = x + row * row_stride + token * token_stride + head * head_stride
    there = out + (place * tl.num_programs(1) + head) * dim
    turned_head(here, cos + place * half, sin + place * half, there, dim, half, DIM)


@triton.jit
def note_newest(
    positions, scores, noted_worth, worth, texts, row, head, heads, slots, slot, SCORES: tl.constexpr, WORTH: tl.constexpr
):
    noted = (row * heads + head) * slots + slot
    tl.store(positions + noted, tl.load(texts + row).to(tl.int32))
    if SCORES:
        tl.store(scores + noted, 0.0)
    if WORTH:
        tl.store(noted_worth + noted, tl.load(worth + row * heads + head))


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
            note_newest(positions, scores, noted_worth, worth, texts, row, head, heads, slots, slot, SCORES, WORTH)
    else:
        head = number - turned - heads
        there = image + half_stride + row * row_stride + head * head_stride + slot * slot_stride
        tl.store(there + at, tl.load(v + row * v_row + head * v_head + at, mask=at < dim), mask=at < dim)


@triton.jit
def coded_head(
    head, cos, sin, out, dim, half, TURNS: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr, WHOLE: tl.constexpr
):
    """Encodes one head, turned first, into the bytes of a slot. Behind its last value that one is repeated."""
    of_group: tl.constexpr = GROUP * BITS // 32  # words
    group, word = tl.arange(0, GROUPS), tl.arange(0, of_group)
    groups = tl.cdiv(dim, GROUP)
    column = group[:, None, None] * GROUP + (word[:, None] * 4 + tl.arange(0, 4)[None, :])[None, :, :]
    there = (group < groups)[:, None, None]
    low = values_at(head, cos, sin, column, there, dim, half, TURNS, WHOLE)
    high = values_at(head, cos, sin, column + GROUP // 2, there, dim, half, TURNS, WHOLE) if BITS == 4 else low
    words, scale, minimum = encoded_groups(low, high, BITS, GROUPS)
    own = out.to(tl.pointer_type(tl.uint32))
    tl.store(own + (group * of_group)[:, None] + word[None, :], words, mask=(group < groups)[:, None])
    scales = (own + groups * of_group).to(tl.pointer_type(tl.uint16)) + group
    tl.store(scales, scale, mask=group < groups)
    tl.store(scales + groups, minimum, mask=group < groups)


@triton.jit
def values_at(head, cos, sin, column, there, dim, half, TURNS: tl.constexpr, WHOLE: tl.constexpr):
    place = column if WHOLE else tl.minimum(column, dim - 1)
    if TURNS:
        values = turned_values(head, cos, sin, place, there, half).to(tl.float32)
    else:
        values = as_float32(head + place, there)
    return values


@triton.jit(do_not_specialize_on_alignment=["newest", "texts"])
def append_coded_heads(
    image, q, k, v, cos, sin, out, positions, scores, noted_worth, worth, newest, texts, turned, heads, slots, dim, half,
    half_stride, row_stride, head_stride, slot_stride, q_row, q_head, k_row, k_head, v_row, v_head,
    TURNS: tl.constexpr, NOTES: tl.constexpr, SCORES: tl.constexpr, WORTH: tl.constexpr,
    BITS: tl.constexpr, GROUPS: tl.constexpr, WHOLE: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """The same order as in `append_heads`."""
    number, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(newest + row)
    if number < turned:
        if TURNS:
            query, as_turned = q + row * q_row + number * q_head, out + (row * turned + number) * dim
            turned_head(query, cos + row * half, sin + row * half, as_turned, dim, half, DIM)
    elif number < turned + heads:
        head = number - turned
        there = image + row * row_stride + head * head_stride + slot * slot_stride
        own = k + row * k_row + head * k_head
        coded_head(own, cos + row * half, sin + row * half, there, dim, half, TURNS, BITS, GROUPS, WHOLE)
        if NOTES:
            note_newest(positions, scores, noted_worth, worth, texts, row, head, heads, slots, slot, SCORES, WORTH)
    else:
        head = number - turned - heads
        there = image + half_stride + row * row_stride + head * head_stride + slot * slot_stride
        coded_head(v + row * v_row + head * v_head, cos, sin, there, dim, half, False, BITS, GROUPS, WHOLE)
