"""The arithmetic of decoder layers: pure functions over tensors and a dict of weights. None writes into what it is given,
except the activations, which get only tensors that nothing else needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from h2o_flexgen.kernels import operations
from h2o_flexgen.kernels.counted_rows import CountedRows
from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.matrix import Matrix, PackedMatrix, SteadyMatrix, counted_linear_of_each, linear_of_each
from h2o_flexgen.kernels.operations import Counts, gated_gelu, gated_gelu_tanh, gated_silu, gated_silu_of_each, plain_product
from h2o_flexgen.kernels.recording import CannotBeRecorded
from h2o_flexgen.models.base import Weights

Activation = Callable[[Tensor], Tensor]
Gating = Callable[[Tensor, Tensor], Tensor]


def linear(x: Tensor, weights: Weights, name: str) -> Tensor:
    (out,) = linears(x, weights, name)
    return out


def linears(x: Tensor, weights: Weights, *names: str) -> Iterator[Tensor]:
    """Products of the same rows, which are made ready for them only once. Each is computed when it is asked for."""
    factor = Factor(x)
    for name in names:
        matrix, bias = weights[f"{name}.weight"], plain(weights, f"{name}.bias")
        yield plain_product(factor, matrix, bias) if isinstance(matrix, Tensor) else matrix.linear(factor, bias)


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


def wide_linear(x: Tensor, weights: Weights, name: str) -> Tensor:
    """The product in fp32 with a matrix that is never packed."""
    matrix, factor = weights[f"{name}.weight"], Factor(x.float())
    if isinstance(matrix, SteadyMatrix):
        return SteadyMatrix(matrix.values.float()).linear(factor, None)
    assert isinstance(matrix, Tensor), name
    return plain_product(factor, matrix.float(), None)


def _linear(weights: Weights, name: str) -> tuple[Matrix, Tensor | None]:
    matrix = weights[f"{name}.weight"]
    assert isinstance(matrix, (Tensor, PackedMatrix, SteadyMatrix)), name
    return matrix, plain(weights, f"{name}.bias")


def embedding(rows: Tensor, weights: Weights, name: str) -> Tensor:
    table = plain(weights, f"{name}.weight")
    assert table is not None, name
    return functional.embedding(rows, table)


def layer_norm(x: Tensor, weights: Weights, name: str, eps: float = 1e-5) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], plain(weights, f"{name}.weight"), plain(weights, f"{name}.bias"), eps)


def rms_norm(x: Tensor, weights: Weights, name: str, eps: float) -> Tensor:
    weight = plain(weights, f"{name}.weight")
    assert weight is not None, name
    return operations.rms_norm(x, weight, eps)


def rms_norm_from_one(x: Tensor, weights: Weights, name: str, eps: float) -> Tensor:
    """The same where a weight says what is added to one. In 16 bits, one and a weight are not added before they are widened."""
    weight = plain(weights, f"{name}.weight")
    assert weight is not None, name
    normed = operations.rms_norm(x.float(), weight.float() + 1.0, eps)
    return normed.to(x.dtype)


def plain(weights: Weights, name: str) -> Tensor | None:
    """A tensor that is none of those that rows are multiplied with, if the layer has it."""
    found = weights.get(name)
    assert found is None or isinstance(found, Tensor), name
    return found


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    return x.view(*x.shape[:-1], -1, head_dim)  # (rows, tokens, heads, head_dim)


def sigmoid(x: Tensor) -> Tensor:
    """The sigmoid in fp32. A value has the same bits in any company: torch gives the last values of a tensor others."""
    return x.float().neg().exp_().add_(1.0).reciprocal_()


def _quick_gelu(x: Tensor) -> Tensor:
    return sigmoid(1.702 * x.float()).mul_(x).to(x.dtype)


SILU, GELU_TANH = ("silu", "swish"), ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
GATED = {
    **dict.fromkeys(SILU, gated_silu),
    **dict.fromkeys(GELU_TANH, gated_gelu_tanh),
    "gelu": gated_gelu,
}

# may overwrite their argument
ACTIVATIONS: Mapping[str, Activation] = {
    "relu": torch.relu_,
    **GATED,
    "quick_gelu": _quick_gelu,
}


def activation(name: str) -> Activation:
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not supported; known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def gating(name: str) -> Gating:
    """The product of an activation of one factor with the other. May overwrite the first."""
    return GATED.get(name) or partial(_gated, activation(name))


def gated_each(gating: Gating, gate: Tensor, up: Tensor, counts: Counts) -> Tensor:
    """The same for rows (rows, width), of which so many, one behind the other, do not depend on the rest."""
    if gating is gated_silu:
        return gated_silu_of_each(gate, up, counts)
    if isinstance(counts, CountedRows):
        raise CannotBeRecorded("only silu is a gate of rows that memory counts")
    return torch.cat([gating(*own) for own in zip(gate.split(list(counts)), up.split(list(counts)))])


def _gated(active: Activation, gate: Tensor, up: Tensor) -> Tensor:
    return active(gate).mul_(up)
