"""Slots that are only moved, as the widest whole words that they are made of: fewer and wider loads, and no value is read."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)  # widest first


def as_words(*slots: Tensor) -> Iterator[Tensor]:
    """Views of values of one type (..., width), each side by side in the last dimension, as words of one type."""
    return (each.view(_widest(slots)) for each in slots)


def _widest(slots: tuple[Tensor, ...]) -> torch.dtype:
    return next(word for word in WORDS if all(_made_of(each, word.itemsize) for each in slots))


def _made_of(slots: Tensor, nbytes: int) -> bool:
    """Whether every slot begins at a whole word of this size and ends with one. A dimension of one place has no stride."""
    assert slots.stride(-1) == 1
    steps = [stride for size, stride in zip(slots.shape[:-1], slots.stride()) if size > 1]
    return all(each * slots.itemsize % nbytes == 0 for each in (slots.shape[-1], slots.storage_offset(), *steps))
