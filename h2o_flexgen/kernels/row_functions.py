"""Functions of rows of values: norms and lengths, activations and their gates, halves apart, sums. In C and in torch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor
from torch.nn import functional

from h2o_flexgen.kernels.factor import CountedRows
from h2o_flexgen.kernels.native import KINDS, ValuePlaces, pointer, run, threads_for
from h2o_flexgen.kernels.raw_memory import address_of

# -- rms norm --------------------------------------------------------------------------------------------------------------
# RMS norm: computed in fp32 and rounded before the weight is applied, the order that models with it were trained with. C
# and torch sum squares in different orders. With C what becomes of a row depends on nothing but the row.


WEIGHT, ABOVE_ONE, WIDE_WEIGHT, BARE = range(4)  # as in C


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, from_one: bool = False) -> Tensor:
    x, out, width = x.contiguous(), torch.empty(x.shape, dtype=x.dtype), x.shape[-1]
    weight = None if weight is None else weight.contiguous()
    sizes = x.numel() // max(1, width), width
    said = None if weight is None else pointer(weight)
    given = _RmsNorm(pointer(x), said, pointer(out), *sizes, eps, KINDS[x.dtype], _weighing(x, weight, from_one))
    run("rms_norm", given, threads_for(x.numel()))
    return out


def _weighing(x: Tensor, weight: Tensor | None, from_one: bool) -> int:
    if weight is None:
        return BARE
    is_wide = weight.dtype != x.dtype
    assert weight.shape == x.shape[-1:] and (not is_wide or (weight.dtype == torch.float32 and not from_one))
    return ABOVE_ONE if from_one else WIDE_WEIGHT if is_wide else WEIGHT


def rms_norm_twin(x: Tensor, weight: Tensor | None, eps: float, from_one: bool = False) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(x.dtype)
    if from_one or weight.dtype != x.dtype:
        return normed.mul_(weight.float() + 1.0 if from_one else weight).to(x.dtype)
    return normed.to(x.dtype).mul_(weight)


class _RmsNorm(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "out")),
        *((name, ctypes.c_long) for name in ("rows", "width")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("kind", "weighing")),
    )


# -- layer norm ------------------------------------------------------------------------------------------------------------
# Layer norm, in fp32 up to the outcome. C and torch sum in different orders. With C what becomes of a row depends on nothing
# but the row.


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    width, out = x.shape[-1], torch.empty(x.shape, dtype=x.dtype)
    rows = in_rows(x)
    assert all(each is None or (each.dtype == x.dtype and each.shape in ((width,), x.shape[-2:])) for each in (weight, bias))
    kinds = next((each.numel() // width for each in (weight, bias) if each is not None), 1)
    added = (None if each is None else pointer(each) for each in (weight, bias))
    given = _LayerNorm(
        address_of(rows), *added, pointer(out), len(rows), width, kinds, rows.stride(0) * x.itemsize, eps, KINDS[x.dtype]
    )
    run("layer_norm", given, threads_for(x.numel()))
    return out


def layer_norm_twin(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    if (weight is None or weight.ndim == 1) and (bias is None or bias.ndim == 1):
        return torch.layer_norm(x, x.shape[-1:], weight, bias, eps)
    normed = functional.layer_norm(x.float(), x.shape[-1:], None, None, eps)
    normed = normed if weight is None else normed.mul_(weight)
    return (normed if bias is None else normed.add_(bias)).to(x.dtype)


def in_rows(x: Tensor) -> Tensor:
    """Values (..., width) as (rows, width), where the values of a row lie side by side; copied only where they do not."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


class _LayerNorm(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "out")),
        *((name, ctypes.c_long) for name in ("rows", "width", "kinds", "x_row")),
        ("eps", ctypes.c_float),
        ("kind", ctypes.c_int),
    )


# -- lengths ---------------------------------------------------------------------------------------------------------------
# The lengths of the vectors of heads, in fp32. C and torch sum squares in different orders. With C a length depends on nothing
# but its vector.


def lengths(x: Tensor) -> Tensor:
    (rows, tokens, heads, dim), x = x.shape, x if x.stride(3) == 1 else x.contiguous()
    out = torch.empty(rows, tokens, heads, dtype=torch.float32)
    given = _Vectors(ValuePlaces.of(x.transpose(1, 2), KINDS[x.dtype]), pointer(out), rows, tokens, heads, dim)
    run("lengths", given, threads_for(x.numel()))
    return out


def lengths_twin(x: Tensor) -> Tensor:
    return x.float().square().sum(dim=-1).sqrt()


class _Vectors(ctypes.Structure):
    _fields_ = (
        ("x", ValuePlaces),
        ("out", ctypes.c_void_p),
        *((name, ctypes.c_long) for name in ("rows", "tokens", "heads", "dim")),
    )


