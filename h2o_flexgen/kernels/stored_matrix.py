"""A matrix in a checkpoint's own format, as C is told of it: stored_values.h has the same fields."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from h2o_flexgen.formats.blocked import BLOCKED, Blocked
from h2o_flexgen.formats.kernel_sizes import DTYPES
from h2o_flexgen.formats.sectioned import SCALE_BYTES, Fp4, Fp8, Int4, section_starts
from h2o_flexgen.kernels.raw_memory import address_of
from h2o_flexgen.kernels.stored_parts import sections_of

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
