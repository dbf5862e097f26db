"""A codec for tests: every bit inverted, and a trailer behind each row. It loses nothing, so results are bit-identical; but its
bytes have odd numbers, are not values, and take memory to decode. This file is all that a codec with a product of its own
needs: its form, its kernels, and their rows in the table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

from h2o_flexgen.checkpoints.stored_tensors import Located, StoredAs, StoredTensor
from h2o_flexgen.core.model_spec import ModelSpec, TensorSpec
from h2o_flexgen.formats import kernel_table
from h2o_flexgen.formats.kernel_table import DECODE, ENCODE, PRODUCT, Kernel
from h2o_flexgen.formats.table import FORMATS, PLAIN
from h2o_flexgen.kernels import operations
from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.functions import FUNCTIONS
from h2o_flexgen.kernels.operations import encode
from h2o_flexgen.llm import LLM
from tests.helpers.contract import Case, Checkpoints, opened

TRAILER = torch.tensor([0x5A] * 7, dtype=torch.uint8)
ODD_OFFSET = 13  # start of the first tensor in a packed file


@dataclass
class Inverted:
    name: str = "inverted"
    rows_together: int = 1
    few_rows: int = 0  # up to this many rows are multiplied with the bytes
    decoded: int = 0  # decoded values
    multiplied: int = 0  # products with the bytes

    def nbytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        return prod(shape[:-1]) * (shape[-1] * itemsize + len(TRAILER))

    def encode(self, values: Tensor, out: Tensor) -> None:
        assert out.nbytes == self.nbytes(tuple(values.shape), values.dtype.itemsize)
        turned = ~values.contiguous().view(torch.uint8)
        out.copy_(torch.cat([turned, TRAILER.expand(len(values), -1)], dim=1))

    def decode(self, data: Tensor, out: Tensor) -> None:
        self.decoded += out.numel()
        out.copy_(self._values(data, out.dtype))

    def product(self, x: Factor, data: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
        self.multiplied += 1
        assert outputs == len(data)
        return functional.linear(x.values, self._values(data, x.values.dtype), bias)

    def _values(self, data: Tensor, dtype: torch.dtype) -> Tensor:
        turned, trailers = data.tensor_split([-len(TRAILER)], dim=1)
        assert (trailers.cpu() == TRAILER).all(), "these bytes were never encoded, or not all have come"
        return (~turned).view(dtype)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return (
            Kernel(ENCODE, self.name, "inverted_encode"),
            Kernel(DECODE, self.name, "inverted_decode"),
            Kernel(PRODUCT, self.name, "inverted_product", most_rows=self.few_rows),
        )


KERNELS_OF_IT = {"inverted_encode": Inverted.encode, "inverted_decode": Inverted.decode, "inverted_product": Inverted.product}


def rows_of(kernels: Iterable[Kernel], op: str, form: str) -> tuple[Kernel, ...]:
    """The rows of another table, in place of kernels_of."""
    return tuple(kernel for kernel in kernels if kernel.op == op and kernel.format == form)


@contextmanager
def registered(format: Inverted) -> Iterator[Inverted]:
    rows = patch.object(kernel_table, "kernels_of", partial(rows_of, (*format.kernels, *kernel_table.kernels())))
    with patch.dict(FORMATS, {format.name: format}), patch.dict(FUNCTIONS, KERNELS_OF_IT), rows:
        operations._kernel.cache_clear()
        yield format
    operations._kernel.cache_clear()


class InvertedCheckpoint:
    """A WeightSource: plain tensors are in a checkpoint, all others in one file, as they are kept in memory."""

    def __init__(self, kind: str, stored: str, dtype: str, spec: ModelSpec, checkpoints: Checkpoints) -> None:
        self._plain = opened(checkpoints.folder(kind, stored))
        model, weights = checkpoints.model(kind, stored, dtype)
        values = {tensor.name: own[name] for layer, own in zip(model.spec.layers, weights) for name, tensor in layer.tensors}
        file = checkpoints.root / f"{kind}-{stored}-{dtype}.inverted"
        self._packed: dict[str, StoredTensor] = {}
        content = bytearray(ODD_OFFSET)
        for tensor in spec.tensors.values():
            if tensor.format != PLAIN:
                data = torch.empty(tensor.nbytes, dtype=torch.uint8)
                encode(tensor.format, values[tensor.name], data)
                at = len(content)
                self._packed[tensor.name] = StoredTensor(tensor.name, file, at, data.nbytes, "U8", tensor.shape)
                content += data.numpy().tobytes()
        file.write_bytes(content)

    def stored_as(self, name: str) -> StoredAs:
        return self._plain.stored_as(name)

    def locate(self, tensors: Iterable[TensorSpec]) -> Mapping[str, Located]:
        wanted = list(tensors)
        plain = self._plain.locate(tensor for tensor in wanted if tensor.format == PLAIN)
        return {**plain, **{tensor.name: self._packed[tensor.name] for tensor in wanted if tensor.format != PLAIN}}

    def fill(self, tensor: TensorSpec, out: Tensor) -> bool:
        return False

    def close(self) -> None:
        pass


@contextmanager
def opened_inverted(case: Case, checkpoints: Checkpoints, offload: Path, format: Inverted | None = None) -> Iterator[LLM]:
    """The case with its matrices inverted, in a packed file. Bytes are looked at as they are decoded, which no graph can do."""
    with registered(format or Inverted()) as chosen, case.open(checkpoints, offload, graphs="off") as llm:
        llm.loaded.model.spec = llm.spec.packed(chosen.name)
        llm.loaded.source = InvertedCheckpoint(case.kind, case.stored, case.dtype, llm.spec, checkpoints)
        yield llm
