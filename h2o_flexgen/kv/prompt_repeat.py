"""The echo of a prompt: its tokens again after it. They attend to the prompt, and show how much each of its tokens is needed.

Tokens of the echo are computed in the same pass as the prompt, layer by layer. They see what the prompt's tokens see, the
prompt, and their own part of the echo up to themselves. No other tokens see them, and nothing of them is kept.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.formats.kernel_table import MAX
from h2o_flexgen.kernels.more_keys import More
from h2o_flexgen.kernels.operations import prompt_attention
from h2o_flexgen.kv.step import EchoPart, KVStep


class _EchoedTokens(NamedTuple):
    """Tokens, followed by their echo."""

    q: Tensor  # (rows, heads, 2 * tokens, dim)
    k: Tensor  # (rows, kv_heads, held + 2 * tokens, dim)
    v: Tensor  # alike
    more: More | None
    window: int | None
    cap: float | None


def attend_with_echo(
    now: KVStep, q: Tensor, k: Tensor, v: Tensor, more: More | None, window: int | None = None, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of prompts and of the echo after them, with the keys and values of the tokens held before both: q (rows, heads,
    2 * tokens, dim), k and v (rows, kv_heads, held + 2 * tokens, dim) -> (rows, 2 * tokens, heads * dim), and the highest share
    of attention that a token of the echo gave to each held and new token, (rows, kv_heads, held + tokens) in fp32."""
    given, (rows, heads, both, dim) = _EchoedTokens(q, k, v, more, window, cap), q.shape
    tokens, places = both // 2, k.shape[2] - both // 2
    out = q.new_empty(rows, both, heads * dim)
    prompt, seen = slice(tokens), slice(places)
    of_prompt = q[:, :, prompt], k[:, :, seen], v[:, :, seen]
    out[:, prompt], _ = prompt_attention(*of_prompt, now.counts, None, _part(more, prompt), window=window, cap=cap)
    got = torch.zeros(*k.shape[:2], places, dtype=torch.float32, device=k.device)
    for part in now.echo:
        own = slice(None) if part.rows is None else part.rows
        queries = slice(tokens + part.places.start, tokens + part.places.stop)
        out[own, queries], shares = _attended(now, given, part, queries, places)
        got[own] = torch.maximum(got[own], shares[..., :places])
    return out, got.gather(-1, now.turn_of_place.expand(got.shape)) if now.has_gaps else got


def _attended(now: KVStep, given: _EchoedTokens, part: EchoPart, queries: slice, places: int) -> tuple[Tensor, Tensor]:
    """The outcome for the tokens of a part, and the attention that all tokens before them get, in the order of the text."""
    q, k, v = (x if part.rows is None else x[part.rows] for x in given[:3])
    behind = slice(places + part.places.start, places + part.places.stop)
    keys, values = (torch.cat((_in_turn(now, part, x[:, :, :places]), x[:, :, behind]), dim=2) for x in (k, v))
    more = _part(given.more, queries, part.rows)
    out, shares = prompt_attention(
        q[:, :, queries], keys, values, part.before, part.weights, more, MAX, given.window, given.cap
    )
    assert shares is not None, "there are weights"
    return out, shares


def _in_turn(now: KVStep, part: EchoPart, x: Tensor) -> Tensor:
    """Keys or values of held and new tokens, (rows, kv_heads, held + tokens, dim), without gaps between the two."""
    if not now.has_gaps:
        return x
    index = now.places_in_turn if part.rows is None else now.places_in_turn[part.rows]
    return x.gather(2, index[..., None].expand(x.shape))


def _part(more: More | None, queries: slice, rows: Tensor | None = None) -> More | None:
    if more is None:
        return None
    return more.each(lambda x: (x[:, queries] if rows is None else x[rows, queries]).contiguous())
