"""ModelSpec: the sizes of a model, layer by layer and tensor by tensor. The files in models/ write it; all of planning reads
it.

A *layer* here is a step of the schedule: the embedding, a decoder block (or its attention and its mlp apart), the head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from h2o_flexgen.quant.codec import CODECS, PLAIN

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ON_CPU, ON_ACCELERATOR = "bfloat16", "float16"
TABLE_PARTS, PART_ROWS = 16, 64  # a packed head is decoded in so many parts at most, of so many rows or a multiple


@dataclass(frozen=True)
class TensorSpec:
    """One tensor: its name in the checkpoint, its shape, the bytes of a value as computed with and as stored on disk, and how
    the values are written down until they are computed with: in the file, in memory and on the way."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    stored_itemsize: int
    codec: str = PLAIN

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """In memory and on the way."""
        return CODECS[self.codec].nbytes(self.shape, self.itemsize)

    @property
    def stored_nbytes(self) -> int:
        return CODECS[self.codec].nbytes(self.shape, self.stored_itemsize)

    @property
    def decoded_nbytes(self) -> int:
        """Held beside the bytes of the codec while the tensor is computed with."""
        return 0 if self.codec == PLAIN else self.numel * self.itemsize


@dataclass(frozen=True)
class LayerSpec:
    """One step of the schedule. `tensors` pairs the name that the layer's function uses with the tensor in the checkpoint."""

    kind: str  # "embed", "attention", "mlp", "block" (both at once) or "head"
    index: int  # which decoder block; 0 for embed and head
    tensors: tuple[tuple[str, TensorSpec], ...]
    out_width: int  # values per token that it hands to the next layer
    table: str | None = None  # which of `tensors` has a row for every token of the vocabulary

    @property
    def has_kv(self) -> bool:
        return self.kind in ("attention", "block")

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.tensors)

    @property
    def packed_table(self) -> TensorSpec | None:
        """The table, where its rows have to be decoded."""
        return next((tensor for name, tensor in self.tensors if name == self.table and tensor.codec != PLAIN), None)

    @property
    def table_parts(self) -> tuple[slice, ...]:
        """The rows of a packed head that are decoded, and multiplied with, at once: a part has far less of them than a
        vocabulary has. The parts are the same under every plan, because the last bits of a product may depend on its rows."""
        if self.packed_table is None:
            return ()
        rows = self.packed_table.shape[0]
        step = -(-rows // (TABLE_PARTS * PART_ROWS)) * PART_ROWS
        return tuple(slice(start, min(start + step, rows)) for start in range(0, rows, step))

    @property
    def decoded(self) -> tuple[TensorSpec, ...]:
        """What is held as values beside its bytes while the layer is computed with: packed matrices, and of a head's table the
        first and largest part. Of an embedding's table rows are decoded as they are looked up."""
        packed = tuple(tensor for name, tensor in self.tensors if tensor.codec != PLAIN and name != self.table)
        if self.packed_table is None or self.kind == "embed":
            return packed
        largest = self.table_parts[0].stop
        return (*packed, replace(self.packed_table, shape=(largest, *self.packed_table.shape[1:])))

    @property
    def matrices(self) -> tuple[TensorSpec, ...]:
        """Weights that every token is multiplied with: of a table, rows are only looked up."""
        tables = "embed_" if self.kind == "embed" else None
        two_sided = [(name, tensor) for name, tensor in self.tensors if len(tensor.shape) == 2]
        return tuple(tensor for name, tensor in two_sided if tables is None or not name.startswith(tables))

    @property
    def matmul_values(self) -> int:
        """Two flops each, for every token."""
        return sum(self.values_by_codec.values())

    @cached_property
    def values_by_codec(self) -> Mapping[str, int]:
        """Of its matrices."""
        values: Counter[str] = Counter()
        for tensor in self.matrices:
            values[tensor.codec] += tensor.numel
        return values


@dataclass(frozen=True)
class ModelSpec:
    name: str
    architecture: str  # a key of models.MODELS
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    dtype: str  # computed with
    layers: tuple[LayerSpec, ...]
    kv_codec: str = PLAIN  # how a head's key or value of one token is kept
    rotary: bool = True  # positions are rotations of queries and keys; else they are learned, and added to the embedding

    @property
    def itemsize(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def kv_bytes_per_slot(self) -> int:
        """Bytes of key and value that one token leaves in one layer."""
        return 2 * self.kv_heads * CODECS[self.kv_codec].nbytes((self.head_dim,), self.itemsize)

    @property
    def kv_decoded_bytes_per_slot(self) -> int:
        """The same, as it is computed with."""
        return 2 * self.kv_heads * self.head_dim * self.itemsize

    @cached_property
    def kv_layers(self) -> tuple[int, ...]:
        return tuple(index for index, layer in enumerate(self.layers) if layer.has_kv)

    @cached_property
    def tensors(self) -> dict[str, TensorSpec]:
        """Every tensor of the model once, in layer order: a tied head is the embedding again and not counted twice."""
        return {tensor.name: tensor for layer in self.layers for _, tensor in layer.tensors}

    @cached_property
    def weight_sizes(self) -> Mapping[str, int]:
        """Bytes of each tensor, layer by layer, within a layer the largest first: where they are spread over tiers, the small
        ones then mend what the large ones left uneven."""
        sizes: dict[str, int] = {}
        for layer in self.layers:
            for _, tensor in sorted(layer.tensors, key=lambda pair: -pair[1].nbytes):
                sizes.setdefault(tensor.name, tensor.nbytes)
        return sizes

    @cached_property
    def layer_kinds(self) -> tuple[int, ...]:
        """A number for each layer, the same for those that compute the same and have hidden states of the same sizes."""
        kinds = [(one.kind, tuple((each.shape, each.codec) for each in one.matrices), one.out_width) for one in self.layers]
        return numbered(zip(kinds, [0, *(layer.out_width for layer in self.layers)]))

    @cached_property
    def num_blocks(self) -> int:
        return 1 + max(layer.index for layer in self.layers)

    @cached_property
    def first_blocks(self) -> tuple[ModelSpec, ModelSpec]:
        """The same model with one and with two of its blocks: what these cost says what many do."""

        def cut(blocks: int) -> ModelSpec:
            kept = (layer for layer in self.layers if layer.index < blocks or layer.kind in ("embed", "head"))
            return replace(self, layers=tuple(kept))

        return cut(1), cut(2)

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def widest(self) -> int:
        """Values per token of the widest hidden state between two layers."""
        return max(layer.out_width for layer in self.layers[:-1])

    def flops(self, layer: int, rows: int, tokens: int, context: float) -> float:
        """Of `rows` sequences with `tokens` new tokens each, that attend `context` keys on average."""
        spec = self.layers[layer]
        counted = 1 if spec.kind == "head" else tokens  # logits are made for the last position only
        attention = 4.0 * self.heads * self.head_dim * context if spec.has_kv else 0.0
        return rows * (2.0 * spec.matmul_values * counted + attention * tokens)

    def map_tensors(self, change: Callable[[TensorSpec], TensorSpec]) -> ModelSpec:
        """The same model with every tensor replaced, e.g. by what the checkpoint really stores."""
        layers = tuple(
            replace(layer, tensors=tuple((name, change(tensor)) for name, tensor in layer.tensors)) for layer in self.layers
        )
        return replace(self, layers=layers)

    def packed(self, codec: str) -> ModelSpec:
        """The same model with its matrices and its tables of tokens written down so. A table of positions stays as it is: it
        is small, and in every hidden state."""
        tables = {tensor.name for layer in self.layers for name, tensor in layer.tensors if name == layer.table}
        packed = tables | {tensor.name for layer in self.layers for tensor in layer.matrices}
        return self.map_tensors(lambda tensor: replace(tensor, codec=codec) if tensor.name in packed else tensor)

    def written_as(self, weight_codec: str, kv_codec: str) -> ModelSpec:
        """The same model with its weights and its KV as the codecs of a plan have them."""
        spec = replace(self, kv_codec=kv_codec)
        return spec if weight_codec == PLAIN else spec.packed(weight_codec)


def numbered(kinds: Iterable[Hashable]) -> tuple[int, ...]:
    """A number in the place of each, equal ones have the same: large keys are then small."""
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(kind, len(numbers)) for kind in kinds)


def usual_dtype(accelerator: bool, stored: str | None = None) -> str:
    """bf16 is the fast type of CPUs, where fp16 is some 20 times slower; a GPU takes the checkpoint's, at 16 bits."""
    if not accelerator:
        return ON_CPU
    return stored if stored in (ON_CPU, ON_ACCELERATOR) else ON_ACCELERATOR
