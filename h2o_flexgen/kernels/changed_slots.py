"""The one slot of every row and head that a step changed, between one image and another: bytes that are copied at once.

The numbers of these slots come first, then their keys, then their values."""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from h2o_flexgen.kernels.raw_memory import numpy_of

NUMBER = torch.int64


class ChangedSlots:
    """What the host does with the gathered bytes of some rows, where an image lies token by token: (slots, 2, rows, heads) runs
    of bytes. Made once for all layers: it knows where the first slot of every row and head lies."""

    def __init__(self, rows: int, shape: tuple[int, int, int], slot_bytes: int) -> None:
        """`shape`: the rows, heads and slots of the image; `slot_bytes`: bytes of one slot of all its rows."""
        all_rows, heads, slots = shape
        runs = 2 * all_rows * heads
        self._runs, self._image_bytes = runs, slots * slot_bytes
        self._run = numpy.dtype((numpy.void, slot_bytes // runs))
        self._slots = torch.Size((rows, heads))
        self._first = numpy.arange(runs).reshape(2, all_rows * heads)[:, : rows * heads]
        self._numbers_bytes = rows * heads * NUMBER.itemsize
        self.value_bytes = rows * slot_bytes // all_rows
        self.nbytes = self._numbers_bytes + self.value_bytes

    def numbers(self, gathered: Tensor) -> Tensor:
        return gathered[: self._numbers_bytes].view(NUMBER).view(self._slots)

    def bring(self, gathered: Tensor, home: Tensor) -> None:
        """Brings keys and values to the slots of the image, by numpy, as it is a matter of microseconds."""
        there, runs = numpy_of(gathered), numpy_of(home[: self._image_bytes], writes=True).view(self._run)
        numbers = there[: self._numbers_bytes].view(numpy.int64)
        runs[numbers * self._runs + self._first] = there[self._numbers_bytes :].view(self._run).reshape(self._first.shape)


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
