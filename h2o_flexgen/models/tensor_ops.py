"""The arithmetic of decoder layers: pure functions over tensors and a dict of weights. None writes into what it is given,
except the activations, which get only tensors that nothing else needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from h2o_flexgen.kernels import operations
from h2o_flexgen.kernels.factor import CountedRows, Factor
from h2o_flexgen.kernels.matrix import (
    AdaptedMatrix,
    Matrix,
    PackedMatrix,
    SteadyMatrix,
    bare,
    can_be_counted,
    counted_linear_of_each,
    linear_of_each,
    linear_of_parts,
    linears_of_same,
)
from h2o_flexgen.kernels.operations import (
    Counts,
    gated_gelu,
    gated_gelu_tanh,
    gated_gelu_tanh_of_each,
    gated_quick_gelu,
    gated_relu,
    gated_relu_squared,
    gated_relu_squared_of_each,
    gated_silu,
    gated_silu_of_each,
    plain_product,
    take_rows,
)
from h2o_flexgen.kernels.recording import CannotBeRecorded
from h2o_flexgen.models.base import BegunWeights, Weights
from h2o_flexgen.models.base import Matrix as ModelMatrix

LEAST_SQUARE = 1e-30  # prevents a division by zero
QKV = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"


class Gating(Protocol):
    def __call__(self, gate: Tensor, up: Tensor | None = None) -> Tensor: ...


def linear(x: Tensor, weights: Weights, name: str) -> Tensor:
    (out,) = linears(x, weights, name)
    return out


def linears(x: Tensor, weights: Weights, *names: str) -> Iterator[Tensor]:
    """Products of the same rows, which are made ready for them only once. Each is computed when it is asked for, or all of them
    at once."""
    if isinstance(weights, BegunWeights):
        return iter(weights.products(names, lambda: _linears(x, weights, names)))
    return _linears(x, weights, names)


def _linears(x: Tensor, weights: Weights, names: Sequence[str]) -> Iterator[Tensor]:
    """The adapters of rows add to products here, and nowhere else."""
    factor, given = Factor(x), [weights[f"{name}.weight"] for name in names]
    products = _products(factor, [(bare(matrix), plain(weights, f"{name}.bias")) for name, matrix in zip(names, given)])
    if not [matrix for matrix in given if isinstance(matrix, AdaptedMatrix)]:
        return products
    return (matrix.added(factor, out) if isinstance(matrix, AdaptedMatrix) else out for matrix, out in zip(given, products))


def _products(x: Factor, matrices: Sequence[tuple[ModelMatrix, Tensor | None]]) -> Iterator[Tensor]:
    if len(matrices) > 1 and (made := linears_of_same(x, matrices)) is not None:
        yield from made
        return
    for matrix, bias in matrices:
        yield plain_product(x, matrix, bias) if isinstance(matrix, Tensor) else matrix.linear(x, bias)


def linears_of_each(x: Tensor, counts: Counts, weights: Weights, *names: Sequence[str]) -> Iterator[Tensor]:
    """The same of rows (rows, inputs) that have matrices of their own: so many, one behind the other, for each name of a
    product."""
    if isinstance(counts, CountedRows):
        counted = Factor(x, counts)
        yield from (counted_linear_of_each(counted, [_linear(weights, name) for name in own]) for own in names)
        return
    factor, firsts = Factor(x), tuple(accumulate(counts, initial=0))
    for own in names:
        meetings = ((first, rows, *_linear(weights, name)) for first, rows, name in zip(firsts, counts, own))
        yield linear_of_each(factor, list(meetings))


def counts_stay(x: Tensor, each: int, weights: Weights, beginning: str, gating: Gating, has_gate: bool) -> bool:
    """Whether rows may meet the matrices with names that begin so, and be gated, without a wait for how many meet which.
    `each`: how many meet one on average. `has_gate`: there is one beside what goes up."""
    matrices = [weight for name, weight in weights.items() if name.startswith(beginning) and name.endswith(".weight")]
    known = (gated_silu, gated_gelu_tanh) if has_gate else (gated_relu_squared,)  # as below
    return gating in known and can_be_counted(x, each, matrices)


def linear_of_heads(x: Tensor, weights: Weights, name: str) -> Tensor:
    """The products of heads (rows, tokens, heads, inputs) with a matrix of each head, one behind the other in one matrix:
    (rows, tokens, heads, outputs), of which those of a head lie together."""
    if isinstance(weights, BegunWeights):
        (made,) = weights.products((name,), lambda: [_linear_of_heads(x, weights, name)])
        return made
    return _linear_of_heads(x, weights, name)


def _linear_of_heads(x: Tensor, weights: Weights, name: str) -> Tensor:
    rows, tokens, heads, inputs = x.shape
    matrix, _ = _linear(weights, name)
    made = linear_of_parts(x.permute(2, 0, 1, 3).reshape(heads, -1, inputs), matrix)
    return made.view(heads, rows, tokens, -1).permute(1, 2, 0, 3)


def _linear(weights: Weights, name: str) -> tuple[Matrix, Tensor | None]:
    matrix = weights[f"{name}.weight"]
    assert isinstance(matrix, (Tensor, PackedMatrix, SteadyMatrix)), name
    return matrix, plain(weights, f"{name}.bias")


def embedding(rows: Tensor, weights: Weights, name: str, first: int = 0) -> Tensor:
    """The rows of a table with these numbers, counted from `first` on."""
    return take_rows(needed(weights, f"{name}.weight"), rows, first=first)


def layer_norm(x: Tensor, weights: Weights, name: str, eps: float = 1e-5) -> Tensor:
    return operations.layer_norm(x, plain(weights, f"{name}.weight"), plain(weights, f"{name}.bias"), eps)


def rms_norm(x: Tensor, weights: Weights, name: str, eps: float) -> Tensor:
    return operations.rms_norm(x, needed(weights, f"{name}.weight"), eps)


def rms_norm_from_one(x: Tensor, weights: Weights, name: str, eps: float) -> Tensor:
    """The same where a weight says what is added to one. In 16 bits, one and a weight are not added before they are widened."""
    return operations.rms_norm(x, needed(weights, f"{name}.weight"), eps, from_one=True)


def bare_rms_norm(x: Tensor, eps: float) -> Tensor:
    """The same without a weight."""
    return operations.rms_norm(x, None, eps)


def multiplied(one: Tensor, other: Tensor) -> Tensor:
    """The products of the values of two vectors (width,). A norm makes them, as recordings know it: it divides the first by the
    root of its mean square, which is put back."""
    root = operations.lengths(one.view(1, 1, 1, -1)).flatten()
    normed = operations.rms_norm(one.view(1, -1), other, LEAST_SQUARE)
    return operations.add_scaled(normed, scale=one.numel() ** -0.5, by=root).flatten()


def plain(weights: Weights, name: str) -> Tensor | None:
    """A tensor that is none of those that rows are multiplied with, if the layer has it."""
    found = weights.get(name)
    assert found is None or isinstance(found, Tensor), name
    return found


def needed(weights: Weights, name: str) -> Tensor:
    """The same of one that the layer must have."""
    found = plain(weights, name)
    assert found is not None, name
    return found


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    return x.view(*x.shape[:-1], -1, head_dim)  # (rows, tokens, heads, head_dim)


def side_by_side(first: Tensor, second: Tensor) -> Tensor:
    """Values that a later layer takes apart, by copies alone."""
    both = first.new_empty(*first.shape[:-1], 2, first.shape[-1])
    for place, half in enumerate((first, second)):
        both[..., place, :] = half
    return both.flatten(-2)


def sigmoid(x: Tensor) -> Tensor:
    """The sigmoid in fp32. A value has the same bits in any company: torch gives the last values of a tensor others."""
    return x.float().neg().exp_().add_(1.0).reciprocal_()


SILU, GELU_TANH = ("silu", "swish"), ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
GATINGS: Mapping[str, Gating] = {
    "relu": gated_relu,
    "relu2": gated_relu_squared,
    **dict.fromkeys(SILU, gated_silu),
    **dict.fromkeys(GELU_TANH, gated_gelu_tanh),
    "gelu": gated_gelu,
    "quick_gelu": gated_quick_gelu,
}


def gating(name: str) -> Gating:
    """An activation of one factor, and its product with the other where there is one. May overwrite the first."""
    if name not in GATINGS:
        raise ValueError(f"activation {name!r} is not supported; known are {', '.join(GATINGS)}")
    return GATINGS[name]


def refuse_other_than_silu(name: str) -> None:
    """Refuses an activation that does not stand behind a short convolution."""
    if name not in SILU:
        raise ValueError(f"activation {name!r} is not supported behind a short convolution; {SILU[0]} is")


def activated_each(gating: Gating, x: Tensor, counts: Counts) -> Tensor:
    """An activation of rows (rows, width), of which so many, one behind the other, do not depend on the rest."""
    if gating is gated_relu_squared:
        return gated_relu_squared_of_each(x, counts)
    if isinstance(counts, CountedRows):
        raise CannotBeRecorded("only the square of relu is an activation of rows that memory counts")
    return torch.cat([gating(own) for own in x.split(list(counts))])


def gated_each(gating: Gating, gate: Tensor, up: Tensor, counts: Counts) -> Tensor:
    """The same with a gate and what goes up."""
    if gating is gated_silu:
        return gated_silu_of_each(gate, up, counts)
    if gating is gated_gelu_tanh:
        return gated_gelu_tanh_of_each(gate, up, counts)
    if isinstance(counts, CountedRows):
        raise CannotBeRecorded("only silu and gelu by a tanh are gates of rows that memory counts")
    return torch.cat([gating(*own) for own in zip(gate.split(list(counts)), up.split(list(counts)))])