# -- gating ----------------------------------------------------------------------------------------------------------------
# The activation of an mlp, and its product with a second factor where there is one, in one pass. C and torch differ in the
# last bits of float32; both round the activation to the type of the values first. With C what becomes of a value depends on
# nothing but the value: torch gives the last values of a tensor, and of a thread's part, other last bits.

SILU, GELU_TANH, GELU, QUICK_GELU, RELU, RELU_SQUARED, CLAMPED_SILU, XIELU, SIGMOID, IDENTITY = range(10)  # as in C


def gated_silu(gate: Tensor, up: Tensor | None, counted: CountedRows | None = None) -> Tensor:
    """`counted`: how many of the rows (rows, width) there are, where memory says it"""
    return _gated(gate, up, SILU, counted)


def gated_silu_twin(gate: Tensor, up: Tensor | None) -> Tensor:
    return _times(functional.silu(gate, inplace=True), up)


def gated_gelu_tanh(gate: Tensor, up: Tensor | None, counted: CountedRows | None = None) -> Tensor:
    return _gated(gate, up, GELU_TANH, counted)


def gated_gelu_tanh_twin(gate: Tensor, up: Tensor | None) -> Tensor:
    return _times(functional.gelu(gate, approximate="tanh"), up)


def gated_gelu(gate: Tensor, up: Tensor | None) -> Tensor:
    return _gated(gate, up, GELU)


def gated_gelu_twin(gate: Tensor, up: Tensor | None) -> Tensor:
    return _times(functional.gelu(gate), up)


def gated_quick_gelu(gate: Tensor, up: Tensor | None) -> Tensor:
    return _gated(gate, up, QUICK_GELU)


def gated_quick_gelu_twin(gate: Tensor, up: Tensor | None) -> Tensor:
    wide = gate.float()
    return _times(torch.sigmoid(1.702 * wide).mul_(wide).to(gate.dtype), up)


def gated_relu(gate: Tensor, up: Tensor | None) -> Tensor:
    return _gated(gate, up, RELU)


def gated_relu_twin(gate: Tensor, up: Tensor | None) -> Tensor:
    return _times(torch.relu_(gate), up)


def gated_relu_squared(gate: Tensor, up: Tensor | None, counted: CountedRows | None = None) -> Tensor:
    return _gated(gate, up, RELU_SQUARED, counted)


def gated_relu_squared_twin(gate: Tensor, up: Tensor | None) -> Tensor:
    return _times(torch.relu_(gate).square_(), up)


def gated_sigmoid(gate: Tensor, up: Tensor | None) -> Tensor:
    return _gated(gate, up, SIGMOID)


def gated_sigmoid_twin(gate: Tensor, up: Tensor | None) -> Tensor:
    return _times(torch.sigmoid_(gate), up)


def gated_identity(gate: Tensor, up: Tensor | None) -> Tensor:
    return _gated(gate, up, IDENTITY)


def gated_identity_twin(gate: Tensor, up: Tensor | None) -> Tensor:
    return _times(gate, up)


def clamped_silu(gate: Tensor, up: Tensor, limit: float, alpha: float, counted: CountedRows | None = None) -> Tensor:
    """silu of alpha * gate, where a gate counts as no higher than the limit, times (up + 1) / alpha, where up is within it"""
    return _gated(gate, up, CLAMPED_SILU, counted, limit, alpha)


def clamped_silu_twin(gate: Tensor, up: Tensor, limit: float, alpha: float) -> Tensor:
    gate.clamp_(max=limit).mul_(alpha)
    return gated_silu_twin(gate, up.clamp_(-limit, limit).add_(1.0).div_(alpha))


def xielu(x: Tensor, rising: Tensor, falling: Tensor, slope: Tensor, least: Tensor) -> Tensor:
    return _gated(x, None, XIELU, shape=[pointer(each) for each in (rising, falling, slope, least)])


def xielu_twin(x: Tensor, rising: Tensor, falling: Tensor, slope: Tensor, least: Tensor) -> Tensor:
    wide = x.float() if x.itemsize < 4 else x
    above = functional.softplus(rising) * wide * wide
    below = (torch.expm1(torch.minimum(wide, least)) - wide) * (slope + functional.softplus(falling))
    return (torch.where(wide > 0, above, below) + slope * wide).to(x.dtype)


def _times(activated: Tensor, up: Tensor | None) -> Tensor:
    return activated if up is None else activated.mul_(up)


def _gated(
    gate: Tensor,
    up: Tensor | None,
    curve: int,
    counted: CountedRows | None = None,
    limit: float = 0.0,
    alpha: float = 1.0,
    shape: Sequence[int | None] = (None,) * 4,
) -> Tensor:
    assert up is None or (gate.shape == up.shape and gate.dtype == up.dtype)
    places = pointer(gate, writes=True), None if up is None else pointer(up)
    given = _Gating(*places, gate.numel(), KINDS[gate.dtype], curve, limit, alpha, *shape)
    if counted is not None:
        counted.place_all(given, _Gating.count.offset, unit=gate.shape[-1])
    run("gated", given, threads_for(gate.numel()))
    return gate


