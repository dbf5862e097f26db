"""What the bytes of a checkpoint's own format mean: in torch, as C is told of them, and decoded."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.formats.blocked import Blocked
from h2o_flexgen.formats.byte_layout import (
    E8M0,
    EXPONENT,
    FIFTH_BITS,
    FLOAT4,
    PLANES_OF_ONE,
    PLANES_OF_TWO,
    SCALE,
    SCALE_AND_MINIMUM,
    SCALE_BYTES,
    SIGNED_SIX_BITS,
    SIX_BITS,
    SIXTEENS,
    ByteLayout,
    Sectioned,
    section_starts,
)
from h2o_flexgen.formats.fp8 import Fp8
from h2o_flexgen.formats.kernel_sizes import DTYPES, twin_values
from h2o_flexgen.formats.table import Stored
from h2o_flexgen.kernels.native import KINDS, pointer, run
from h2o_flexgen.kernels.raw_memory import address_of

# -- stored parts ----------------------------------------------------------------------------------------------------------
# What the bytes of a checkpoint's own format mean, in torch: codes, and the numbers that some of them share. Every format
# of whole numbers is w = (code - zero) * scale + minimum, with unsigned codes; zero, scale and minimum belong to a group of
# 16 to 128 inputs of an output. In float32 that gives the bits of the format's own definition.

SCALES = 12  # bytes of the scales and minima of 8 groups, of 6 bits each


class IntegerParts(NamedTuple):
    """A matrix (outputs, inputs) in whole numbers."""

    codes: Tensor  # (outputs, inputs), uint8
    zeros: Tensor  # (outputs or 1, groups or 1), float32
    scales: Tensor  # (outputs, groups), float32
    minima: Tensor | None  # (outputs, groups), float32
    order: Tensor | None = None  # (inputs,): column j of codes is input order[j]

    @property
    def values(self) -> Tensor:
        """The values in float32."""
        groups = self.scales.shape[1]
        from_zero = self.codes.unflatten(1, (groups, -1)).float() - self.zeros.unsqueeze(-1)
        found = from_zero.mul_(self.scales.unsqueeze(-1))
        if self.minima is not None:
            found.add_(self.minima.unsqueeze(-1))
        values: Tensor = found.flatten(1)
        if self.order is None:
            return values
        natural = torch.empty_like(values)
        natural[:, self.order] = values
        return natural


def blocked_parts(format: Blocked, data: Tensor) -> IntegerParts:
    """data (rows, bytes of a row)"""
    layout, blocks, rows = format.layout, data.reshape(-1, format.block_bytes), len(data)
    scales, minima = _SHARED[layout.shared](blocks, layout.shared_at)
    codes = _codes(layout, blocks)
    shared = None if minima is None else minima.reshape(rows, -1)
    return IntegerParts(codes.reshape(rows, -1), _same(layout.zero, codes), scales.reshape(rows, -1), shared)


def sectioned_parts(format: Sectioned, data: Tensor, outputs: int, inputs: int) -> IntegerParts:
    """data (1, bytes)"""
    layout, sections = format.layout, sections_of(format, data, outputs, inputs)
    codes = _looked_up(layout, _neighbours(sections[0].view(outputs, -1)))
    own = sections[1]
    scales = _halved(own) if layout.codes == FLOAT4 else own.view(getattr(torch, format.scale)).float()
    zeros = sections[2].view(outputs, -1).float() if layout.has_zeros else _same(layout.zero, codes)
    order = sections[-1].view(torch.int32).long() if layout.is_ordered else None
    return IntegerParts(codes, zeros, scales.view(outputs, -1), None, order)


def fp8_parts(format: Fp8, data: Tensor, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    """data (1, bytes) -> codes (outputs, inputs) as float8, and scales in float32 by blocks of outputs and inputs"""
    codes, scales = sections_of(format, data, outputs, inputs)
    shape = format.scales_shape((outputs, inputs))
    wide = _powers(scales) if format.scale == E8M0 else scales.view(getattr(torch, format.scale)).float()
    return codes.view(torch.float8_e4m3fn).view(outputs, inputs), wide.view(shape)


def sections_of(format: Sectioned, data: Tensor, outputs: int, inputs: int) -> list[Tensor]:
    """The bytes of each section of data (1, bytes)."""
    starts, sizes = section_starts(format, (outputs, inputs)), format.sections((outputs, inputs))
    return [data[0, start : start + size] for start, size in zip(starts, sizes)]


# -- the pieces of which blocks consist --------------------------------------------------------------------------------------


def _neighbours(codes: Tensor) -> Tensor:
    """Two codes of each byte, one behind the other: (rows, bytes) -> (rows, 2 * bytes)"""
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)


def _apart(codes: Tensor) -> Tensor:
    """Two codes of each byte, all lower ones first: (..., bytes) -> (..., 2 * bytes)"""
    return torch.cat((codes & 15, codes >> 4), dim=-1)


def _looked_up(layout: ByteLayout, codes: Tensor) -> Tensor:
    """What codes of 4 bits stand for."""
    if not layout.table:
        return codes
    found: Tensor = torch.tensor(layout.table, dtype=torch.uint8, device=codes.device)[codes.long()]
    return found


def _same(number: int, like: Tensor) -> Tensor:
    return torch.full((1, 1), float(number), device=like.device)


def _powers(exponents: Tensor) -> Tensor:
    """2 ** (byte - 127), made of bits: the least is too small for a float's usual format, and 255 is infinity."""
    bits = exponents.int()
    return torch.where(bits == 0, 1 << 22, bits << 23).view(torch.float32)


