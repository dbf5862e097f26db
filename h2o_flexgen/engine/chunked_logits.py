"""Logits of many positions of texts, some positions at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from h2o_flexgen.planning.plan import Plan

LogitsOf = Callable[[Tensor], Tensor]  # hidden (positions, width) -> (positions, vocab), in the dtype of the model
LOGITS_AT_ONCE = 2**22  # 16 MiB in fp32, whatever the texts and the vocabulary


def positions_at_once(plan: Plan, vocab: int) -> int:
    """How many positions have their logits made together. The plan counts those of a step of a batch in any case."""
    return max(plan.gpu_batch_size, LOGITS_AT_ONCE // vocab)


def side_by_side(pieces: Sequence[Tensor], positions: int) -> Iterator[Tensor]:
    """Joins states (tokens, width) into pieces of this many positions, and copies at most one piece at a time."""
    held: list[Tensor] = []
    room = positions
    for piece in pieces:
        while len(piece):
            held.append(piece[:room])
            room -= len(held[-1])
            piece = piece[len(held[-1]) :]
            if room == 0:
                yield torch.cat(held)
                held, room = [], positions
    if held:
        yield torch.cat(held)
