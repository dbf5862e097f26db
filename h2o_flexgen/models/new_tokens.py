"""What a layer hands over of its new tokens: to the function that attends, or to the states of rows.

How many keys are kept, and at which positions they stand, is the business of that function. How a state is kept, and whether
tokens stay in it, is the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from h2o_flexgen.kernels.append import RotationAngles
from h2o_flexgen.kernels.more_keys import More
from h2o_flexgen.kernels.operations import gated_delta, selective_scan, short_convolution, take_rows


class Rotation(Protocol):
    """How a model rotates queries and keys to their positions."""

    def turn(self, positions: Tensor, dtype: torch.dtype) -> RotationAngles:
        """How far tokens at these positions (rows, tokens) are turned, for values of this type."""

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (rows, tokens, heads, head_dim), turned so."""


class InHeads(Protocol):
    """What makes keys and values of each head of the one vector that a layer keeps of a token for all of them."""

    def pays(self, tokens: int, keys: int) -> bool:
        """Whether so many new tokens attend so many keys, themselves last, in fewer operations with them."""

    def without(self, tokens: NewTokens) -> NewTokens:
        """The same tokens with queries that attend the vectors as they are kept."""

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        before: Tensor,
        weights: Tensor | None,
        more: More | None,
        gathers: str,
        window: int | None,
        cap: float | None,
    ) -> tuple[Tensor, Tensor | None]:
        """As `prompt_attention` does with the vectors, but the outcome is as wide as the values of heads."""


@dataclass(frozen=True, eq=False)
class NewTokens:
    """The tokens of a pass in one layer."""

    q: Tensor  # (rows, tokens, heads, head_dim), as k unrotated
    k: Tensor  # (rows, tokens, kv_heads, head_dim)
    v: Tensor  # alike; where keys have their values in them, the keys
    rotation: Rotation | None = None  # of queries and keys, in rotary models
    x: Tensor | None = None  # (rows, tokens, width): what all three were made of, which may say what is worth keeping
    sink_scores: Tensor | None = None  # (heads,): part of the softmax of every query of a head; their shares are let go
    query_rotation: Rotation | None = None  # of queries, where it is another one, or keys are not rotated
    query_lengths: Rotation | None = None  # which turns none, and makes all values of queries longer
    query_norm: Callable[[Tensor], Tensor] | None = None  # of queries that are rotated, where they have one
    in_heads: InHeads | None = None  # queries are those of heads, which attend keys that this makes; or `without` it

    @property
    def of_queries(self) -> Rotation | None:
        return self.query_rotation or self.rotation

    @property
    def turns_queries_apart(self) -> bool:
        """Whether more than a rotation that keys have, too, is done to queries."""
        return self.query_rotation is not None or self.query_lengths is not None or self.query_norm is not None

    def part(self, tokens: slice) -> NewTokens:
        """Some of the tokens."""
        x = None if self.x is None else self.x[:, tokens]
        return replace(self, q=self.q[:, tokens], k=self.k[:, tokens], v=self.v[:, tokens], x=x)

    def of_rows(self, rows: slice) -> NewTokens:
        """All tokens of some rows."""
        x = None if self.x is None else self.x[rows]
        return replace(self, q=self.q[rows], k=self.k[rows], v=self.v[rows], x=x)

    def of_heads(self, heads: Tensor) -> NewTokens:
        """Some KV heads, with the queries of their groups."""
        kv_heads, sinks = self.k.shape[2], self.sink_scores
        q, k, v = (picked(each, heads, kv_heads) for each in (self.q, self.k, self.v))
        own_sinks = None if sinks is None else take_rows(sinks.view(kv_heads, -1), heads).flatten()
        return replace(self, q=q, k=k, v=v, sink_scores=own_sinks)


# Appends the new keys and values, and attends to them and to all that is held: (rows, tokens, heads * head_dim). Scores are
# scaled by head_dim ** -0.5.
Attend: TypeAlias = Callable[[NewTokens], Tensor]


def by_kv_head(x: Tensor, kv_heads: int) -> Tensor:
    """(rows, tokens, heads, ...) as (rows, tokens, kv_heads, group, ...)"""
    return x.view(*x.shape[:2], kv_heads, -1, *x.shape[3:])


def picked(x: Tensor, heads: Tensor, kv_heads: int) -> Tensor:
    """The groups of some KV heads of (rows, tokens, heads, ...)."""
    return take_rows(by_kv_head(x, kv_heads), heads, axis=2).flatten(2, 3)


# -- the states of rows --------------------------------------------------------------------------------------------------

# what tokens bring, each (rows, tokens, ...); the state; how many tokens of each row are real; whether it stays as it was
Passing = Callable[[Sequence[Tensor], Tensor, "Tensor | None", bool], Tensor]


@dataclass(frozen=True)
class RowStates:
    """The states of rows in a layer, as an architecture passes tokens through them: it names a state and says what
    they bring."""

    by_name: Mapping[str, Tensor] = field(default_factory=dict)  # they are changed in place
    lengths: Tensor | None = None  # (rows,): tokens of each row that are no pads; None: all

    def convolve(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None = None, is_activated: bool = True) -> Tensor:
        def passing(brought: Sequence[Tensor], state: Tensor, lengths: Tensor | None, is_trial: bool) -> Tensor:
            return short_convolution(brought[0], weight, bias, state, lengths, is_activated, is_trial)

        return self.passed(name, (x,), passing)

    def correct(
        self, name: str, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, is_tiled: bool = False
    ) -> Tensor:
        """What the gated delta rule makes of tokens. Each value of a key may have a decay."""

        def passing(brought: Sequence[Tensor], state: Tensor, lengths: Tensor | None, is_trial: bool) -> Tensor:
            q, k, v, decay, beta = brought
            return gated_delta(q, k, v, decay, beta, state, lengths, is_tiled, is_trial)

        return self.passed(name, (q, k, v, decay, beta), passing)

    def scan(
        self,
        name: str,
        x: Tensor,
        steps: Tensor,
        rates: Tensor,
        b: Tensor,
        c: Tensor,
        skip: Tensor | None,
        are_logs: bool = False,
    ) -> Tensor:
        """What the scan of Mamba-2 makes of tokens."""

        def passing(brought: Sequence[Tensor], state: Tensor, lengths: Tensor | None, is_trial: bool) -> Tensor:
            x, steps, b, c = brought
            return selective_scan(x, steps, rates, b, c, skip, state, lengths, are_logs, is_trial)

        return self.passed(name, (x, steps, b, c), passing)

    def passed(self, name: str, brought: Sequence[Tensor], passing: Passing) -> Tensor:
        """What tokens make of a state, and find there."""
        return passing(brought, self.by_name[name], self.lengths, False)
