"""RMS norm in one pass: one program for each row, which holds all of it. With a gate: one for each group of a row.

They differ from their twins in the last bits of fp32: squares are summed in another order, and one root is another function."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from h2o_flexgen.kernels.gpu.launching import Launch, Seen, kept_by_shape, launcher, seen

VALUES_OF_A_WARP = 512


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, from_one: bool = False) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        rows = x.reshape(-1, x.shape[-1])
        launch = _rows_launch(seen(rows), None if weight is None else seen(weight), eps, from_one)
        launch(rows, rows if weight is None else weight, out)
    return out


@kept_by_shape
def _rows_launch(rows: Seen, weight: Seen | None, eps: float, from_one: bool) -> Launch:
    (count, width), (stride, within), dtype = rows
    shape, steps, dtype_of_weight = weight or ((width,), (1,), dtype)
    is_wide = dtype_of_weight != dtype
    assert within == 1 and shape == (width,) and steps == (1,) and (not is_wide or dtype_of_weight == torch.float32)
    block = triton.next_power_of_2(width)
    forms = {"FROM_ONE": from_one, "IS_WIDE": is_wide, "IS_BARE": weight is None, "WIDTH": block}
    return launcher(norm_row, (count,), (eps, width, stride), **forms, num_warps=min(16, max(1, block // VALUES_OF_A_WARP)))


@triton.jit
def norm_row(
    x,
    weight,
    out,
    eps,
    width,
    stride,
    FROM_ONE: tl.constexpr,
    IS_WIDE: tl.constexpr,
    IS_BARE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    there = at < width
    own = tl.load(x + row * stride + at, mask=there, other=0.0).to(tl.float32)
    normed = own * tl.rsqrt(tl.sum(own * own) / width + eps)
    if IS_BARE:
        scaled = normed
    else:
        said = tl.load(weight + at, mask=there, other=0.0).to(tl.float32)
        rounded = normed if FROM_ONE or IS_WIDE else normed.to(out.dtype.element_ty).to(tl.float32)
        scaled = rounded * (said + 1.0 if FROM_ONE else said)
    tl.store(out + row * width + at, scaled.to(out.dtype.element_ty), mask=there)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int = 1, gate_first: bool = False) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        rows, gates = (each.reshape(-1, each.shape[-1]) for each in (x, gate))
        launch = _groups_launch(seen(rows), seen(gates), seen(weight), eps, groups, gate_first)
        launch(rows, gates, weight, out)
    return out


@kept_by_shape
def _groups_launch(rows: Seen, gates: Seen, weight: Seen, eps: float, groups: int, gate_first: bool) -> Launch:
    (count, width), (stride, within), _ = rows
    assert within == gates[1][1] == 1 and gates[0] == rows[0] and weight[0] == (width,) and width % groups == 0
    block = triton.next_power_of_2(width // groups)
    numbers = eps, width // groups, groups, stride, gates[1][0]
    warps = min(16, max(1, block // VALUES_OF_A_WARP))
    return launcher(norm_group, (count * groups,), numbers, GATE_FIRST=gate_first, WIDTH=block, num_warps=warps)


@triton.jit
def norm_group(
    x: tl.tensor, gate: tl.tensor, weight: tl.tensor, out: tl.tensor,
    eps: tl.tensor, width: tl.tensor, groups: tl.tensor, stride: tl.tensor, gate_stride: tl.tensor,
    GATE_FIRST: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    number, within = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    row, at, there = number // groups, number % groups * width + within, within < width
    own = tl.load(x + row * stride + at, mask=there, other=0.0).to(tl.float32)
    given = tl.load(gate + row * gate_stride + at, mask=there, other=0.0).to(tl.float32)
    opened = given / (1.0 + tl.exp(-given))
    if GATE_FIRST:
        own = own * opened
    normed = own * tl.rsqrt(tl.sum(own * own) / width + eps)
    scaled = normed * tl.load(weight + at, mask=there, other=0.0).to(tl.float32)
    if not GATE_FIRST:
        scaled = scaled * opened
    tl.store(out + row * groups * width + at, scaled.to(out.dtype.element_ty), mask=there)
