"""Judges: how much a token is worth to a KV head, estimated when the token is written, before any query has attended to it. A
policy ranks by this worth, or weighs the attention that the token gets with it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.operations import add_scaled, lengths, steady_product, take_rows
from h2o_flexgen.policies.by_judge import KeyDiff, KNorm, LagKV
from h2o_flexgen.policies.policy import VALUE_NORMS, KVPolicy


class Written(NamedTuple):
    """New tokens of each row, as a judge sees them. Pads may follow them."""

    x: Tensor | None  # (rows, tokens, width): the input from which the layer makes queries, keys and values
    k: Tensor  # (rows, tokens, kv_heads, head_dim), as they are kept, before they are packed; in decode if a judge reads keys
    v: Tensor  # alike
    counts: Sequence[int]  # tokens of each row, without pads


class Held(NamedTuple):
    """Tokens held before a pass of several tokens, oldest first. In a row that has fewer, the places after them are
    arbitrary."""

    keys: Tensor  # (rows, kv_heads, held, head_dim), as they are kept, unpacked
    values: Tensor  # alike
    worth: Tensor  # (rows, kv_heads, held), fp32
    counts: Sequence[int]  # tokens that each row has


class Judge(ABC):
    reads_input = False  # whether it needs the input from which the layer makes keys
    reads_new_key = False  # whether it needs the newest token's key in decode, as it is kept

    def of_heads(self, heads: Tensor) -> Judge:
        """The judge of some of the layer's KV heads, by their numbers."""
        return self

    @abstractmethod
    def newest(self, new: Written) -> Tensor:
        """The worth of each row's only new token, in decode. (rows, kv_heads), fp32"""

    @abstractmethod
    def of_all(self, new: Written, held: Held | None) -> Tensor:
        """The worth of held tokens, and then of new tokens, after a pass of several tokens. (rows, kv_heads, held + tokens),
        fp32"""


class OneByOne(Judge):
    """Gives each token its worth independently of the others, once and for all."""

    @abstractmethod
    def of_new(self, new: Written) -> Tensor:
        """The worth of new tokens. (rows, tokens, kv_heads), fp32"""

    def newest(self, new: Written) -> Tensor:
        return self.of_new(new)[:, 0].contiguous()

    def of_all(self, new: Written, held: Held | None) -> Tensor:
        own = self.of_new(new).transpose(1, 2)
        return own if held is None else torch.cat((held.worth, own), dim=-1)


UNJUDGED = torch.finfo(torch.float32).min  # below all judged tokens, but above minus infinity, the rank of empty places


class JudgeOfRows(Judge):
    """Compares the tokens of a row with each other, after every pass of several tokens. Decode steps only add
    tokens that are not judged yet: comparing would need all keys of all layers at every step. These tokens are evicted
    first once nothing protects them, or else a long answer would evict all tokens that were judged (docs/log/eviction.md)."""

    @abstractmethod
    def of_row(self, keys: Tensor, values: Tensor) -> Tensor:
        """The worth of each token of a row, (kv_heads, tokens) in fp32. keys, values: (kv_heads, tokens, head_dim), oldest
        first."""

    def newest(self, new: Written) -> Tensor:
        rows, _, heads, _ = new.k.shape
        return new.k.new_full((rows, heads), UNJUDGED, dtype=torch.float32)

    def of_all(self, new: Written, held: Held | None) -> Tensor:
        """Judges row by row, so that a row does not depend on others, and the working memory is that of one row."""
        rows, tokens, heads, _ = new.k.shape
        first = 0 if held is None else held.keys.shape[2]
        worth = new.k.new_zeros((rows, heads, first + tokens), dtype=torch.float32)
        for row, count in enumerate(new.counts):
            keys, values = (each[row, :count].transpose(0, 1) for each in (new.k, new.v))
            before = 0 if held is None else held.counts[row]
            if held is not None:
                keys = torch.cat((held.keys[row, :, :before], keys), dim=1)
                values = torch.cat((held.values[row, :, :before], values), dim=1)
            judged = self.of_row(keys, values)
            worth[row, :, :before] = judged[:, :before]
            worth[row, :, first : first + count] = judged[:, before:]
        return worth


