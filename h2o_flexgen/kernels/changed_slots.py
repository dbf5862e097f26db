"""The one slot of every row and head that a step changed, between one image and another: bytes that are copied at once.

The numbers of these slots come first, then their keys, then their values."""

from __future__ import annotations

import torch
from torch import Tensor

NUMBER = torch.int64


def parts(gathered: Tensor, slots: torch.Size, width: int, kept: torch.dtype) -> tuple[Tensor, Tensor]:
    """The numbers (rows, heads), and keys and values (2, rows, heads, width) of this type, in gathered bytes."""
    numbers = slots.numel() * NUMBER.itemsize
    end = numbers + 2 * slots.numel() * width * kept.itemsize
    return gathered[:numbers].view(NUMBER).view(slots), gathered[numbers:end].view(kept).view(2, *slots, width)


def gather_slots_twin(image: Tensor, slots: Tensor, out: Tensor) -> None:
    numbers, values = parts(out, slots.shape, image.shape[-1], image.dtype)
    row, head = (torch.arange(count, device=image.device) for count in slots.shape)
    numbers.copy_(slots)
    values.copy_(image[:, row[:, None], head, slots])
