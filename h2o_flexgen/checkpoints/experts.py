"""Experts as checkpoints have them, by one set of names: a matrix for each expert, wherever its bytes lie.

Checkpoints of Mixtral name them in words of their own. Those that transformers writes as it holds them have all experts of a
layer in one tensor of three dimensions; there the rows of each expert lie together, those of its gate before the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod

from h2o_flexgen.checkpoints.stored import StoredMatrix, StoredTensor
from h2o_flexgen.core.model_spec import DTYPE_BYTES

GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"
OF_ALL = ".mlp.experts."  # stands before what is one tensor for all experts of a layer
TOGETHER = {f"{OF_ALL}gate_up_proj": (GATE, UP), f"{OF_ALL}{DOWN}": (DOWN,)}
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
        end = next((end for end in TOGETHER if tensor.name.endswith(end)), None)
        if end is None or tensor.dtype not in DTYPE_BYTES:
            named = {usual_name(tensor.name): tensor}
        else:
            named = {part.name: part for part in _taken_apart(tensor, tensor.name.removesuffix(end), TOGETHER[end])}
        if twice := named.keys() & found.keys():
            raise ValueError(
                f"{tensor.name} in {tensor.file} is there under another name, too ({min(twice)}); remove one of them"
            )
        found |= named
    return found


def usually_named(matrices: Mapping[str, StoredMatrix]) -> dict[str, StoredMatrix]:
    return {usual_name(name): matrix for name, matrix in matrices.items()}


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