class KeyDifference(JudgeOfRows):
    """A token is worth more the less its key resembles the others: minus the cosine between it and the mean of their
    directions."""

    def of_row(self, keys: Tensor, values: Tensor) -> Tensor:
        directions = normalize(keys.float(), dim=-1)
        mean = normalize(directions.mean(dim=1), dim=-1)
        return -(directions @ mean.unsqueeze(-1)).squeeze(-1)


SHORTEST, LONGEST = 4, 128  # tokens of a part
TWENTIETH = 20  # the share of a text that a part is between these
UNMEASURED = torch.finfo(torch.float32).max  # the newest tokens have no next part to be measured by: they stay


class Lag(JudgeOfRows):
    """A token is worth more the more unevenly its key and its value lie, channel by channel, in the ranges that the tokens of
    the next part of the text span."""

    def __init__(self, sinks: int) -> None:
        """`sinks`: the first tokens, which stay whatever their worth and belong to no part."""
        self._sinks = sinks

    def of_row(self, keys: Tensor, values: Tensor) -> Tensor:
        worth = torch.full(keys.shape[:2], UNMEASURED, dtype=torch.float32, device=keys.device)
        tokens = keys.shape[1] - self._sinks
        length = min(LONGEST, max(SHORTEST, tokens // TWENTIETH))
        parts = tokens // length
        if parts > 1:
            first, last = self._sinks, self._sinks + parts * length
            in_parts = (each[:, first:last].unflatten(1, (parts, length)) for each in (keys, values))
            worth[:, first : last - length] = sum(map(_unevenness, in_parts))
        return worth


def _unevenness(x: Tensor) -> Tensor:
    """How unevenly the tokens of x (kv_heads, parts, length, head_dim) lie, as shares of their part; those of the last part are
    left out. (kv_heads, tokens), fp32"""
    x = x.float()
    least, most = x[:, 1:].aminmax(dim=2, keepdim=True)
    span = most - least
    lies = torch.where(span == 0, 0.0, (x[:, :-1] - least) / span)  # a channel without a range says nothing
    return lies.std(dim=-1).softmax(dim=-1).flatten(1)


class ValueNorms(OneByOne):
    """A token is worth the length of its value: a token with a short value changes the outcome of attention little, however
    much attention it gets."""

    def of_new(self, new: Written) -> Tensor:
        return lengths(new.v)


class KeyNorms(OneByOne):
    """A token is worth more the shorter its key is: the keys that get most attention are short."""

    reads_new_key = True

    def of_new(self, new: Written) -> Tensor:
        return add_scaled(lengths(new.k), scale=-1.0)


class Linear(OneByOne):
    """A token's worth is a linear map of the layer's input; the map was fitted to what tokens turned out to be worth."""

    reads_input = True

    def __init__(self, weight: Tensor, bias: Tensor, heads: Tensor | None = None) -> None:
        """weight (kv_heads, width) and bias (kv_heads,) in fp32; `heads`: the numbers of the heads to judge; None: all."""
        self._weight, self._bias, self._heads = weight, bias, heads

    def of_new(self, new: Written) -> Tensor:
        assert new.x is not None, "a layer hands over the input of its keys"
        worth = steady_product(Factor(new.x.float()), self._weight, self._bias)
        return worth if self._heads is None else take_rows(worth, self._heads, axis=2)

    def of_heads(self, heads: Tensor) -> Linear:
        return Linear(self._weight, self._bias, heads)


def judge_of(policy: KVPolicy) -> Judge | None:
    """The judge that a policy asks, of any layer; None if it asks none, or one that was fitted to a model."""
    if policy.judge == LagKV.ranks_by:
        return Lag(policy.sinks)
    known: dict[str | None, Callable[[], Judge]] = {
        VALUE_NORMS: ValueNorms,
        KeyDiff.ranks_by: KeyDifference,
        KNorm.ranks_by: KeyNorms,
    }
    return known[policy.judge]() if policy.judge in known else None
