"""Values of a group codec, decoded: in C on CPUs where the library is, else in torch, to the same bits."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from h2o_flexgen.kernels.native import KINDS, native_library, pointer
from h2o_flexgen.kernels.sizes import TWIN_VALUES

GROUP = 64


def group_decode(data: Tensor, out: Tensor, bits: int) -> None:
    """data (rows, bytes of a row) -> out (rows, columns)."""
    native = native_library()
    if native is None or out.dtype not in KINDS or out.device.type != "cpu":
        group_decode_twin(data, out, bits)
        return
    rows, columns = out.shape
    sizes = (ctypes.c_long(rows), ctypes.c_long(columns))
    kind = (ctypes.c_int(bits), ctypes.c_int(KINDS[out.dtype]), ctypes.c_int(torch.get_num_threads()))
    native.group_decode(pointer(data), pointer(out), *sizes, *kind)


def group_decode_twin(data: Tensor, out: Tensor, bits: int) -> None:
    rows, columns = out.shape
    codes, scales, minima = group_parts(data, bits)
    step = max(1, TWIN_VALUES // max(1, columns))
    for row in range(0, rows, step):
        part = slice(row, row + step)
        values = _unpacked(codes[part]).float()
        values.mul_(scales[part].float().unsqueeze(-1)).add_(minima[part].float().unsqueeze(-1))
        out[part] = values.flatten(1)[:, :columns]


def group_parts(data: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row its codes (rows, groups, bytes of a group), then its scales, then its minima (rows, groups), as bfloat16."""
    code_bytes = GROUP * bits // 8
    groups = data.shape[1] // (code_bytes + 4)
    codes, scales, minima = data.split((groups * code_bytes, 2 * groups, 2 * groups), dim=1)
    return codes.unflatten(1, (groups, code_bytes)), scales.view(torch.bfloat16), minima.view(torch.bfloat16)


def _unpacked(codes: Tensor) -> Tensor:
    """(rows, groups, 64): byte j of a group of four bits holds the codes of values j (low) and j + 32 (high)."""
    return codes if codes.shape[-1] == GROUP else torch.cat((codes & 15, codes >> 4), dim=-1)
