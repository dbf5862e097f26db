"""Values of a group format, decoded. C and torch give the same bits."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from h2o_flexgen.formats.grouped import GROUP, Grouped, groups_of
from h2o_flexgen.formats.kernel_sizes import twin_values
from h2o_flexgen.kernels.native import KINDS, native_library, pointer


def group_decode(format: Grouped, data: Tensor, out: Tensor) -> None:
    """Decodes data (rows, bytes of a row) into out (rows, columns)."""
    rows, columns = out.shape
    sizes = (ctypes.c_long(rows), ctypes.c_long(columns))
    kind = (ctypes.c_int(format.bits), ctypes.c_int(KINDS[out.dtype]), ctypes.c_int(torch.get_num_threads()))
    native_library().group_decode(pointer(data), pointer(out, writes=True), *sizes, *kind)


def group_decode_twin(format: Grouped, data: Tensor, out: Tensor) -> None:
    rows, columns = out.shape
    codes, scales, minima = group_parts(format, data, columns)
    step = max(1, twin_values(out.device.type) // max(1, columns))
    for row in range(0, rows, step):
        part = slice(row, row + step)
        values = _unpacked(codes[part]).float()
        values.mul_(scales[part].float().unsqueeze(-1)).add_(minima[part].float().unsqueeze(-1))
        out[part] = values.flatten(1)[:, :columns]


def group_parts(format: Grouped, data: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """The codes of each row (rows, groups, bytes of a group), its scales and its minima (rows, groups), as bfloat16."""
    groups = groups_of(columns)
    codes, scales, minima = data.split((groups * format.code_bytes, 2 * groups, 2 * groups), dim=1)
    return codes.unflatten(1, (groups, format.code_bytes)), scales.view(torch.bfloat16), minima.view(torch.bfloat16)


def _unpacked(codes: Tensor) -> Tensor:
    """Unpacks codes to (rows, groups, 64): byte j of a four-bit group holds the codes of values j (low) and j + 32 (high)."""
    return codes if codes.shape[-1] == GROUP else torch.cat((codes & 15, codes >> 4), dim=-1)
