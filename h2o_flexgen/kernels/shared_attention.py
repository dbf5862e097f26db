"""Attention of many queries over one text that they share, and what it weighs beside other keys, in C and in torch.

The two differ in the last bits: C sums in another order. In both a query's outcome is in float32, whatever it is made of."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from h2o_flexgen.formats.kernel_sizes import SCORED_BYTES, PromptRoom
from h2o_flexgen.kernels.decode_attention import KVSlots, kind_of
from h2o_flexgen.kernels.more_keys import More
from h2o_flexgen.kernels.native import KINDS, ValuePlaces, pointer, run


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
