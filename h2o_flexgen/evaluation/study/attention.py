"""The attention probabilities of a text that is read with everything kept, some queries at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from h2o_flexgen.kernels.column_sums import probabilities
from h2o_flexgen.kernels.sizes import SCORED_BYTES


class Attention(NamedTuple):
    """The attention of some neighbouring queries in one layer."""

    first: int  # the place of the first query in the text
    shares: Tensor  # (kv_heads, group, queries, keys up to the last of the queries), fp32; 0 for keys behind a query


def attention_in_blocks(q: Tensor, k: Tensor, held_bytes: int = SCORED_BYTES) -> Iterator[Attention]:
    """q (heads, tokens, dim), k (kv_heads, tokens, dim), both rotated. At most `held_bytes` of shares are held at once."""
    heads, tokens, dim = q.shape
    grouped, keys = q.view(1, len(k), heads // len(k), tokens, dim), k.unsqueeze(0)
    queries = max(1, held_bytes // (4 * heads * tokens))
    for start in range(0, tokens, queries):
        part = grouped[:, :, :, start : start + queries]
        end = start + part.shape[3]
        yield Attention(start, probabilities(part, keys[:, :, :end], None).view(len(k), -1, end - start, end))
