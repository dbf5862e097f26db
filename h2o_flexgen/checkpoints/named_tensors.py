"""Tensors of files by the names that models have for them, with a matrix for each expert, wherever its bytes lie.

An architecture says what its files call otherwise. Folders that transformers writes as it holds a model have all experts of a
layer in one tensor of three dimensions; there the rows of each expert lie together, those of its gate before the others. Where
experts have biases, gate and up are one matrix, and plain ones are transposed; those of Llama 4 are transposed, too. GGUF files
have one tensor for each matrix of all experts, or one for their gates and what goes up. Of these files, a tensor that no layer
would read is refused: it stands for arithmetic that is not done here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import product
from math import prod

from h2o_flexgen.checkpoints.gguf_config import EMBEDDING, FLOAT32, HEAD, ROPE_DIVISORS
from h2o_flexgen.checkpoints.gguf_format import BLOCKS, GgufTensor
from h2o_flexgen.checkpoints.model_files import AGAIN
from h2o_flexgen.checkpoints.stored_architecture import ONE, GgufArchitecture, GgufModel, OfHeads, TensorNames, Turned
from h2o_flexgen.checkpoints.stored_tensors import DECODED, StoredMatrix, StoredTensor
from h2o_flexgen.core.hints import shown
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
        is_turned = usual[tensor.name].endswith(names.turned)
        if is_turned and len(tensor.shape) == 3:
            named = dict(_turned_parts(usual[tensor.name], tensor))
        else:
            both = is_turned and len(tensor.shape) == 2
            named = dict(_parts(usual[tensor.name], _turned(tensor) if both else tensor, all_names))
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
            yield part.name, _turned(part)
    else:
        yield from ((part.name, part) for part in _taken_apart(tensor, prefix, TOGETHER[matrix]))


def _turned_parts(name: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    """The matrices of each expert in a tensor (experts, columns, rows of all of an expert's matrices)."""
    prefix, _, kind = name.rpartition(OF_ALL)
    parts = TOGETHER[kind]
    _, columns, rows = tensor.shape
    if rows % len(parts) or not all(tensor.shape):
        wanted = f"experts, columns, {len(parts)} times as many rows as a matrix has"
        raise ValueError(f"tensor {tensor.name} in {tensor.file} has the shape {tensor.shape} instead of ({wanted})")
    own = rows // len(parts)
    for number, whole in enumerate(_of_each(tensor, f"{prefix}{OF_ALL}%d.{kind}.weight")):
        for place, part in enumerate(parts):
            its = f"{prefix}{OF_ALL}{number}.{part}.weight"
            turned = Turned(rows, range(place * own, (place + 1) * own))
            yield its, replace(whole, name=its, shape=(own, columns), arranged=turned)


def _turned(tensor: StoredTensor) -> StoredTensor:
    return replace(tensor, shape=tensor.shape[::-1], arranged=Turned(tensor.shape[1]))


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


# -- of all heads ------------------------------------------------------------------------------------------------------


def heads_apart(
    tensors: Mapping[str, StoredTensor], matrices: Mapping[str, StoredMatrix], names: TensorNames
) -> tuple[dict[str, StoredTensor], dict[str, StoredMatrix]]:
    """The same with the parts of matrices of all heads in the place of these. What is packed is decoded for that: the parts of
    a head would be no whole blocks of every format."""
    plain, packed = dict(tensors), dict(matrices)
    for name in [*plain, *packed]:
        end = next((end for end in names.of_heads if name.endswith(f".{end}")), None)
        if end is None:
            continue
        matrix = packed.pop(name, None)
        whole = plain.pop(name) if matrix is None else StoredTensor(name, matrix.file, 0, 0, DECODED, matrix.shape)
        for part, own in names.of_heads[end].items():
            _check_heads(whole, own)
            part_name = name.removesuffix(end) + part
            plain[part_name] = replace(whole, name=part_name, shape=own.shape, arranged=own, matrix=matrix, check=None)
    return plain, packed


def _check_heads(tensor: StoredTensor, own: OfHeads) -> None:
    rows, columns = tensor.shape if len(tensor.shape) == 2 else (0, 0)
    if rows % own.heads or rows // own.heads < own.rows.stop or columns != own.columns:
        wanted = f"no rows of {own.heads} heads with {own.columns} columns, for which the model's config asks"
        raise ValueError(f"tensor {tensor.name} in {tensor.file} has the shape {tensor.shape}, {wanted}; check the config")


# -- of GGUF files -----------------------------------------------------------------------------------------------------

IN_BLOCK = re.compile(r"blk\.(?P<block>0|[1-9]\d*)\.(?P<part>[\w.]+\.(weight|bias|scale)|ssm_[ad])")

# names in files -> names in models
OUTSIDE = {EMBEDDING: "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", HEAD: "lm_head.weight"}


def stored_in(said: GgufModel) -> tuple[dict[str, StoredTensor], dict[str, StoredMatrix]]:
    """The tensors of plain values and the packed matrices of a model, by its own names for them."""
    plain, packed = {}, {}
    for given, tensor in _named_in_model(said).items():
        for name, stored in _each_expert(given, tensor, said):
            if tensor.format not in BLOCKS:
                plain[name] = stored
            elif len(stored.shape) == 2:
                packed[name] = StoredMatrix(name, tensor.format, stored.shape, (stored,))
            else:
                raise ValueError(f"{tensor.file} has the tensor {shown(tensor.name)}, no matrix, as {tensor.format}; {AGAIN}")
    return plain | {one.name: one for one in _numbers(said)}, packed


def _numbers(said: GgufModel) -> Iterator[StoredTensor]:
    """Tensors of one value that the metadata have as a list with an entry for each block."""
    metadata, itemsize = said.metadata, DTYPE_BYTES[FLOAT32]
    for key, (name, shape) in said.architecture.numbers.items():
        found = metadata.numbers(said.key(key))
        if found.itemsize != itemsize or len(found) != said.blocks:
            raise said.refusal(key, f"which are no {said.blocks} numbers in {FLOAT32}, one for each block; {AGAIN}")
        place = metadata.places[said.key(key)]
        for block in range(said.blocks):
            own = f"model.layers.{block}.{name}"
            yield StoredTensor(own, metadata.path, place + block * itemsize, itemsize, FLOAT32, shape)


def _each_expert(name: str, tensor: GgufTensor, said: GgufModel) -> Iterator[tuple[str, StoredTensor]]:
    """A tensor, or those of each expert in one of all: matrices (experts, outputs, inputs), or biases (experts, outputs)."""
    is_row = len(tensor.shape) == 1 and name.endswith(said.architecture.single_rows)
    shape = (1, *tensor.shape) if is_row else tensor.shape
    if len(shape) > 1 and name.endswith(said.architecture.convolutions):
        shape = prod(shape[:-1]), 1, shape[-1]
    if len(shape) == 2 and name.endswith(said.architecture.vectors):
        shape = (shape[0] * shape[1],)
    if name.endswith(said.architecture.between_ones):
        shape = 1, 1, prod(shape), 1
    if len(shape) == 3 and name.endswith(said.architecture.of_heads):
        shape = shape[0] * shape[1], shape[2]
    whole = StoredTensor(tensor.name, tensor.file, tensor.offset, tensor.nbytes, tensor.format, shape)
    if ONE not in name:
        yield name, whole
        return
    wanted = 2 if name.endswith(".bias") else 3
    if len(shape) != wanted:
        raise ValueError(f"{tensor.file} has {shown(tensor.name)} with {len(shape)} dimensions instead of {wanted}; {AGAIN}")
    parts = [name.replace(GATE_UP, own) for own in TOGETHER[GATE_UP]] if GATE_UP in name else [name]
    if shape[1] % len(parts):
        raise ValueError(f"{tensor.file} has {shown(tensor.name)} with {shape[1]} rows, which are no two halves; {AGAIN}")
    rows, nbytes = (shape[1] // len(parts), *shape[2:]), tensor.nbytes // max(shape[0] * len(parts), 1)
    for place, (number, part) in enumerate(product(range(shape[0]), parts)):
        yield part.format(number), replace(whole, offset=tensor.offset + place * nbytes, nbytes=nbytes, shape=rows)


def _named_in_model(said: GgufModel) -> dict[str, GgufTensor]:
    """The tensors of the model by its own names for them."""
    found = {}
    for tensor in said.gguf.tensors:
        if not _is_beside(tensor.name, said):
            name = _name_in_model(tensor.name, said)
            if name is None:
                what = f"which no layer of a {said.model_type} model reads"
                raise ValueError(f"{tensor.file} has the tensor {shown(tensor.name)}, {what}; give another model")
            found[name] = tensor
    return found


def _is_beside(name: str, said: GgufModel) -> bool:
    """Whether a tensor is of no layer, and yet nothing that would be missed."""
    inside = IN_BLOCK.fullmatch(name)
    if inside is None:
        return name == ROPE_DIVISORS and said.architecture.has_divisors
    return said.blocks <= int(inside["block"]) < said.whole("block_count")


def _name_in_model(name: str, said: GgufModel) -> str | None:
    inside = IN_BLOCK.fullmatch(name)
    is_of_layer = inside is None or int(inside["block"]) < said.blocks
    return name_in_models(name, said.architecture) if is_of_layer else None


def name_in_models(name: str, architecture: GgufArchitecture) -> str | None:
    """The name in models of a tensor of GGUF files, if the architecture has it."""
    inside = IN_BLOCK.fullmatch(name)
    if inside is None:
        return OUTSIDE.get(name) or architecture.outside.get(name)
    part = architecture.tensors.get(inside["part"])
    return f"model.layers.{inside['block']}.{part}" if part else None
