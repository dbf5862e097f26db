"""How prompts are read: one that is computed piece by piece within a visit, and the echo of a prompt: its tokens again after
it. They attend to the prompt, and show how much each of its tokens is needed.

Tokens of the echo are computed in the same pass as the prompt, layer by layer. They see what the prompt's tokens see, the
prompt, and their own part of the echo up to themselves. No other tokens see them, and nothing of them is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.formats.kernel_table import MAX, SUM
from h2o_flexgen.kernels.more_keys import More
from h2o_flexgen.kernels.operations import prompt_attention
from h2o_flexgen.kv.judges import Written
from h2o_flexgen.kv.step import EchoPart, KVStep
from h2o_flexgen.models.new_tokens import InHeads


def attention_of(in_heads: InHeads | None) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """What attends a prompt: with keys and values as they are kept, or with those that are made for heads."""
    return prompt_attention if in_heads is None else in_heads.attend


@dataclass
class PromptReading:
    """One prompt that is computed piece by piece within a visit, because a layer's intermediate values for all its
    tokens would take too much memory. A piece attends to all tokens before it, and to itself. The attention that tokens
    get is gathered over all pieces, so that kept tokens are chosen as if the prompt had been computed at once."""

    now: KVStep  # of one row
    keys: Tensor  # (1, kv_heads, places, head_dim), as attended: held tokens, new tokens, and room for a part of an echo
    values: Tensor  # alike, or these keys, where they have the values
    unrotated: Tensor | None  # (1, kv_heads, new tokens, head_dim), if keys are kept so
    x: Tensor | None  # (1, new tokens, width), if a judge needs it
    got: Tensor | None = None  # (1, kv_heads, held and new tokens), fp32: the attention that each got so far
    done: int = 0  # tokens that were computed

    @classmethod
    def of(cls, now: KVStep, k: Tensor, is_kept_unrotated: bool, x: Tensor | None, apart: bool = True) -> PromptReading:
        """`k` (1, tokens, kv_heads, head_dim) and `x` are those of any piece. `apart`: values are not in keys."""
        (heads, dim), new = k.shape[2:], now.slots.new[0]
        echo = max((part.places.stop - part.places.start for part in now.echo), default=0)
        keys = k.new_empty(1, heads, now.held + new + echo, dim)
        values = torch.empty_like(keys) if apart else keys
        unrotated = k.new_empty(1, heads, new, dim) if is_kept_unrotated else None
        return cls(now, keys, values, unrotated, None if x is None else x.new_empty(1, new, x.shape[-1]))

    def begin_behind(self, keys: Tensor, values: Tensor) -> None:
        """Copies in the tokens held, (1, kv_heads, held, head_dim)."""
        self._put(0, keys, values)

    def _put(self, first: int, keys: Tensor, values: Tensor) -> None:
        places = slice(first, first + keys.shape[2])
        self.keys[:, :, places] = keys
        if self.values is not self.keys:
            self.values[:, :, places] = values

    def next(self, tokens: int) -> slice:
        """The places of this many next tokens among all that are computed."""
        return slice(self.done, self.done + tokens)

    @property
    def is_over(self) -> bool:
        return self.done == self.now.tokens

    @property
    def written(self) -> Written:
        """The new tokens, as they are kept and as judges see them."""
        new = slice(self.now.held, self._places)
        keys = self.keys[:, :, new] if self.unrotated is None else self.unrotated
        return Written(self.x, keys.transpose(1, 2), self.values[:, :, new].transpose(1, 2), self.now.slots.new)

    @property
    def _new(self) -> int:
        return self.now.slots.new[0]

    @property
    def _places(self) -> int:
        return self.now.held + self._new

    def note(self, unrotated: Tensor, x: Tensor | None) -> None:
        """Records what will be needed of the next tokens when all are there; nothing is needed of an echo."""
        piece = self.next(unrotated.shape[1])
        if piece.stop > self._new:
            return
        if self.unrotated is not None:
            self.unrotated[:, :, piece] = unrotated.transpose(1, 2)
        if self.x is not None and x is not None:
            self.x[:, piece] = x

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        more: More | None,
        weights: Tensor | None,
        gathers: str = SUM,
        window: int | None = None,
        cap: float | None = None,
        in_heads: InHeads | None = None,
    ) -> Tensor:
        """Attention of the next tokens: q (1, heads, tokens, head_dim), k and v (1, kv_heads, tokens, head_dim) -> (1, tokens,
        heads * head_dim). `weights` (1, new tokens): how much each counts in the attention that tokens get. With an echo, all
        its tokens count and no others do."""
        piece = self.next(q.shape[2])
        first, own = self.now.held + piece.start, None if weights is None else weights[:, piece]
        if self.now.echo:
            own, gathers = None, MAX
        for part in self.now.echo:
            if part.places.start <= piece.start - self._new < part.places.stop:
                places = slice(piece.start - self._new - part.places.start, piece.stop - self._new - part.places.start)
                first, own = self._places + places.start, part.weights[:, places]
        last, before = first + q.shape[2], self.now.counts + (first - self.now.held)
        self._put(first, k, v)
        seen = self.keys[:, :, :last], self.values[:, :, :last]
        out, shares = attention_of(in_heads)(q, *seen, before, own, more, gathers, window, cap)
        if shares is not None:
            self._gather(shares, gathers)
        self.done = piece.stop
        return out

    def _gather(self, shares: Tensor, gathers: str) -> None:
        """Adds the attention that a piece gave, (1, kv_heads, keys), or keeps the higher of both."""
        if self.got is None:
            self.got = shares.new_zeros(*shares.shape[:2], self._places)
        shares = shares[..., : self._places]
        got = self.got[..., : shares.shape[-1]]
        got.copy_(torch.maximum(got, shares) if gathers == MAX else got + shares)


class _EchoedTokens(NamedTuple):
    """Tokens, followed by their echo."""

    q: Tensor  # (rows, heads, 2 * tokens, dim)
    k: Tensor  # (rows, kv_heads, held + 2 * tokens, dim)
    v: Tensor  # alike, or these keys, where they have the values
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
    q = given.q if part.rows is None else given.q[part.rows]
    keys = _seen(now, part, given.k, places)
    values = keys if given.v is given.k else _seen(now, part, given.v, places)
    more = _part(given.more, queries, part.rows)
    out, shares = prompt_attention(
        q[:, :, queries], keys, values, part.before, part.weights, more, MAX, given.window, given.cap
    )
    assert shares is not None, "there are weights"
    return out, shares


def _seen(now: KVStep, part: EchoPart, x: Tensor, places: int) -> Tensor:
    """Keys or values of the tokens that a part of an echo sees, those of the part last."""
    x = x if part.rows is None else x[part.rows]
    behind = slice(places + part.places.start, places + part.places.stop)
    return torch.cat((_in_turn(now, part, x[:, :, :places]), x[:, :, behind]), dim=2)


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
