"""The one slot of every row and head that a step changed, keys and values side by side: on the way from an image to another."""

from __future__ import annotations

import torch
from torch import Tensor


def gather_slots_twin(image: Tensor, slots: Tensor, out: Tensor) -> None:
    row, head = _places(slots)
    out.copy_(image[:, row, head, slots])


def scatter_slots_twin(values: Tensor, slots: Tensor, image: Tensor) -> None:
    row, head = _places(slots)
    image[:, row, head, slots] = values


def _places(slots: Tensor) -> tuple[Tensor, Tensor]:
    rows, heads = slots.shape
    return torch.arange(rows, device=slots.device)[:, None], torch.arange(heads, device=slots.device)
