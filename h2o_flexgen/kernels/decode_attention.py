"""Attention of one new token per row over the slots it holds, and the attention each slot got. Attention of many queries over
one text that they share, and what it weighs beside other keys. In C and in torch.

The two differ in the last bits: C sums in another order, and keeps shares in float32. With queries of 16 bits and packed slots
it may work in fixed point of 16 bits, with a factor for each group of values: queries and shares are then off by less than
2^-16 of the largest in their group, where a bfloat16 is off by up to 2^-9 of itself. In tiles of registers packed latents
become bfloat16 first. Over a shared text a query's outcome is in float32, whatever it is made of.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.formats.kernel_sizes import DTYPES, SCORED_BYTES, ManyQueries, PromptRoom, TiledRoom
from h2o_flexgen.formats.kernel_table import MAX, SUM
from h2o_flexgen.formats.table import GROUPED, PLAIN
from h2o_flexgen.kernels.more_keys import More, MoreKeys
from h2o_flexgen.kernels.native import KINDS, ValuePlaces, pointer, run

PACKED_KINDS = {format.name: kind for kind, format in enumerate(GROUPED, start=len(DTYPES))}  # numbered after the plain kinds


class KVSlots(NamedTuple):
    """The keys or values of slots, (rows, kv_heads, slots, width): plain, or as the bytes of a format."""

    data: Tensor
    format: str = PLAIN


def decode_attention(
    q: Tensor,
    keys: KVSlots,
    values: KVSlots,
    held: Tensor,
    mask: Tensor,
    more: More | None = None,
    gathers: str | None = SUM,
    cap: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    rows, kv_heads, group, dim = q.shape
    assert more is None or more.values is None or more.values.shape == (rows, 1, kv_heads * group, dim)
    slots = keys.data.shape[2]
    if (laid := ManyQueries.of(group, slots, dim)) is not None:
        return _of_many(q, keys, values, held, more, gathers, cap, laid)
    q, is_wide, wide = q.contiguous(), q.dtype == torch.float32, partial(torch.empty, dtype=torch.float32)
    out, got, shares = torch.empty_like(q), wide(rows, kv_heads, slots), wide(rows, kv_heads, group, slots)
    as_wide = (q, out) if is_wide else (wide(q.shape), wide(q.shape))
    places = map(pointer, (held, out, *as_wide, got, shares))
    sizes = (rows, kv_heads, group, dim, slots)
    given = StepAttention(
        pointer(q),
        *(ValuePlaces.of(kept.data, kind_of(kept)) for kept in (keys, values)),
        MoreKeys.of(more),
        *places,
        *sizes,
        dim**-0.5,
        KINDS[q.dtype],
        gathers == MAX,
        cap or 0.0,
        None,
    )
    run("decode_attention", given, torch.get_num_threads())
    return out, got if gathers else None


def _of_many(
    q: Tensor,
    keys: KVSlots,
    values: KVSlots,
    held: Tensor,
    more: More | None,
    gathers: str | None,
    cap: float | None,
    laid: ManyQueries,
) -> tuple[Tensor, Tensor | None]:
    (rows, kv_heads, group, dim), slots, threads = q.shape, keys.data.shape[2], torch.get_num_threads()
    q, wide = q.contiguous(), partial(torch.empty, dtype=torch.float32)
    out, got = torch.empty_like(q), wide(rows, kv_heads, slots) if gathers else None
    shares = wide(laid.kept(rows * kv_heads) if gathers else laid.passing(threads))
    room = wide(threads, laid.room.end)
    given = _Many(
        pointer(q),
        *(ValuePlaces.of(kept.data, kind_of(kept)) for kept in (keys, values)),
        MoreKeys.of(more),
        *(pointer(held), pointer(out), None if got is None else pointer(got), pointer(shares), pointer(room)),
        *laid.room,
        *laid.tiled,
        *(rows, kv_heads, group, dim, slots, laid.queries, laid.stride),
        dim**-0.5,
        KINDS[q.dtype],
        gathers == MAX,
        cap or 0.0,
    )
    run("many_queries", given, threads)
    return out, got


def kind_of(kept: KVSlots) -> int:
    return KINDS[kept.data.dtype] if kept.format == PLAIN else PACKED_KINDS[kept.format]


def decode_attention_twin(
    q: Tensor,
    keys: KVSlots,
    values: KVSlots,
    held: Tensor,
    mask: Tensor,
    more: More | None = None,
    gathers: str | None = SUM,
    cap: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    # over all slots, with empty ones masked: a slice is not contiguous, and bf16 products of it are 4 times slower
    scores = _scores(q, keys.data)
    scores = (scores if cap is None else scores.div_(cap).tanh_().mul_(cap)).add_(mask)
    if more is not None:
        scores = torch.cat((scores, more.scores.view(*q.shape[:3], 1)), dim=-1)
    shares = torch.softmax(scores, dim=-1)  # (rows, kv_heads, group, slots)
    if more is None:
        return torch.matmul(shares.to(values.data.dtype), values.data), _gathered(shares, gathers)
    shares, share = shares.split((mask.shape[-1], 1), dim=-1)
    out = torch.matmul(shares.to(values.data.dtype), values.data)
    if more.values is not None:
        out = out.float().addcmul_(share, more.values.view(q.shape))
    return out.to(q.dtype), _gathered(shares, gathers)


def _gathered(shares: Tensor, gathers: str | None) -> Tensor | None:
    return None if gathers is None else shares.amax(2) if gathers == MAX else shares.sum(2)


def _scores(q: Tensor, keys: Tensor) -> Tensor:
    """Scaled scores in float32. A product in 16 bits comes out rounded to them, so it is scaled before: float16 ends at 65504,
    which the products of some models exceed."""
    scale = q.shape[-1] ** -0.5
    if q.itemsize > 2:
        return torch.matmul(q, keys.transpose(2, 3)).float().mul_(scale)
    scaled = torch.baddbmm(q.new_zeros(()), q.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2), beta=0, alpha=scale)
    return scaled.float().view(*q.shape[:3], -1)


class _Many(ctypes.Structure):
    _fields_ = (
        ("q", ctypes.c_void_p),
        *((name, ValuePlaces) for name in ("keys", "values")),
        ("more", MoreKeys),
        *((name, ctypes.c_void_p) for name in ("held", "out", "got", "shares", "room")),
        *((f"wide_{name}", ctypes.c_long) for name in PromptRoom._fields),
        *((f"tiled_{name}", ctypes.c_long) for name in TiledRoom._fields),
        *((name, ctypes.c_long) for name in ("rows", "kv_heads", "group", "dim", "capacity", "queries", "stride")),
        ("scale", ctypes.c_float),
        ("kind", ctypes.c_int),
        ("is_highest", ctypes.c_int),
        ("cap", ctypes.c_float),
    )


class StepAttention(ctypes.Structure):
    """What C attends slots with, the first ones or those at `places`."""

    _fields_ = (
        ("q", ctypes.c_void_p),
        ("keys", ValuePlaces),
        ("values", ValuePlaces),
        ("more", MoreKeys),
        *((name, ctypes.c_void_p) for name in ("held", "out", "wide_q", "wide_out", "got", "shares")),
        *((name, ctypes.c_long) for name in ("rows", "kv_heads", "group", "dim", "capacity")),
        ("scale", ctypes.c_float),
        ("kind", ctypes.c_int),
        ("is_highest", ctypes.c_int),
        ("cap", ctypes.c_float),
        ("places", ctypes.c_void_p),
    )


# -- over a text that is shared --------------------------------------------------------------------------------------------


def shared_attention(q: Tensor, keys: KVSlots, values: KVSlots, cap: float | None = None) -> More:
    queries, heads, dim = q.shape
    kv_heads, length = keys.data.shape[:2]
    assert keys.format == values.format and keys.data.shape == values.data.shape and length
    out = torch.empty(1, queries, heads, dim, dtype=torch.float32)
    scores = torch.empty(1, queries, heads, dtype=torch.float32)
    threads, laid = torch.get_num_threads(), PromptRoom.of_shared(dim)
    room = torch.empty(threads, laid.end, dtype=torch.float32)
    given = _Sharing(
        ValuePlaces.of(q.transpose(0, 1)[None], KINDS[q.dtype]),
        *(ValuePlaces.of(kept.data[None], kind_of(kept)) for kept in (keys, values)),
        *(pointer(x) for x in (out, scores, room)),
        *laid,
        *(queries, heads, kv_heads, length, dim),
        dim**-0.5,
        cap or 0.0,
    )
    run("shared_attention", given, threads)
    return More(scores, out)


def shared_attention_twin(q: Tensor, keys: KVSlots, values: KVSlots, cap: float | None = None) -> More:
    """At most SCORED_BYTES of scores are held at once."""
    queries, heads, dim = q.shape
    kv_heads, length = keys.data.shape[:2]
    k, v = keys.data.float(), values.data.float()
    out = torch.empty(1, queries, heads, dim, dtype=torch.float32, device=q.device)
    scores_of_all = torch.empty(1, queries, heads, dtype=torch.float32, device=q.device)
    at_once = max(1, SCORED_BYTES // (4 * heads * length))
    for start in range(0, queries, at_once):
        some = q[start : start + at_once].float().view(-1, kv_heads, heads // kv_heads, dim).transpose(0, 1)
        scores = (some.reshape(kv_heads, -1, dim) @ k.transpose(1, 2)).mul_(dim**-0.5)
        scores = scores if cap is None else scores.div_(cap).tanh_().mul_(cap)
        weight = scores.logsumexp(-1, keepdim=True)
        made = scores.sub_(weight).exp_() @ v  # (kv_heads, queries * group, dim)
        for target, found in ((out, made), (scores_of_all[..., None], weight)):
            spread = found.view(kv_heads, len(some[0]), -1, found.shape[-1]).transpose(0, 1)
            target[0, start : start + at_once] = spread.reshape(-1, heads, found.shape[-1])
    return More(scores_of_all, out)


class _Sharing(ctypes.Structure):
    _fields_ = (
        *((name, ValuePlaces) for name in ("q", "keys", "values")),
        *((name, ctypes.c_void_p) for name in ("out", "scores", "room")),
        *((f"wide_{name}", ctypes.c_long) for name in PromptRoom._fields),
        *((name, ctypes.c_long) for name in ("queries", "heads", "kv_heads", "length", "dim")),
        ("scale", ctypes.c_float),
        ("cap", ctypes.c_float),
    )
