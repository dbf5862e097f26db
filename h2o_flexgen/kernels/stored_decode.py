"""Values of matrices in a checkpoint's own format, decoded. C and torch give the same bits."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from h2o_flexgen.formats.blocked import Blocked
from h2o_flexgen.formats.kernel_sizes import twin_values
from h2o_flexgen.formats.sectioned import Fp4, Fp8, Int4
from h2o_flexgen.kernels.native import KINDS, native_library, pointer
from h2o_flexgen.kernels.stored_matrix import MatrixInC, Stored, number_in_c, order_of
from h2o_flexgen.kernels.stored_parts import blocked_parts, fp8_parts, sectioned_parts


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
