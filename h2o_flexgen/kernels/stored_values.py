"""What the bytes of a checkpoint's own format mean: in torch, as C is told of them, and decoded."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.formats.blocked import BLOCKED, Blocked
from h2o_flexgen.formats.kernel_sizes import DTYPES, twin_values
from h2o_flexgen.formats.sectioned import MIDDLE, SCALE_BYTES, Fp4, Fp8, Int4, Sectioned, section_starts
from h2o_flexgen.kernels.native import KINDS, native_library, pointer
from h2o_flexgen.kernels.raw_memory import address_of

# -- stored parts ----------------------------------------------------------------------------------------------------------
# What the bytes of a checkpoint's own format mean, in torch: codes, and the numbers that some of them share. Every format
# of whole numbers is w = (code - zero) * scale + minimum, with unsigned codes; zero, scale and minimum belong to a group of
# 16 to 128 inputs of an output. In float32 that gives the bits of the format's own definition.

FP4_TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the value of each code
FP4_ZERO = 12  # is added, so that codes of FP4 are unsigned
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
    return _PARTS[format.name](data.reshape(-1, format.block_bytes), len(data))


def sectioned_parts(format: Int4 | Fp4, data: Tensor, outputs: int, inputs: int) -> IntegerParts:
    """data (1, bytes)"""
    sections = sections_of(format, data, outputs, inputs)
    codes = _neighbours(sections[0].view(outputs, -1))
    if isinstance(format, Fp4):
        return IntegerParts(_fp4(codes), _same(FP4_ZERO, codes), _halved(sections[1].view(outputs, -1)), None)
    scales = sections[1].view(getattr(torch, format.scale)).view(outputs, -1).float()
    zeros = sections[2].view(outputs, -1).float() if format.zeros else _same(MIDDLE, codes)
    order = sections[-1].view(torch.int32).long() if format.ordered else None
    return IntegerParts(codes, zeros, scales, None, order)


def fp8_parts(format: Fp8, data: Tensor, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    """data (1, bytes) -> codes (outputs, inputs) as float8, and scales in float32 by blocks of outputs and inputs"""
    codes, scales = sections_of(format, data, outputs, inputs)
    shape = format.scales_shape((outputs, inputs))
    wide = _powers(scales) if format.scale == "e8m0" else scales.view(getattr(torch, format.scale)).float()
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


def _fp4(codes: Tensor) -> Tensor:
    return torch.tensor(FP4_TWICE, device=codes.device).add(FP4_ZERO).to(torch.uint8)[codes.long()]


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


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """Bit i of 4 bytes belongs to value i: (blocks, 32), shifted to its place in a code."""
    places = torch.arange(8, device=blocks.device, dtype=torch.uint8)
    return (blocks[:, at : at + 4, None] >> places & 1).flatten(1) << 4


def _shared_of_eight(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The scales and the minima of 8 groups, 6 bits each, of (blocks, 12) -> (blocks, 8) each"""
    low, high, rest = packed.split(4, dim=1)
    scales = torch.cat((low & 63, rest & 15 | low >> 6 << 4), dim=1)
    minima = torch.cat((high & 63, rest >> 4 | high >> 6 << 4), dim=1)
    return scales.float(), minima.float()


# -- formats -------------------------------------------------------------------------------------------------------------------


def _rows(rows: int, codes: Tensor, scales: Tensor, minima: Tensor | None = None, zero: int = 0) -> IntegerParts:
    """Parts of blocks, row by row."""
    shared = None if minima is None else minima.reshape(rows, -1)
    return IntegerParts(codes.reshape(rows, -1), _same(zero, codes), scales.reshape(rows, -1), shared)


def _q4_0(blocks: Tensor, rows: int) -> IntegerParts:
    return _rows(rows, _apart(blocks[:, 2:]), _float16(blocks, 0), zero=8)


def _q4_1(blocks: Tensor, rows: int) -> IntegerParts:
    return _rows(rows, _apart(blocks[:, 4:]), _float16(blocks, 0), _float16(blocks, 2))


def _q5_0(blocks: Tensor, rows: int) -> IntegerParts:
    return _rows(rows, _apart(blocks[:, 6:]) | _fifth_bits(blocks, 2), _float16(blocks, 0), zero=16)


def _q5_1(blocks: Tensor, rows: int) -> IntegerParts:
    return _rows(rows, _apart(blocks[:, 8:]) | _fifth_bits(blocks, 4), _float16(blocks, 0), _float16(blocks, 2))


def _q8_0(blocks: Tensor, rows: int) -> IntegerParts:
    return _rows(rows, blocks[:, 2:] ^ 128, _float16(blocks, 0), zero=128)  # the sign becomes 128


def _q4_k(blocks: Tensor, rows: int) -> IntegerParts:
    return _of_eight_groups(blocks, rows, _apart(blocks[:, 16:].unflatten(1, (4, 32))).flatten(1))


def _q5_k(blocks: Tensor, rows: int) -> IntegerParts:
    fifth, lower = blocks[:, None, 16:48], _apart(blocks[:, 48:].unflatten(1, (4, 32))).unflatten(2, (2, 32)).flatten(1, 2)
    places = torch.arange(8, device=blocks.device, dtype=torch.uint8)[:, None]
    return _of_eight_groups(blocks, rows, lower | (fifth >> places & 1) << 4)