class _Gating(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("gate", "up")),
        ("count", ctypes.c_long),
        *((name, ctypes.c_int) for name in ("kind", "curve")),
        *((name, ctypes.c_float) for name in ("limit", "alpha")),
        *((name, ctypes.c_void_p) for name in ("rising", "falling", "slope", "least")),
    )


# -- halves apart ----------------------------------------------------------------------------------------------------------
# Rows of values of which the first are neighbours that belong together, with those that come first before those that come
# second. The rest of a row stays. C and torch give the same bits.


def halves_apart(x: Tensor, paired: int) -> Tensor:
    x, out, width = x.contiguous(), torch.empty(x.shape, dtype=x.dtype), x.shape[-1]
    assert paired % 2 == 0 and paired <= width and x.itemsize in (2, 4)
    given = _Pairs(pointer(x), pointer(out), x.numel() // max(1, width), paired // 2, width - paired, x.itemsize)
    run("halves_apart", given, threads_for(x.numel()))
    return out


def halves_apart_twin(x: Tensor, paired: int) -> Tensor:
    out, half = torch.empty(x.shape, dtype=x.dtype, device=x.device), paired // 2  # no second copy: rows may be very wide
    out[..., :half], out[..., half:paired], out[..., paired:] = x[..., :paired:2], x[..., 1:paired:2], x[..., paired:]
    return out


class _Pairs(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "out")),
        *((name, ctypes.c_long) for name in ("rows", "half", "rest", "nbytes")),
    )


# -- add scaled ------------------------------------------------------------------------------------------------------------
# Values that are limited, scaled, added to others, and multiplied by a number in memory, in place. What comes of each step is
# rounded to the type of the values, so C and torch give the same bits.


def add_scaled(x: Tensor, added: Tensor | None, scale: float, limit: float, by: Tensor | None = None) -> Tensor:
    rows, others = _rows_in_place(x), None if added is None else in_rows(added)
    assert others is None or (others.shape == rows.shape and others.dtype == x.dtype)
    assert by is None or (by.numel() == 1 and by.dtype == torch.float32)
    given = _ScaledSums(
        address_of(rows, writes=True),
        None if others is None else address_of(others),
        None if by is None else pointer(by),
        *(*rows.shape, rows.stride(0) * x.itemsize, 0 if others is None else others.stride(0) * x.itemsize),
        *(scale, limit, KINDS[x.dtype]),
    )
    run("add_scaled", given, threads_for(x.numel()))
    return x


def _rows_in_place(x: Tensor) -> Tensor:
    rows = x.view(-1, x.shape[-1])
    assert rows.stride(1) == 1 or rows.shape[1] == 1
    return rows


def add_scaled_twin(x: Tensor, added: Tensor | None, scale: float, limit: float, by: Tensor | None = None) -> Tensor:
    if limit != inf:
        x.clamp_(-limit, limit)
    if scale != 1.0:
        x.mul_(scale)
    total = x if added is None else x.add_(added)
    return total if by is None else total.mul_(by)


class _ScaledSums(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "added", "by")),
        *((name, ctypes.c_long) for name in ("rows", "width", "x_row", "added_row")),
        *((name, ctypes.c_float) for name in ("scale", "limit")),
        ("kind", ctypes.c_int),
    )


# -- add weighted ----------------------------------------------------------------------------------------------------------
# Adds rows, each times its weight, to rows of sums, in their order: the outcome does not depend on how many come at once. C
# and torch give the same bits.


def add_weighted(sums: Tensor, rows: Tensor, weights: Tensor, to: Tensor, counts: Sequence[int] | CountedRows) -> None:
    """sums (sums, width), float32; rows (count, width); weights (count,), float32; to (count,), int64: the sum of each row. Of
    the `counts`, which follow each other, no two rows have the same sum."""
    assert sums.stride(1) == 1 and rows.shape[1] == sums.shape[1]
    places = (pointer(rows), pointer(weights), pointer(to), address_of(sums, writes=True))
    given = _Additions(*places, *rows.shape, sums.stride(0) * sums.itemsize, KINDS[rows.dtype])
    if isinstance(counts, CountedRows):
        counts.place_all(given, _Additions.count.offset)
    else:
        assert len(rows) == sum(counts)
    run("add_weighted", given, threads_for(rows.numel()))


def add_weighted_twin(sums: Tensor, rows: Tensor, weights: Tensor, to: Tensor, counts: Sequence[int]) -> None:
    """Torch adds several rows to one sum in any order, so those of a count are added at once, which have sums of their own."""
    for own, its, places in zip(rows.split(list(counts)), weights.split(list(counts)), to.split(list(counts))):
        sums.index_add_(0, places, own.float() * its[:, None])


class _Additions(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "weights", "to", "sums")),
        *((name, ctypes.c_long) for name in ("count", "width", "sums_row")),
        ("kind", ctypes.c_int),
    )
