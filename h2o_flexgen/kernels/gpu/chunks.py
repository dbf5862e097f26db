"""The second pass of attention over chunks of slots: what the chunks gave becomes the outcome, in the order of the chunks.

A chunk gives for each query its largest score (`tops`), the sum of exponentials beside it (`totals`) and the values that these
weigh (`made`): (queries, chunks) or (queries, chunks, dim), in float32. Chunks have one size, and so a query's outcome depends
on nothing but its own slots.
"""

from __future__ import annotations

import triton
import triton.language as tl

from h2o_flexgen.kernels.gpu.softmax import exponential_of

TOGETHER = 16  # chunks that are read at once


@triton.jit
def softmax_of_chunks(
    tops: tl.tensor, totals: tl.tensor, more: tl.tensor, query: tl.tensor, chunks: tl.tensor, filled: tl.tensor,
    TOGETHER: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """The largest score of a query, and the sum of all exponentials beside it; `more` is the score of one more key."""
    top, place = more, tl.arange(0, TOGETHER)
    for start in range(0, filled, TOGETHER):
        chunk = start + place
        top = tl.maximum(top, tl.max(tl.load(tops + query * chunks + chunk, mask=chunk < filled, other=-float("inf")), 0))
    total = exponential_of(more, top)
    for start in range(0, filled, TOGETHER):
        chunk = start + place
        is_there = chunk < filled
        share = exponential_of(tl.load(tops + query * chunks + chunk, mask=is_there, other=-float("inf")), top)
        total += tl.sum(tl.load(totals + query * chunks + chunk, mask=is_there, other=0.0) * share, 0)
    return top, total


@triton.jit
def values_of_chunks(
    tops: tl.tensor, made: tl.tensor, top: tl.tensor, query: tl.tensor, chunks: tl.tensor, filled: tl.tensor,
    DIM: tl.constexpr, WIDTH: tl.constexpr, TOGETHER: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The values of all chunks, weighed by exponentials beside `top`. (WIDTH,)"""
    column, place = tl.arange(0, WIDTH), tl.arange(0, TOGETHER)
    out = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, filled, TOGETHER):
        chunk = start + place
        is_there = chunk < filled
        share = exponential_of(tl.load(tops + query * chunks + chunk, mask=is_there, other=-float("inf")), top)
        rows = made + ((query * chunks + chunk).to(tl.int64) * DIM)[:, None] + column[None, :]
        own = tl.load(rows, mask=is_there[:, None] & (column < DIM)[None, :], other=0.0)
        out += tl.sum(own * share[:, None], 0)
    return out
