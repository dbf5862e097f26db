"""Tensors as checkpoints have them, by one set of names, with a matrix for each expert, wherever its bytes lie.

An architecture says what its checkpoints call otherwise. Those that transformers writes as it holds them have all experts of a
layer in one tensor of three dimensions; there the rows of each expert lie together, those of its gate before the others. Where
experts have biases, gate and up are one matrix, and plain ones are transposed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from math import prod

from h2o_flexgen.checkpoints.stored_architecture import TensorNames
from h2o_flexgen.checkpoints.stored_tensors import StoredMatrix, StoredTensor
from h2o_flexgen.core.model_spec import DTYPE_BYTES

GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"
GATE_UP, BIAS = "gate_up_proj", "_bias"
OF_ALL = ".mlp.experts."  # stands before what is one tensor for all experts of a layer
TOGETHER = {GATE_UP: (GATE, UP), DOWN: (DOWN,)}


def each_expert(tensors: Mapping[str, StoredTensor], names: TensorNames) -> dict[str, StoredTensor]:
    """The tensors by their usual names, with one for each matrix of each expert."""
    usual = {name: names.usual(name) for name in tensors}
    all_names = set(usual.values())
    found: dict[str, StoredTensor] = {}
    for tensor in tensors.values():
        named = dict(_parts(usual[tensor.name], tensor, all_names))
        if twice := named.keys() & found.keys():
            raise ValueError(
                f"{tensor.name} in {tensor.file} is there under another name, too ({min(twice)}); remove one of them"
            )
        found |= named
    return found


def matrices_of_each(matrices: Mapping[str, StoredMatrix], names: TensorNames) -> dict[str, StoredMatrix]:
    """The same for matrices in a format of their checkpoint's own."""
    return {own: part for name, matrix in matrices.items() for own, part in _parts_of_matrix(names.usual(name), matrix)}


def _parts_of_matrix(name: str, matrix: StoredMatrix) -> Iterator[tuple[str, StoredMatrix]]:
    prefix, _, kind = name.rpartition(OF_ALL)
    if len(matrix.shape) != 3 or kind not in TOGETHER:
        yield name, matrix
        return
    for sections in zip(*(_of_each(section, f"{prefix}{OF_ALL}%d.{kind}.weight") for section in matrix.sections)):
        own = sections[0].name
        yield own, replace(matrix, name=own, shape=matrix.shape[1:], sections=sections)


def _parts(name: str, tensor: StoredTensor, names: Collection[str]) -> Iterator[tuple[str, StoredTensor]]:
    """What a tensor of this usual name is of each expert, or itself, by name; `names` are those of all tensors."""
    prefix, of_all, kind = name.rpartition(OF_ALL)
    matrix = kind.removesuffix(BIAS)
    if not of_all or matrix not in TOGETHER or tensor.dtype not in DTYPE_BYTES:
        yield name, tensor
    elif kind != matrix:
        _check_dimensions(tensor, 2, "experts, rows")
        yield from ((part.name, part) for part in _of_each(tensor, f"{prefix}{OF_ALL}%d.{matrix}.bias"))
    elif f"{prefix}{OF_ALL}{GATE_UP}{BIAS}" in names:
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