def _halved(exponents: Tensor) -> Tensor:
    """2 ** (byte - 128): codes of FP4 are twice their values."""
    bits = exponents.int()
    return torch.where(bits < 2, 1 << 21 + bits, bits - 1 << 23).view(torch.float32)


def _float16(blocks: Tensor, at: int) -> Tensor:
    """A number of each block (blocks, bytes), as float32 (blocks, 1)"""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


# -- codes of blocks ---------------------------------------------------------------------------------------------------------


def _codes(layout: ByteLayout, blocks: Tensor) -> Tensor:
    """(blocks, values), uint8"""
    nbytes = layout.block_values * layout.bits // 8
    stored = blocks[:, layout.codes_at : layout.codes_at + nbytes]
    if layout.bits == 8:
        return stored ^ 128 if layout.is_signed else stored  # the sign becomes 128
    codes = _looked_up(layout, _apart(stored.unflatten(1, (-1, layout.span))).flatten(1))
    return codes | _UPPER[layout.upper](blocks, layout.upper_at) if layout.upper else codes


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """Bit i of 4 bytes belongs to value i: (blocks, 32), shifted to its place in a code."""
    places = torch.arange(8, device=blocks.device, dtype=torch.uint8)
    return (blocks[:, at : at + 4, None] >> places & 1).flatten(1) << 4


def _planes_of_one(blocks: Tensor, at: int) -> Tensor:
    """Bit i of 32 bytes belongs to the 32 values of group i."""
    places = torch.arange(8, device=blocks.device, dtype=torch.uint8)[:, None]
    return (blocks[:, None, at : at + 32] >> places & 1).flatten(1) << 4


def _planes_of_two(blocks: Tensor, at: int) -> Tensor:
    """Each half of a block has 32 bytes, with pairs of bits of four groups of 32 values."""
    places = torch.arange(0, 8, 2, device=blocks.device, dtype=torch.uint8)[:, None]
    found: Tensor = (blocks[:, at : at + 64].unflatten(1, (2, 1, 32)) >> places & 3).flatten(1) << 4
    return found


_UPPER: Mapping[str, Callable[[Tensor, int], Tensor]] = {
    FIFTH_BITS: _fifth_bits,
    PLANES_OF_ONE: _planes_of_one,
    PLANES_OF_TWO: _planes_of_two,
}


# -- what the codes of a block share -------------------------------------------------------------------------------------------

Shares = tuple[Tensor, "Tensor | None"]  # scales and minima (blocks, groups), float32


def _scale(blocks: Tensor, at: int) -> Shares:
    return _float16(blocks, at), None


def _scale_and_minimum(blocks: Tensor, at: int) -> Shares:
    return _float16(blocks, at), _float16(blocks, at + 2)


def _six_bits(blocks: Tensor, at: int) -> Shares:
    """Scales and minima of 8 groups, in 12 bytes behind the two numbers of the block."""
    low, high, rest = blocks[:, at + 4 : at + 4 + SCALES].split(4, dim=1)
    scales = torch.cat((low & 63, rest & 15 | low >> 6 << 4), dim=1)
    minima = torch.cat((high & 63, rest >> 4 | high >> 6 << 4), dim=1)
    return _float16(blocks, at) * scales.float(), -(_float16(blocks, at + 2) * minima.float())


def _signed_six_bits(blocks: Tensor, at: int) -> Shares:
    """Reads those of 8 groups, behind the number of the block: the upper 2 bits in 2 bytes, and the lower 4 in 4 bytes."""
    places = torch.arange(0, 8, 2, device=blocks.device, dtype=torch.uint8)
    upper = (blocks[:, at + 2 : at + 4, None] >> places & 3).flatten(1)
    return _float16(blocks, at) * ((_neighbours(blocks[:, at + 4 : at + 8]) | upper << 4).float() - 32), None


def _sixteens(blocks: Tensor, at: int) -> Shares:
    return blocks[:, at : at + 16].contiguous().view(torch.int8).float() * _float16(blocks, at + 16), None


def _exponent(blocks: Tensor, at: int) -> Shares:
    return _halved(blocks[:, at : at + 1]), None


_SHARED: Mapping[str, Callable[[Tensor, int], Shares]] = {
    SCALE: _scale,
    SCALE_AND_MINIMUM: _scale_and_minimum,
    SIX_BITS: _six_bits,
    SIGNED_SIX_BITS: _signed_six_bits,
    SIXTEENS: _sixteens,
    EXPONENT: _exponent,
}


