"""What stands around states of rows: the sizes of their steps, and norms with a gate. In fp32 up to the outcome.

C and torch differ in the last bits. With C what becomes of a row depends on nothing but the row."""

from __future__ import annotations

import ctypes
from math import inf

import torch
from torch import Tensor
from torch.nn import functional

from h2o_flexgen.kernels.native import KINDS, pointer, run
from h2o_flexgen.kernels.raw_memory import address_of
from h2o_flexgen.kernels.row_functions import in_rows
from h2o_flexgen.kernels.states import HeadNumbers
from h2o_flexgen.kernels.team import threads_for

# -- step sizes ------------------------------------------------------------------------------------------------------------
# softplus(x + bias), no further than bounds; times a rate where there is one. So it is the logarithm of a decay.

SIZING = 16  # values that are worked on in about the time of one softplus


def step_sizes(
    x: Tensor,
    bias: Tensor | None,
    rates: Tensor | None = None,
    are_logs: bool = False,
    least: float = 0.0,
    most: float = inf,
) -> Tensor:
    rows, out = in_rows(x), torch.empty(x.shape, dtype=torch.float32)
    assert all(each is None or each.shape == x.shape[-1:] for each in (bias, rates))
    given = _Steps(
        *(address_of(rows), pointer(out), HeadNumbers.of(bias), HeadNumbers.of(rates)),
        *(*rows.shape, rows.stride(0) * x.itemsize, least, most, KINDS[x.dtype], are_logs and rates is not None),
    )
    run("step_sizes", given, threads_for(SIZING * x.numel()))
    return out


def step_sizes_twin(
    x: Tensor,
    bias: Tensor | None,
    rates: Tensor | None = None,
    are_logs: bool = False,
    least: float = 0.0,
    most: float = inf,
) -> Tensor:
    wide = x.float() if bias is None else x.float() + bias.float()
    sizes = functional.softplus(wide).clamp_(least, most)
    if rates is None:
        return sizes
    return sizes.mul_(-rates.float().exp() if are_logs else rates.float())


class _Steps(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "out")),
        *((name, HeadNumbers) for name in ("bias", "rates")),
        *((name, ctypes.c_long) for name in ("rows", "heads", "x_row")),
        *((name, ctypes.c_float) for name in ("least", "most")),
        *((name, ctypes.c_int) for name in ("kind", "are_logs")),
    )


# -- gated norm ------------------------------------------------------------------------------------------------------------
# RMS norm of each of several groups of a row, and a gate by silu, which comes before the norm or behind it.


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int = 1, gate_first: bool = False) -> Tensor:
    rows, gates, out = in_rows(x), in_rows(gate), torch.empty(x.shape, dtype=x.dtype)
    assert rows.shape == gates.shape and weight.shape == x.shape[-1:] and len(weight) % groups == 0
    given = _GatedNorm(
        *(address_of(rows), address_of(gates), pointer(weight), pointer(out)),
        *(len(rows), groups, len(weight) // groups, rows.stride(0) * x.itemsize, gates.stride(0) * gate.itemsize, eps),
        *(KINDS[x.dtype], KINDS[gate.dtype], KINDS[weight.dtype], gate_first),
    )
    run("gated_norm", given, threads_for(x.numel()))
    return out


def gated_norm_twin(x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int = 1, gate_first: bool = False) -> Tensor:
    wide, opened = x.float(), functional.silu(gate.float())
    if gate_first:
        wide = wide * opened
    of_groups = wide.unflatten(-1, (groups, -1))
    normed = of_groups * torch.rsqrt(of_groups.square().mean(-1, keepdim=True) + eps)
    made: Tensor = normed.flatten(-2).mul_(weight.float())
    return (made if gate_first else made.mul_(opened)).to(x.dtype)


class _GatedNorm(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "gate", "weight", "out")),
        *((name, ctypes.c_long) for name in ("rows", "groups", "width", "x_row", "gate_row")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("kind", "gate_kind", "weight_kind", "gate_first")),
    )