def _of_eight_groups(blocks: Tensor, rows: int, codes: Tensor) -> IntegerParts:
    scales, minima = _shared_of_eight(blocks[:, 4 : 4 + SCALES])
    return _rows(rows, codes, _float16(blocks, 0) * scales, -(_float16(blocks, 2) * minima))


def _q6_k(blocks: Tensor, rows: int) -> IntegerParts:
    """Each half of a block has 64 bytes of lower halves and 32 of upper pairs of bits."""
    lower = _apart(blocks[:, :128].unflatten(1, (2, 64)))  # of the first 64 values of a half, then of the last 64
    places = torch.arange(0, 8, 2, device=blocks.device, dtype=torch.uint8)[:, None]
    upper = (blocks[:, 128:192].unflatten(1, (2, 1, 32)) >> places & 3).flatten(2) << 4
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float() * _float16(blocks, 208)
    return _rows(rows, lower | upper, scales, zero=32)


def _mxfp4(blocks: Tensor, rows: int) -> IntegerParts:
    return _rows(rows, _fp4(_apart(blocks[:, 1:])), _halved(blocks[:, :1]), zero=FP4_ZERO)


_PARTS: Mapping[str, Callable[[Tensor, int], IntegerParts]] = {
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q8_0": _q8_0,
    "q4_K": _q4_k,
    "q5_K": _q5_k,
    "q6_K": _q6_k,
    "mxfp4": _mxfp4,
}


# -- stored matrix ---------------------------------------------------------------------------------------------------------
# A matrix in a checkpoint's own format, as C is told of it: stored_values.h has the same fields.

E8M0 = "e8m0"  # of Fp4
EVERY_INPUT = 40  # more inputs, as a power of two, than any matrix has
Stored = Blocked | Fp8 | Fp4 | Int4
FORMS = (*(format.name for format in BLOCKED), Fp8, Fp4, Int4)  # as C numbers them


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
    starts, (rows, columns) = section_starts(format, (outputs, inputs)), _sharing(format, outputs)
    kind = format.scale if isinstance(format, (Fp8, Int4)) else E8M0
    code_row, groups = inputs if isinstance(format, Fp8) else inputs // 2, -(-inputs // (columns or inputs))
    zeros = starts[2] if isinstance(format, Int4) and format.zeros else None
    shift = columns.bit_length() - 1 if columns else EVERY_INPUT
    sizes = (code_row, groups * SCALE_BYTES[kind], groups, rows, outputs, inputs, shift, (*DTYPES, E8M0).index(kind))
    return nbytes, starts[1], zeros, sizes


def number_in_c(format: Stored) -> int:
    return FORMS.index(format.name if isinstance(format, Blocked) else type(format))


def order_of(format: Stored, data: Tensor, outputs: int, inputs: int) -> Tensor | None:
    """The input that each column of codes belongs to, int32 (inputs,), where that is not its own."""
    if isinstance(format, Int4) and format.ordered:
        return sections_of(format, data, outputs, inputs)[-1].view(torch.int32)
    return None


def _sharing(format: Fp8 | Fp4 | Int4, outputs: int) -> tuple[int, int]:
    """The outputs that share scales, and the inputs that share one, a power of two; 0 means all."""
    return (format.block_rows or outputs, format.block_columns) if isinstance(format, Fp8) else (1, format.group)


# -- stored decode ---------------------------------------------------------------------------------------------------------
# Values of matrices in a checkpoint's own format, decoded. C and torch give the same bits.


def stored_decode(format: Stored, data: Tensor, out: Tensor) -> None:
    """Decodes data (rows, bytes of a row), or (1, bytes) of a format in sections, into out (rows, columns)."""
    matrix, order = MatrixInC.of(format, data, *out.shape), order_of(format, data, *out.shape)
    places = (ctypes.byref(matrix), None if order is None else pointer(order), pointer(out, writes=True))
    numbers = map(ctypes.c_int, (number_in_c(format), KINDS[out.dtype], torch.get_num_threads()))
    native_library().stored_decode(*places, *numbers)


def stored_decode_twin(format: Blocked | Fp8 | Fp4 | Int4, data: Tensor, out: Tensor) -> None:
    """Decodes data of either family into out (outputs, inputs)."""
    if isinstance(format, Blocked):
        blocked_decode_twin(format, data, out)
    else:
        sectioned_decode_twin(format, data, out)


def blocked_decode_twin(format: Blocked, data: Tensor, out: Tensor) -> None:
    """Decodes data (rows, bytes of a row) into out (rows, columns), some rows at a time."""
    step = max(1, twin_values(out.device.type) // max(1, out.shape[1]))
    for row in range(0, len(out), step):
        part = slice(row, row + step)
        out[part] = blocked_parts(format, data[part]).values


def sectioned_decode_twin(format: Fp8 | Fp4 | Int4, data: Tensor, out: Tensor) -> None:
    """Decodes data (1, bytes) into out (outputs, inputs)."""
    if isinstance(format, Fp8):
        _fp8_decode(format, data, out)
    else:
        out.copy_(sectioned_parts(format, data, *out.shape).values)


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
