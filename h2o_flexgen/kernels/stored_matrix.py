"""A matrix in a checkpoint's own form, as C is told of it."""

from __future__ import annotations

import ctypes

from torch import Tensor

from h2o_flexgen.kernels.native import KINDS, pointer
from h2o_flexgen.kernels.sizes import DTYPES
from h2o_flexgen.quant.blocked import BLOCKED, Blocked
from h2o_flexgen.quant.sectioned import SCALE_BYTES, Fp4, Fp8, Int4, section_starts

E8M0 = "e8m0"  # of Fp4
FORMS = (*(codec.name for codec in BLOCKED), Fp8, Fp4, Int4)  # as C numbers them


class StoredMatrix(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "zeros")),
        *((name, ctypes.c_long) for name in ("code_row", "scale_row", "zero_row", "scale_rows", "scale_inputs")),
        *((name, ctypes.c_long) for name in ("outputs", "inputs")),
        ("scale_kind", ctypes.c_int),
    )

    @classmethod
    def of(cls, codec: Blocked | Fp8 | Fp4 | Int4, data: Tensor, outputs: int, inputs: int) -> StoredMatrix:
        """data (rows, bytes of a row), or (1, bytes) of sections"""
        at = pointer(data).value or 0
        if isinstance(codec, Blocked):
            return cls(at, None, None, data.shape[1], 0, 0, 1, inputs, outputs, inputs, 0)
        starts = section_starts(codec, (outputs, inputs))
        kind = codec.scale if isinstance(codec, (Fp8, Int4)) else E8M0
        code_row, (rows, columns) = inputs if isinstance(codec, Fp8) else inputs // 2, _sharing(codec, outputs, inputs)
        groups = -(-inputs // columns)
        zeros = at + starts[2] if isinstance(codec, Int4) and codec.zeros else None
        sizes = (code_row, groups * SCALE_BYTES[kind], groups, rows, columns, outputs, inputs)
        return cls(at, at + starts[1], zeros, *sizes, (*DTYPES, E8M0).index(kind))


def form_of(codec: Blocked | Fp8 | Fp4 | Int4) -> int:
    return FORMS.index(codec.name if isinstance(codec, Blocked) else type(codec))


def _sharing(codec: Fp8 | Fp4 | Int4, outputs: int, inputs: int) -> tuple[int, int]:
    """The outputs and inputs that share a scale."""
    if isinstance(codec, Fp8):
        return codec.block_rows or outputs, codec.block_columns or inputs
    return 1, codec.group
