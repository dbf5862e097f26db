"""Reading: one prompt that is computed piece by piece within a visit, because a layer's intermediate values for all its tokens
would take too much memory. A piece attends to all tokens before it, and to itself. The attention that tokens get is gathered
over all pieces, so that kept tokens are chosen as if the prompt had been computed at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from h2o_flexgen.formats.kernel_table import MAX, SUM
from h2o_flexgen.kernels.more_keys import More
from h2o_flexgen.kernels.operations import prompt_attention
from h2o_flexgen.kv.judges import Written
from h2o_flexgen.kv.step import KVStep


@dataclass
class PromptReading:
    now: KVStep  # of one row
    keys: Tensor  # (1, kv_heads, places, head_dim), as attended: held tokens, new tokens, and room for a part of an echo
    values: Tensor  # alike
    unrotated: Tensor | None  # (1, kv_heads, new tokens, head_dim), if keys are kept so
    x: Tensor | None  # (1, new tokens, width), if a judge needs it
    got: Tensor | None = None  # (1, kv_heads, held and new tokens), fp32: the attention that each got so far
    done: int = 0  # tokens that were computed

    @classmethod
    def of(cls, now: KVStep, k: Tensor, is_kept_unrotated: bool, x: Tensor | None) -> PromptReading:
        """`k` (1, tokens, kv_heads, head_dim) and `x` are those of any piece."""
        (heads, dim), new = k.shape[2:], now.slots.new[0]
        echo = max((part.places.stop - part.places.start for part in now.echo), default=0)
        keys, values = (k.new_empty(1, heads, now.held + new + echo, dim) for _ in range(2))
        unrotated = k.new_empty(1, heads, new, dim) if is_kept_unrotated else None
        return cls(now, keys, values, unrotated, None if x is None else x.new_empty(1, new, x.shape[-1]))

    def begin_behind(self, keys: Tensor, values: Tensor) -> None:
        """Copies in the tokens held, (1, kv_heads, held, head_dim)."""
        self.keys[:, :, : self.now.held], self.values[:, :, : self.now.held] = keys, values

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
        self.keys[:, :, first:last], self.values[:, :, first:last] = k, v
        seen = self.keys[:, :, :last], self.values[:, :, :last]
        out, shares = prompt_attention(q, *seen, before, own, more, gathers, window, cap)
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
