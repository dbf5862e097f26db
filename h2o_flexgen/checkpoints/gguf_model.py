"""GGUF files as checkpoints: their tensors by the names that models have for them, in the formats in which they lie there.

A tensor that no layer would read is refused: it stands for arithmetic that is not done here. Experts lie in one tensor for each
of their matrices, one expert behind the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from h2o_flexgen.checkpoints.gguf_config import EMBEDDING, HEAD, ROPE_DIVISORS
from h2o_flexgen.checkpoints.gguf_format import BLOCKS, GgufTensor
from h2o_flexgen.checkpoints.model_files import AGAIN
from h2o_flexgen.checkpoints.stored_architecture import ONE, GgufModel
from h2o_flexgen.checkpoints.stored_tensors import StoredMatrix, StoredTensor
from h2o_flexgen.core.hints import shown

IN_BLOCK = re.compile(r"blk\.(?P<block>0|[1-9]\d*)\.(?P<part>[\w.]+\.(weight|bias))")

# names in files -> names in models
OUTSIDE = {EMBEDDING: "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", HEAD: "lm_head.weight"}


def stored_in(said: GgufModel) -> tuple[dict[str, StoredTensor], dict[str, StoredMatrix]]:
    """The tensors of plain values and the packed matrices of a model, by its own names for them."""
    plain, packed = {}, {}
    for given, tensor in _named_in_model(said).items():
        for name, stored in _each_expert(given, tensor, said):
            if tensor.kind not in BLOCKS:
                plain[name] = stored
            elif len(stored.shape) == 2:
                packed[name] = StoredMatrix(name, tensor.kind, stored.shape, (stored,))
            else:
                raise ValueError(f"{tensor.file} has the tensor {shown(tensor.name)}, no matrix, as {tensor.kind}; {AGAIN}")
    return plain, packed


def _each_expert(name: str, tensor: GgufTensor, said: GgufModel) -> Iterator[tuple[str, StoredTensor]]:
    """A tensor, or those of each expert in one of all: matrices (experts, outputs, inputs), or biases (experts, outputs)."""
    is_row = len(tensor.shape) == 1 and name.endswith(said.architecture.single_rows)
    shape = (1, *tensor.shape) if is_row else tensor.shape
    whole = StoredTensor(tensor.name, tensor.file, tensor.offset, tensor.nbytes, tensor.kind, shape)
    if ONE not in name:
        yield name, whole
        return
    wanted = 2 if name.endswith(".bias") else 3
    if len(shape) != wanted:
        raise ValueError(f"{tensor.file} has {shown(tensor.name)} with {len(shape)} dimensions instead of {wanted}; {AGAIN}")
    nbytes = tensor.nbytes // max(shape[0], 1)
    for number in range(shape[0]):
        yield name.format(number), replace(whole, offset=tensor.offset + number * nbytes, nbytes=nbytes, shape=shape[1:])


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
    if inside is None:
        return OUTSIDE.get(name)
    part = said.architecture.tensors.get(inside["part"])
    return f"model.layers.{inside['block']}.{part}" if part and int(inside["block"]) < said.blocks else None
