"""A matrix in a checkpoint's own form, as C is told of it: stored_values.h has the same fields."""

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
FORMS = (*(codec.name for codec in BLOCKED), Fp8, Fp4, Int4)  # as C numbers them


class MatrixInC(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "zeros")),
        *((name, ctypes.c_long) for name in ("code_row", "scale_row", "zero_row", "scale_rows")),
        *((name, ctypes.c_long) for name in ("outputs", "inputs")),
        *((name, ctypes.c_int) for name in ("scale_shift", "scale_kind")),
    )

    @classmethod
    def of(cls, codec: Stored, data: Tensor, outputs: int, inputs: int) -> MatrixInC:
        """data (rows, bytes of a row), or (1, bytes) of sections"""
        nbytes, scales, zeros, sizes = _shape(codec, outputs, inputs)
        assert data.numel() == nbytes and data.is_contiguous(), (codec, data.shape, outputs, inputs)
        at = address_of(data)
        return cls(at, None if scales is None else at + scales, None if zeros is None else at + zeros, *sizes)


@lru_cache
def _shape(codec: Stored, outputs: int, inputs: int) -> tuple[int, int | None, int | None, tuple[int, ...]]:
    """What all matrices of a form and size have in common: their bytes, where scales and zeros lie, and what else C is told."""
    nbytes = codec.nbytes((outputs, inputs), 0)
    if isinstance(codec, Blocked):
        return nbytes, None, None, (codec.nbytes((1, inputs), 0), 0, 0, 1, outputs, inputs)
    starts, (rows, columns) = section_starts(codec, (outputs, inputs)), _sharing(codec, outputs)
    kind = codec.scale if isinstance(codec, (Fp8, Int4)) else E8M0
    code_row, groups = inputs if isinstance(codec, Fp8) else inputs // 2, -(-inputs // (columns or inputs))
    zeros = starts[2] if isinstance(codec, Int4) and codec.zeros else None
    shift = columns.bit_length() - 1 if columns else EVERY_INPUT
    sizes = (code_row, groups * SCALE_BYTES[kind], groups, rows, outputs, inputs, shift, (*DTYPES, E8M0).index(kind))
    return nbytes, starts[1], zeros, sizes


def form_of(codec: Stored) -> int:
    return FORMS.index(codec.name if isinstance(codec, Blocked) else type(codec))


def order_of(codec: Stored, data: Tensor, outputs: int, inputs: int) -> Tensor | None:
    """The input that each column of codes belongs to, int32 (inputs,), where that is not its own."""
    if isinstance(codec, Int4) and codec.ordered:
        return sections_of(codec, data, outputs, inputs)[-1].view(torch.int32)
    return None


def _sharing(codec: Fp8 | Fp4 | Int4, outputs: int) -> tuple[int, int]:
    """The outputs that share scales, and the inputs that share one, a power of two; 0 means all."""
    return (codec.block_rows or outputs, codec.block_columns) if isinstance(codec, Fp8) else (1, codec.group)
