"""Matrices of 4-bit codes in an order that no product reads, converted once to the order of `Int4`.

Words are read some rows at a time; only the outcome and that part are held.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from h2o_flexgen.checkpoints.file_reading import PART_BYTES, read_rows, read_whole
from h2o_flexgen.checkpoints.quantisation import AWQ, COMPRESSED, GPTQ
from h2o_flexgen.checkpoints.safetensors_format import FLOATS
from h2o_flexgen.checkpoints.stored_tensors import StoredTensor
from h2o_flexgen.checkpoints.unpacking import (
    PER_WORD,
    awq_codes,
    awq_zeros,
    compressed_zeros,
    gptq_codes,
    gptq_zeros,
    in_order,
    order_of,
)
from h2o_flexgen.formats.int4 import MIDDLE, Int4
from h2o_flexgen.kernels.stored_values import sections_of

WORD = "I32"


@dataclass(frozen=True)
class Importing:
    """Fills the bytes of `format` from the tensors of a file."""

    method: str
    format: Int4
    shape: tuple[int, int]
    words: StoredTensor
    scales: StoredTensor
    zeros: StoredTensor | None = None
    groups: StoredTensor | None = None  # the group of each input, where the format is ordered
    group: int = 0  # inputs that share a scale in the file: a multiple of the format's
    zeros_one_less: bool = False

    @property
    def description(self) -> str:
        """All that the outcome depends on beside the files and the format."""
        return f"{self.method}{' less one' if self.zeros_one_less else ''} {self.group}"

    def __call__(self, out: Tensor) -> None:
        out.zero_()  # what lies between sections, too
        outputs, inputs = self.shape
        sections = sections_of(self.format, out.view(1, -1), outputs, inputs)
        codes = sections[0].view(outputs, -1)
        _CODES[self.method](self.words, codes)
        scales = self._for_each_group(self._by_outputs(self.scales))
        sections[1].copy_(scales.flatten().view(torch.uint8))
        if self.format.zeros:
            sections[2].copy_(self._for_each_group(self._zeros(outputs)).flatten())
        if self.format.ordered:
            order = self._order()
            sections[-1].copy_(order.view(torch.uint8))
            _reorder(codes, order)

    def _by_outputs(self, stored: StoredTensor) -> Tensor:
        values = values_of(stored).view(stored.shape)
        return values if self.method == COMPRESSED else values.T

    def _for_each_group(self, shared: Tensor) -> Tensor:
        """(outputs, groups of the file) -> (outputs, groups of the format)"""
        return shared.repeat_interleave(self.group // self.format.group, dim=1)

    def _zeros(self, outputs: int) -> Tensor:
        assert self.zeros is not None, self
        words = values_of(self.zeros).view(self.zeros.shape)
        if self.method == AWQ:
            return awq_zeros(words)
        if self.method == GPTQ:
            return gptq_zeros(words, self.zeros_one_less)
        return compressed_zeros(words, outputs) if self.zeros.dtype == WORD else (words + MIDDLE).to(torch.uint8)

    def _order(self) -> Tensor:
        assert self.groups is not None, self
        order = order_of(values_of(self.groups), self.group)
        assert order is not None, "it was looked at when the file was opened"
        return order


def values_of(stored: StoredTensor) -> Tensor:
    """All values of a tensor that is small, in one row."""
    dtype = {WORD: torch.int32, "I8": torch.int8}.get(stored.dtype)
    if dtype is None:
        assert stored.dtype in FLOATS.values(), stored
        dtype = getattr(torch, stored.dtype)
    return read_whole(stored).view(dtype)


# -- codes -----------------------------------------------------------------------------------------------------------------


def _along_inputs(unpacked: Callable[[Tensor], Tensor], together: int, words: StoredTensor, codes: Tensor) -> None:
    """Fills codes from words with a row for each input, some times `together` of them at once."""
    first = 0
    for rows in read_rows(words, words.nbytes // words.shape[0], together):
        part = unpacked(rows.view(torch.int32))
        codes[:, first : first + part.shape[1]] = part
        first += part.shape[1]


def _codes_of_compressed(words: StoredTensor, codes: Tensor) -> None:
    first = 0
    for rows in read_rows(words, codes.shape[1], 1):
        codes[first : first + len(rows)] = rows
        first += len(rows)


_CODES: Mapping[str, Callable[[StoredTensor, Tensor], None]] = {
    AWQ: partial(_along_inputs, awq_codes, 2),  # two neighbours share a byte
    GPTQ: partial(_along_inputs, gptq_codes, 1),
    COMPRESSED: _codes_of_compressed,
}


def _reorder(codes: Tensor, order: Tensor) -> None:
    step = max(1, PART_BYTES // (PER_WORD * codes.shape[1]))
    for first in range(0, len(codes), step):
        codes[first : first + step] = in_order(codes[first : first + step], order)
