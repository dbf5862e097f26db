"""Matrices of 4-bit codes in an order that no product reads, converted once to the order of `Int4`: of each output all its
inputs, two to a byte, the even one in the low half. AWQ, GPTQ and compressed-tensors have other orders.

Words are int32 as the files have them, eight codes each, lowest first. They are read some rows at a time; only the outcome
and that part are held.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from h2o_flexgen.checkpoints.quantisation import AWQ, COMPRESSED, GPTQ
from h2o_flexgen.checkpoints.safetensors_format import FLOATS
from h2o_flexgen.checkpoints.stored_tensors import PART_BYTES, StoredTensor, read_rows, read_whole
from h2o_flexgen.formats.int4 import MIDDLE, Int4
from h2o_flexgen.kernels.stored_values import sections_of

PER_WORD = 8
LOW = 0x0F
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where in its word AWQ has the code of each of eight outputs
ONE_MORE = 0x11111111  # one in every code of a word


# -- codes -----------------------------------------------------------------------------------------------------------------


def awq_codes(words: Tensor) -> Tensor:
    """(inputs, outputs / 8) words along the outputs -> (outputs, inputs / 2) bytes. The number of inputs is even."""
    inputs, outputs = words.shape[0], words.shape[1] * PER_WORD
    pairs = _bytes(words).view(inputs // 2, 2, outputs // 2)  # two neighbouring inputs, which will share bytes
    even, odd = pairs[:, 0], pairs[:, 1]
    both = torch.stack(((even & LOW) | (odd << 4), (even >> 4) | (odd & (LOW << 4))), dim=-1)
    return _awq_order(both.view(inputs // 2, outputs)).T.contiguous()


def gptq_codes(words: Tensor) -> Tensor:
    """(inputs / 8, outputs) words along the inputs -> (outputs, inputs / 2) bytes."""
    return _bytes(words.T)


def in_order(codes: Tensor, order: Tensor) -> Tensor:
    """(outputs, inputs / 2) bytes with their columns in another order: column j becomes the one of input order[j]."""
    taken = halves(codes).index_select(1, order)
    return taken[:, 0::2] | (taken[:, 1::2] << 4)


# -- zero points -----------------------------------------------------------------------------------------------------------


def awq_zeros(words: Tensor) -> Tensor:
    """(groups, outputs / 8) words -> (outputs, groups), a byte each."""
    return _awq_order(halves(_bytes(words))).T.contiguous()


def gptq_zeros(words: Tensor, one_less: bool) -> Tensor:
    """(groups, outputs / 8) words -> (outputs, groups), a byte each. `one_less`: what is written was made by taking one from
    every code of whole words, borrows included, so one is added in the same way."""
    if one_less:
        words = words + ONE_MORE  # wraps as it did when it was written
    return halves(_bytes(words)).T.contiguous()


def compressed_zeros(words: Tensor, outputs: int) -> Tensor:
    """(outputs / 8, groups) words along the outputs, the last ones filled up -> (outputs, groups), a byte each."""
    eights = halves(_bytes(words)).view(*words.shape, PER_WORD)
    return eights.transpose(1, 2).reshape(-1, words.shape[1])[:outputs].contiguous()


# -- the order of inputs ---------------------------------------------------------------------------------------------------


def order_of(groups: Tensor, group: int) -> Tensor | None:
    """The inputs (inputs,) group by group, from the number of each one's group; None where they lie so already. Numbers that
    are all zero, or all -1, were never filled in, and say nothing."""
    count = len(groups)
    is_unfilled = int(groups[0]) in (0, -1) and bool((groups == groups[0]).all())
    if is_unfilled or torch.equal(groups.long(), torch.arange(count) // group):
        return None
    if bool((groups < 0).any()) or bool((groups >= count // group).any()):
        raise ValueError(f"names a group that is not one of {count // group}")
    if bool((torch.bincount(groups.long(), minlength=count // group) != group).any()):
        raise ValueError(f"does not put {group} inputs into every group")
    return torch.argsort(groups.long(), stable=True).to(torch.int32)


# -- bytes -----------------------------------------------------------------------------------------------------------------


def halves(data: Tensor) -> Tensor:
    """The two codes of each byte (..., bytes), the low one first -> (..., 2 * bytes)."""
    return torch.stack((data & LOW, data >> 4), dim=-1).flatten(-2)


def _bytes(words: Tensor) -> Tensor:
    """The bytes of words (..., count) -> (..., 4 * count). Of one column, the strides would not do."""
    return words.flatten().view(torch.uint8).view(*words.shape[:-1], -1)


def _awq_order(codes: Tensor) -> Tensor:
    return codes.view(len(codes), -1, PER_WORD)[:, :, AWQ_PLACES].flatten(1)


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
