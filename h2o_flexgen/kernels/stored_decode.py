"""Values of matrices in a checkpoint's own form, decoded. C and torch give the same bits."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from h2o_flexgen.formats.blocked import Blocked
from h2o_flexgen.formats.kernel_sizes import twin_values
from h2o_flexgen.formats.sectioned import Fp4, Fp8, Int4
from h2o_flexgen.kernels.native import KINDS, native_library, pointer
from h2o_flexgen.kernels.stored_matrix import MatrixInC, Stored, form_of, order_of
from h2o_flexgen.kernels.stored_parts import blocked_parts, fp8_parts, sectioned_parts


def stored_decode(codec: Stored, data: Tensor, out: Tensor) -> None:
    """Decodes data (rows, bytes of a row), or (1, bytes) of a form in sections, into out (rows, columns)."""
    matrix, order = MatrixInC.of(codec, data, *out.shape), order_of(codec, data, *out.shape)
    places = (ctypes.byref(matrix), None if order is None else pointer(order), pointer(out, writes=True))
    numbers = map(ctypes.c_int, (form_of(codec), KINDS[out.dtype], torch.get_num_threads()))
    native_library().stored_decode(*places, *numbers)


def stored_decode_twin(codec: Blocked | Fp8 | Fp4 | Int4, data: Tensor, out: Tensor) -> None:
    """Decodes data of either family into out (outputs, inputs)."""
    if isinstance(codec, Blocked):
        blocked_decode_twin(codec, data, out)
    else:
        sectioned_decode_twin(codec, data, out)


def blocked_decode_twin(codec: Blocked, data: Tensor, out: Tensor) -> None:
    """Decodes data (rows, bytes of a row) into out (rows, columns), some rows at a time."""
    step = max(1, twin_values(out.device.type) // max(1, out.shape[1]))
    for row in range(0, len(out), step):
        part = slice(row, row + step)
        out[part] = blocked_parts(codec, data[part]).values


def sectioned_decode_twin(codec: Fp8 | Fp4 | Int4, data: Tensor, out: Tensor) -> None:
    """Decodes data (1, bytes) into out (outputs, inputs)."""
    if isinstance(codec, Fp8):
        _fp8_decode(codec, data, out)
    else:
        out.copy_(sectioned_parts(codec, data, *out.shape).values)


def _fp8_decode(codec: Fp8, data: Tensor, out: Tensor) -> None:
    """Decodes block row by block row, with scales that are widened to one for each value."""
    rows, columns = out.shape
    codes, scales = fp8_parts(codec, data, rows, columns)
    height, width = codec.block_rows or rows, codec.block_columns or columns
    if height == 1:
        out.copy_(codes.float().mul_(scales.repeat_interleave(width, dim=1)[:, :columns]))
        return
    for number, own in enumerate(scales):
        part = slice(number * height, (number + 1) * height)
        out[part] = codes[part].float() * own.repeat_interleave(width)[:columns]
