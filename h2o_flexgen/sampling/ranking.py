"""Ranking: the likeliest tokens of each row of a batch, a few rows at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

VALUES_AT_ONCE = 2**20  # per temporary in float64: 8 MiB, whatever the batch and the vocabulary


def portions(places: Sequence[int], vocab: int) -> Iterator[Sequence[int]]:
    """Splits the rows into portions small enough for small temporaries."""
    at_once = max(1, VALUES_AT_ONCE // vocab)
    return (places[start : start + at_once] for start in range(0, len(places), at_once))


def kth_largest(values: Tensor, counts: Sequence[int]) -> Tensor:
    """Each row's k-th largest value, minus infinity where k is 0. (rows, 1)"""
    if not any(counts):
        return torch.full_like(values[:, :1], -math.inf)
    top = torch.nn.functional.pad(values.topk(max(counts), dim=-1).values, (1, 0), value=-math.inf)
    return top.gather(-1, torch.tensor(counts, device=values.device)[:, None])


def ranked(values: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:
    """At least the values not below their row's floor, and their places: largest first, equal ones in order of place."""
    width = int((values >= floor).sum(dim=-1).max())
    places = values.topk(width, dim=-1).indices.sort(dim=-1).values  # topk leaves the order of equal values open
    top, order = values.gather(-1, places).sort(dim=-1, descending=True, stable=True)
    return top, places.gather(-1, order)
