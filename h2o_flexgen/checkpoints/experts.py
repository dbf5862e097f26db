"""Experts as checkpoints have them, by one set of names: a matrix for each expert, wherever its bytes lie.

Checkpoints of Mixtral name them in words of their own. Those that transformers writes as it holds them have all experts of a
layer in one tensor of three dimensions; there the rows of each expert lie together, those of its gate before the others. In
those of gpt-oss the experts have biases, gate and up are one matrix, and plain ones are transposed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod

from h2o_flexgen.checkpoints.stored_tensors import StoredMatrix, StoredTensor
from h2o_flexgen.core.model_spec import DTYPE_BYTES

GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"
GATE_UP, BIAS = "gate_up_proj", "_bias"
OF_ALL = ".mlp.experts."  # stands before what is one tensor for all experts of a layer
TOGETHER = {GATE_UP: (GATE, UP), DOWN: (DOWN,)}
OF_MIXTRAL = re.compile(r"\.block_sparse_moe\.(gate|experts\.\d+)\.(?:(w[123])\.)?")
WORDS = {"w1": GATE, "w2": DOWN, "w3": UP}


def usual_name(name: str) -> str:
    """The name that this tensor of an expert or a router has in most checkpoints."""

    def usual(found: re.Match[str]) -> str:
        part, word = found.groups()
        return f".mlp.{part}." if word is None else f".mlp.{part}.{WORDS[word]}."

    return OF_MIXTRAL.sub(usual, name)


def each_expert(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors by their usual names, with one for each matrix of each expert."""
    found: dict[str, StoredTensor] = {}
    for tensor in tensors.values():
        named = dict(_parts(tensor, tensors))
        if twice := named.keys() & found.keys():
            raise ValueError(
                f"{tensor.name} in {tensor.file} is there under another name, too ({min(twice)}); remove one of them"
            )
        found |= named
    return found


def matrices_of_each(matrices: Mapping[str, StoredMatrix]) -> dict[str, StoredMatrix]:
    """The same for matrices in a format of their checkpoint's own."""
    return {name: part for name, matrix in matrices.items() for name, part in _parts_of_matrix(name, matrix)}


def _parts_of_matrix(name: str, matrix: StoredMatrix) -> Iterator[tuple[str, StoredMatrix]]:
    prefix, _, kind = name.rpartition(OF_ALL)
    if len(matrix.shape) != 3 or kind not in TOGETHER:
        yield usual_name(name), matrix
        return
    for sections in zip(*(_of_each(section, f"{prefix}{OF_ALL}%d.{kind}.weight") for section in matrix.sections)):
        own = sections[0].name
        yield own, replace(matrix, name=own, shape=matrix.shape[1:], sections=sections)


def _parts(tensor: StoredTensor, tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, StoredTensor]]:
    """What a tensor is of each expert, or itself, by name."""
    prefix, of_all, kind = tensor.name.rpartition(OF_ALL)
    matrix = kind.removesuffix(BIAS)
    if not of_all or matrix not in TOGETHER or tensor.dtype not in DTYPE_BYTES:
        yield usual_name(tensor.name), tensor
    elif kind != matrix:
        _check_dimensions(tensor, 2, "experts, rows")
        yield from ((part.name, part) for part in _of_each(tensor, f"{prefix}{OF_ALL}%d.{matrix}.bias"))
    elif f"{prefix}{OF_ALL}{GATE_UP}{BIAS}" in tensors:
        _check_dimensions(tensor, 3, "experts, columns, rows")
        for part in _of_each(tensor, f"{prefix}{OF_ALL}%d.{matrix}.weight"):
            yield part.name, replace(part, shape=part.shape[::-1], is_turned=True)
    else:
        yield from ((part.name, part) for part in _taken_apart(tensor, prefix, TOGETHER[matrix]))


def _of_each(tensor: StoredTensor, name: str) -> Iterator[StoredTensor]:
    """The parts of a tensor that each expert has, of which the name says where its number stands."""
    count, *shape = tensor.shape
    nbytes = tensor.nbytes // count
    for number in range(count):
        start = tensor.offset + number * nbytes
        yield replace(tensor, name=name % number, offset=start, nbytes=nbytes, shape=tuple(shape), check=None)


def _check_dimensions(tensor: StoredTensor, count: int, wanted: str) -> None:
    if len(tensor.shape) != count or not all(tensor.shape):
        raise ValueError(f"tensor {tensor.name} in {tensor.file} has the shape {tensor.shape} instead of ({wanted})")


def _taken_apart(tensor: StoredTensor, prefix: str, names: tuple[str, ...]) -> Iterator[StoredTensor]:
    """The matrices in a tensor (experts, rows of all of an expert's matrices, columns)."""
    if len(tensor.shape) != 3 or tensor.shape[1] % len(names):
        wanted = f"experts, {len(names)} times as many rows as a matrix has, columns"
        raise ValueError(f"tensor {tensor.name} in {tensor.file} has the shape {tensor.shape} instead of ({wanted})")
    experts, rows, columns = tensor.shape
    shape = rows // len(names), columns
    nbytes = prod(shape) * DTYPE_BYTES[tensor.dtype]
    for number in range(experts):
        for place, name in enumerate(names):
            start = tensor.offset + (number * len(names) + place) * nbytes
            own = f"{prefix}{OF_ALL}{number}.{name}.weight"
            yield replace(tensor, name=own, offset=start, nbytes=nbytes, shape=shape, check=None)