# -- stored matrix ---------------------------------------------------------------------------------------------------------
# A matrix in a checkpoint's own format, as C is told of it: stored_values.h has the same fields.

EVERY_INPUT = 40  # more inputs, as a power of two, than any matrix has


class MatrixInC(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "zeros")),
        *((name, ctypes.c_long) for name in ("code_row", "scale_row", "zero_row", "scale_rows")),
        *((name, ctypes.c_long) for name in ("outputs", "inputs")),
        *((name, ctypes.c_int) for name in ("scale_shift", "scale_kind")),
    )

    @classmethod
    def of(cls, format: Stored, data: Tensor, outputs: int, inputs: int) -> MatrixInC:
        """data (rows, bytes of a row), or (1, bytes) of sections"""
        nbytes, scales, zeros, sizes = _shape(format, outputs, inputs)
        assert data.numel() == nbytes and data.is_contiguous(), (format, data.shape, outputs, inputs)
        at = address_of(data)
        return cls(at, None if scales is None else at + scales, None if zeros is None else at + zeros, *sizes)


@lru_cache
def _shape(format: Stored, outputs: int, inputs: int) -> tuple[int, int | None, int | None, tuple[int, ...]]:
    """What all matrices of a format and size have in common: bytes, where scales and zeros lie, and what else C is told."""
    nbytes = format.nbytes((outputs, inputs), 0)
    if isinstance(format, Blocked):
        return nbytes, None, None, (format.nbytes((1, inputs), 0), 0, 0, 1, outputs, inputs)
    layout, starts = format.layout, section_starts(format, (outputs, inputs))
    columns = layout.shared_inputs  # a power of two
    groups, shift = -(-inputs // (columns or inputs)), columns.bit_length() - 1 if columns else EVERY_INPUT
    of_scales = groups * SCALE_BYTES[format.scale], groups, layout.shared_rows or outputs
    sizes = (layout.row_bytes(inputs), *of_scales, outputs, inputs, shift, (*DTYPES, E8M0).index(format.scale))
    return nbytes, starts[1], starts[2] if layout.has_zeros else None, sizes


@cache
def _names_in_c() -> Sequence[str]:
    """The formats as C numbers them."""
    header = Path(__file__).with_name("stored_values.h").read_text(encoding="ascii")
    found = re.search(r"enum format \{([\w, ]+)\}", header)
    assert found is not None
    return found[1].replace(" ", "").split(",")


@cache
def number_in_c(format: Stored) -> int:
    return _names_in_c().index(format.name_in_c)


def order_of(format: Stored, data: Tensor, outputs: int, inputs: int) -> Tensor | None:
    """The input that each column of codes belongs to, int32 (inputs,), where that is not its own."""
    if isinstance(format, Sectioned) and format.layout.is_ordered:
        return sections_of(format, data, outputs, inputs)[-1].view(torch.int32)
    return None


# -- stored decode ---------------------------------------------------------------------------------------------------------
# Values of matrices in a checkpoint's own format, decoded. C and torch give the same bits.


def stored_decode(format: Stored, data: Tensor, out: Tensor) -> None:
    """Decodes data (rows, bytes of a row), or (1, bytes) of a format in sections, into out (rows, columns)."""
    matrix, order = MatrixInC.of(format, data, *out.shape), order_of(format, data, *out.shape)
    places = (None if order is None else pointer(order), pointer(out, writes=True))
    run("stored_decode", _Decoding(matrix, *places, number_in_c(format), KINDS[out.dtype]), torch.get_num_threads())


def stored_decode_twin(format: Stored, data: Tensor, out: Tensor) -> None:
    """Decodes data of either family into out (outputs, inputs)."""
    if isinstance(format, Blocked):
        _blocked_decode(format, data, out)
    elif isinstance(format, Fp8):
        _fp8_decode(format, data, out)
    else:
        out.copy_(sectioned_parts(format, data, *out.shape).values)


def _blocked_decode(format: Blocked, data: Tensor, out: Tensor) -> None:
    """Decodes some rows at a time."""
    step = max(1, twin_values(out.device.type) // max(1, out.shape[1]))
    for row in range(0, len(out), step):
        part = slice(row, row + step)
        out[part] = blocked_parts(format, data[part]).values


def _fp8_decode(format: Fp8, data: Tensor, out: Tensor) -> None:
    """Decodes block row by block row, with scales that are widened to one for each value."""
    rows, columns = out.shape
    codes, scales = fp8_parts(format, data, rows, columns)
    height, width = format.block_rows or rows, format.block_columns or columns
    if height == 1:
        out.copy_(codes.float().mul_(scales.repeat_interleave(width, dim=1)[:, :columns]))
        return
    for number, own in enumerate(scales):
        part = slice(number * height, (number + 1) * height)
        out[part] = codes[part].float() * own.repeat_interleave(width)[:columns]


class _Decoding(ctypes.Structure):
    _fields_ = (
        ("matrix", MatrixInC),
        *((name, ctypes.c_void_p) for name in ("order", "out")),
        *((name, ctypes.c_int) for name in ("format", "kind")),
    )
