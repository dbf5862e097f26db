"""A codec for tests: every bit turned round, and a trailer behind each row. It loses nothing, so what is computed with it is
bit-identical; but its bytes are of odd numbers, are no values, and decoding them takes memory of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from h2o_flexgen.core.model_spec import ModelSpec, TensorSpec
from h2o_flexgen.llm import LLM
from h2o_flexgen.models.checkpoint import StoredTensor, open_checkpoint
from h2o_flexgen.quant.codec import CODECS, PLAIN
from tests.contract import Case, Checkpoints

TRAILER = torch.tensor([0x5A] * 7, dtype=torch.uint8)
ODD_OFFSET = 13  # of the first tensor in a packed file


@dataclass
class Inverted:
    name: str = "inverted"
    decoded: int = 0  # values

    def nbytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        return prod(shape[:-1]) * (shape[-1] * itemsize + len(TRAILER))

    def encode(self, values: Tensor, out: Tensor) -> None:
        assert out.nbytes == self.nbytes(tuple(values.shape), values.dtype.itemsize)
        rows = prod(values.shape[:-1])
        turned = ~values.contiguous().view(rows, -1).view(torch.uint8)
        out.view(rows, -1).copy_(torch.cat([turned, TRAILER.expand(rows, -1)], dim=1))

    def decode(self, data: Tensor, out: Tensor) -> None:
        assert data.nbytes == self.nbytes(tuple(out.shape), out.itemsize)
        turned, trailers = data.view(prod(out.shape[:-1]), -1).tensor_split([-len(TRAILER)], dim=1)
        assert (trailers.cpu() == TRAILER).all(), "these bytes were never encoded, or not all have come"
        self.decoded += out.numel()
        out.copy_((~turned).view(out.dtype).view(out.shape))

    def product(self, x: Tensor, data: Tensor, bias: Tensor | None) -> Tensor | None:
        return None


@contextmanager
def registered(codec: Inverted) -> Iterator[Inverted]:
    with patch.dict(CODECS, {codec.name: codec}):
        yield codec


class InvertedCheckpoint:
    """A WeightSource: plain tensors lie in a checkpoint, all others in one file of their own, as they are kept in memory."""

    def __init__(self, kind: str, stored: str, dtype: str, spec: ModelSpec, checkpoints: Checkpoints) -> None:
        self._plain = open_checkpoint(checkpoints.folder(kind, stored))
        model, weights = checkpoints.model(kind, stored, dtype)
        values = {tensor.name: own[name] for layer, own in zip(model.spec.layers, weights) for name, tensor in layer.tensors}
        file = checkpoints.root / f"{kind}-{stored}-{dtype}.inverted"
        self._packed: dict[str, StoredTensor] = {}
        content = bytearray(ODD_OFFSET)
        for tensor in spec.tensors.values():
            if tensor.codec != PLAIN:
                data = torch.empty(tensor.nbytes, dtype=torch.uint8)
                CODECS[tensor.codec].encode(values[tensor.name], data)
                at = len(content)
                self._packed[tensor.name] = StoredTensor(tensor.name, file, at, data.nbytes, "U8", tensor.shape)
                content += data.numpy().tobytes()
        file.write_bytes(content)

    def stored_itemsize(self, name: str) -> int:
        return self._plain.stored_itemsize(name)

    def locate(self, tensors: Iterable[TensorSpec]) -> dict[str, StoredTensor]:
        wanted = list(tensors)
        plain = self._plain.locate(tensor for tensor in wanted if tensor.codec == PLAIN)
        return plain | {tensor.name: self._packed[tensor.name] for tensor in wanted if tensor.codec != PLAIN}

    def fill(self, tensor: TensorSpec, out: Tensor) -> bool:
        return False

    def close(self) -> None:
        pass


@contextmanager
def opened_inverted(case: Case, checkpoints: Checkpoints, offload: Path, codec: Inverted | None = None) -> Iterator[LLM]:
    """The case with its matrices inverted, in a packed file."""
    with registered(codec or Inverted()) as chosen, case.open(checkpoints, offload) as llm:
        llm.model.spec = llm.spec.packed(chosen.name)
        llm.source = InvertedCheckpoint(case.kind, case.stored, case.dtype, llm.spec, checkpoints)
        yield llm
