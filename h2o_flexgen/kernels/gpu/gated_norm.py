"""RMS norm with a gate, in one pass: one program for each group of a row, which holds all of it.

It differs from the twin in the last bits of fp32, where squares are summed in another order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from h2o_flexgen.kernels.gpu.launching import Launch, Seen, kept_by_shape, launcher, seen

VALUES_OF_A_WARP = 512


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int = 1, gate_first: bool = False) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        rows, gates = (each.reshape(-1, each.shape[-1]) for each in (x, gate))
        launch = _launch(seen(rows), seen(gates), seen(weight), eps, groups, gate_first)
        launch(rows, gates, weight, out)
    return out


@kept_by_shape
def _launch(rows: Seen, gates: Seen, weight: Seen, eps: float, groups: int, gate_first: bool) -> Launch:
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
