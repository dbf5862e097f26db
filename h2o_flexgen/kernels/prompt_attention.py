"""Attention of the tokens of a prompt, and what each key got from them, in C and in torch.

The two differ in the last bits: C sums in another order, and keeps scores and shares in float32. In C a row's outcome depends
only on the row itself and on the largest number of earlier keys in its batch.
"""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as functional
from torch import Tensor

from h2o_flexgen.formats.kernel_sizes import SCORED_BYTES, PromptRoom, mask_bytes, prompt_threads
from h2o_flexgen.formats.kernel_table import MAX, SUM
from h2o_flexgen.kernels.column_sums import Near, column_sums, outcome_and_sums
from h2o_flexgen.kernels.more_keys import More, MoreKeys
from h2o_flexgen.kernels.native import KINDS, ValuePlaces, native_library, pointer


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
    threads, laid = prompt_threads(rows, kv_heads, torch.get_num_threads()), PromptRoom.of(keys, dim)
    room = torch.empty(threads, laid.end, dtype=torch.float32)
    given = _Prompt(
        *(ValuePlaces.of(x, KINDS[x.dtype]) for x in (q, k, v)),
        pointer(before),
        *(None if x is None else pointer(x) for x in (weights, out, got)),
        MoreKeys.of(more),
        pointer(room),
        *laid,
        *(rows, heads, kv_heads, tokens, keys, dim, window or keys),
        dim**-0.5,
        gathers == MAX,
        cap or 0.0,
    )
    native_library().prompt_attention(ctypes.byref(given), ctypes.c_int(threads))
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
    if more is not None or cap is not None:
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
        *((name, ctypes.c_void_p) for name in ("before", "weights", "out", "got")),
        ("more", MoreKeys),
        ("room", ctypes.c_void_p),
        *((f"wide_{name}", ctypes.c_long) for name in PromptRoom._fields),
        *((name, ctypes.c_long) for name in ("rows", "heads", "kv_heads", "new_tokens", "all_tokens", "dim", "window")),
        ("scale", ctypes.c_float),
        ("is_highest", ctypes.c_int),
        ("cap", ctypes.c_float),
    )
