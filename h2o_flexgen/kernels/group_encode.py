"""Values encoded with a group format. C and torch give the same bits."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from h2o_flexgen.formats.grouped import GROUP, Grouped
from h2o_flexgen.formats.kernel_sizes import twin_values
from h2o_flexgen.kernels.group_decode import group_parts
from h2o_flexgen.kernels.native import KINDS, native_library, pointer


def group_encode(format: Grouped, values: Tensor, out: Tensor) -> None:
    """Encodes values (rows, columns) into out (rows, bytes of a row)."""
    values = values.contiguous()  # kept alive until C is done
    rows, columns = values.shape
    sizes = (ctypes.c_long(rows), ctypes.c_long(columns))
    kind = (ctypes.c_int(format.bits), ctypes.c_int(KINDS[values.dtype]), ctypes.c_int(torch.get_num_threads()))
    native_library().group_encode(pointer(values), pointer(out, writes=True), *sizes, *kind)


def group_encode_twin(format: Grouped, values: Tensor, out: Tensor) -> None:
    codes, scales, minima = group_parts(format, out, values.shape[1])
    most, step = 2**format.bits - 1, max(1, twin_values(values.device.type) // (codes.shape[1] * GROUP))
    for row in range(0, len(values), step):
        part = slice(row, row + step)
        here = _in_groups(values[part].float(), codes.shape[1])
        minimum = _rounded(here.amin(-1).add_(0.0), -torch.inf)  # adding 0.0 makes -0 positive
        here.sub_(minimum.float().unsqueeze(-1))
        largest = here.amax(-1).add_(0.0)
        scale = _rounded(largest / torch.full_like(largest, most), torch.inf)  # a GPU multiplies with the inverse of a number
        lost = ~(scale.isfinite() & minimum.isfinite())  # a group with a NaN or an infinity becomes NaN altogether
        scale, minimum = scale.masked_fill(lost, 0.0), minimum.masked_fill(lost, torch.nan)
        here.masked_fill_(lost.unsqueeze(-1), 0.0)
        here.div_(torch.where(scale > 0, scale, 1).float().unsqueeze(-1))  # a constant group has codes of 0
        code = here.round_().clamp_(0, most).byte()
        codes[part] = code if format.bits == 8 else code[..., : GROUP // 2] | code[..., GROUP // 2 :] << 4
        scales[part], minima[part] = scale, minimum


def _in_groups(rows: Tensor, groups: int) -> Tensor:
    """A copy as (rows, groups, 64); the last group is filled with the row's last value, which changes neither extreme."""
    lacking = groups * GROUP - rows.shape[-1]
    padded = torch.cat((rows, rows[:, -1:].expand(-1, lacking)), dim=-1) if lacking else rows.clone()
    return padded.view(len(rows), groups, GROUP)


def _rounded(values: Tensor, towards: float) -> Tensor:
    """The nearest bfloat16 that is not beyond the value on the side of `towards`."""
    near = values.bfloat16()
    beyond = near.float() > values if towards < 0 else near.float() < values
    return torch.where(beyond, torch.nextafter(near, torch.full_like(near, towards)), near)
