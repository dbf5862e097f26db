"""ModelSpec: the sizes of a model, layer by layer and tensor by tensor. The files in models/ write it; all of planning reads
it.

A *layer* here is a step of the schedule: the embedding, a decoder block (or its attention and its mlp apart), the head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from math import ceil, inf, log1p, nextafter, prod
from typing import Any, NamedTuple

from h2o_flexgen.core.labels import Labels
from h2o_flexgen.formats.kernel_table import EXACT, FLOAT32, PRODUCT, PRODUCTS, rounds
from h2o_flexgen.formats.table import FORMATS, PLAIN, can_be_parted, matrix_format


class LayerName(NamedTuple):
    """The name of a layer, for people. Schedules know layers by their numbers alone; code that shows tasks may be given
    names."""

    title: str  # "experts 8-15 of block 3"
    block: int | None = None  # the decoder block it belongs to
    is_of_experts: bool = False  # a slice of the experts of a block: there are many, and they are drawn in their own way


DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MOST_WIDTH, MOST_HEAD_DIM = 1 << 22, 1 << 14  # far more than any model has, yet tables of that length are made in a moment
IN_HEADS_BYTES = 32 << 20  # of keys and values of heads that are made for prompts at once; of one head at least
TABLE_PARTS, PART_ROWS = 16, 64  # a packed logit matrix has at most this many parts, each of a multiple of this many rows
TRIED_AT_ONCE = 8  # tokens of a row in a pass, its newest included, that may be taken back where it has states
ATTENTION_VISIT, MLP_VISIT = "attention", "mlp"  # prices of a visit beside its work


def share_of(part: int, whole: int) -> float:
    """The share of which int(share * whole) is `part`: what a quotient is rounded to may be too small for that."""
    share = part / whole
    return share if int(share * whole) == part else nextafter(share, inf)


def asked_for(share: float, rows: float) -> float:
    """The part that is expected to be needed, by any of so many rows, of matrices that each multiply this share of all rows."""
    return 1.0 if share >= 1.0 else 1.0 - (1.0 - share) ** rows


NEARLY_ALL = 0.98  # of the experts: from this share on, all are brought; a search for experts that no row asks for does not pay


def rows_asking(share: float, part: float = NEARLY_ALL) -> int:
    """The rows from which on they are expected to need this part of the matrices, which is less than all."""
    return 1 if share >= 1.0 else ceil(log1p(-part) / log1p(-share))


@dataclass(frozen=True)
class TensorSpec:
    """One tensor: its name in the checkpoint, its shape, the bytes of a value when computed with and as stored on disk, and the
    format of its values in the file, in memory and in transfers."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    stored_itemsize: int
    format: str = PLAIN
    is_never_packed: bool = False  # it is small, and rounding would change which values are computed at all

    @property
    def kind(self) -> Hashable:
        """All but its name."""
        return self.shape, self.format, self.itemsize, self.stored_itemsize

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        """Bytes in memory and in transfers."""
        return FORMATS[self.format].nbytes(self.shape, self.itemsize)

    @cached_property
    def stored_nbytes(self) -> int:
        return FORMATS[self.format].nbytes(self.shape, self.stored_itemsize)

    @cached_property
    def decoded_nbytes(self) -> int:
        """Bytes of the decoded values, which are held beside the format's bytes while the tensor is computed with."""
        return 0 if self.format == PLAIN else self.numel * self.itemsize


class KVHeads(NamedTuple):
    """The KV heads of a layer's attention."""

    number: int
    width: int  # values of a key, and of a value


class PromptHeads(NamedTuple):
    """Keys and values of each head, which prompts may be attended with where a layer keeps one vector of a token for all heads.
    They are made of a part of that vector, its latent one."""

    latent: int  # values of it
    rotated: int  # of a key: they are those of the vector
    made: int  # of a key: the others
    value: int
    matrices: tuple[str, ...]  # the names of those that they are made by, which must be plain

    @property
    def width(self) -> int:
        """Values of a key and of a value, where the shorter ones are filled up."""
        return max(self.rotated + self.made, self.value)

    def nbytes(self, rows: int, tokens: int, keys: int, itemsize: int) -> int:
        """Bytes of all that is held of a head while prompts of some rows are attended with its keys and values: these, what
        they are made of, queries and their outcome, and what keys got."""
        of_keys = keys * (2 * self.width + self.made + self.value) + 3 * tokens * self.width
        return itemsize * (rows * of_keys + self.latent * (self.made + self.value)) + 4 * rows * keys

    def pays(self, tokens: int, keys: int) -> bool:
        """Whether so many new tokens attend so many keys, themselves last, in fewer operations than without: these are made of
        every key, and not of every new token, but each product of a query and a key is shorter."""
        pairs, making = tokens * (keys - (tokens - 1) / 2), self.latent * (self.made + self.value)
        return 2 * pairs * self.width + keys * making < 2 * pairs * (self.latent + self.rotated) + tokens * making


class OfToken(NamedTuple):
    """What a token brings to a state: values of the model's type, or of fp32."""

    shape: tuple[int, ...]
    is_float32: bool = False


class StateTensor(NamedTuple):
    """A part of the state that a row has in a layer, of one size whatever the length of its text. It is zero before the first
    token, and every step reads and writes all of it."""

    name: str
    shape: tuple[int, ...]
    dtype: str = FLOAT32
    brings: tuple[OfToken, ...] = ()  # by each token
    notes: str | None = None  # the state to which tokens on trial have brought it

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    def of_trial(self, dtype: str) -> Iterator[StateTensor]:
        """What tokens on trial have brought to it, which is noted until it is known how many of them stay."""
        for number, one in enumerate(self.brings):
            own = FLOAT32 if one.is_float32 else dtype
            yield StateTensor(f"{self.name} {number}", (TRIED_AT_ONCE, *one.shape), own, notes=self.name)

    @property
    def in_full(self) -> StateTensor:
        """The same as prompts pass it, which lose nothing."""
        return self._replace(dtype=FLOAT32)

    def kept_as(self, dtype: str) -> StateTensor:
        """The same as steps keep it. Inputs of a convolution are few, and stay what they are."""
        return self._replace(dtype=dtype) if self.is_of_heads else self

    @property
    def is_of_heads(self) -> bool:
        """Whether it is a matrix for each head (heads, key width, value width), and not the inputs of a convolution."""
        return len(self.shape) == 3 and self.notes is None


@dataclass(frozen=True)
class AttentionHalves:
    """An attention among the functions of a layer, and what is before and behind the point where others may attend for it."""

    whole: str  # the function that is both halves
    before: str
    behind: str
    out_width: int  # values per token that it hands on
    used_behind: frozenset[str]  # the names of the tensors that are used behind that point
    used_after: frozenset[str] = frozenset()  # those of them that belong to the functions after the attention
    beside: int = 0  # values per token that the first half hands on, between hidden states and the outcome, for the second one


RECORDED_TURNS = 3  # of experts at most: with 256 in a block, 11 turns of a slice would take a third of a MB


class ExpertTurns(NamedTuple):
    """How experts of a layer come one after the other: as many at once as have hardly more tokens together than there are, or
    one of them."""

    experts: int
    chosen: int  # experts of a token
    most_together: float  # so many times as many rows as there are tokens are computed at once
    few_rows: int  # are always computed at once

    def rows(self, tokens: int) -> int:
        """Rows that are computed at once."""
        return max(tokens, min(self._most_rows(tokens), max(self.few_rows, int(self.most_together * tokens))))

    def most(self, tokens: int) -> int:
        """Turns that there can be: any turn and the one behind it have more rows than fit into one."""
        return min(self.experts, 2 * ((self._most_rows(tokens) - 1) // self.rows(tokens)) + 1)

    def recorded(self, tokens: int) -> int:
        """Turns of a recorded step."""
        return min(self.most(tokens), RECORDED_TURNS)

    def _most_rows(self, tokens: int) -> int:
        """Rows that these experts can have together."""
        return tokens * min(self.chosen, self.experts)


@dataclass(frozen=True)
class LayerSpec:
    """One step of the schedule. Neither planning nor the engine knows kinds of layers: a layer describes itself. `tensors`
    pairs the names that its functions use with those of the checkpoint."""

    functions: tuple[str, ...]  # methods of the model, each applied to the result of the one before
    tensors: tuple[tuple[str, TensorSpec], ...]
    products: tuple[tuple[str, float], ...]  # matrices, and the share of tokens that each multiplies: k / n for n experts
    out_width: int  # values per token handed to the next layer
    block: int | None = None  # the decoder block it belongs to; None before and after all blocks
    has_kv: bool = False
    kv_heads: KVHeads | None = None  # those of its attention, where they are not those of the model
    window: int | None = None  # tokens that a token sees in its attention, itself included; None: all before it
    states: tuple[StateTensor, ...] = ()  # what a row has in the layer from step to step, beside KV
    visits: tuple[str, ...] = (MLP_VISIT,)  # the prices of a visit beside its work, by their names in a machine
    passing_width: int = 0  # values per token held at once between its products; those of attention come on top
    least_passing: int = 0  # a recorded step has room for the values of so many tokens at least
    token_table: str | None = None  # its lookup table, with a row for every token: the layer takes tokens, not hidden states
    logit_matrix: str | None = None  # makes a logit for every token, part by part: the layer is for last positions only
    halves: AttentionHalves | None = None  # of its attention, if it has one
    in_prompts: LayerSpec | None = None  # the layer as prompts pass it, where decode steps are cut at an attention
    # tensors and the expert that each belongs to; empty where the layer has the router: its choice then comes too late
    experts: tuple[tuple[str, int], ...] = ()
    turns: ExpertTurns | None = None  # in which its experts come, if it has any
    part: str = ""  # what it is of its block, for people, where its functions do not say so
    # a method of the model: whether what is launched for it depends on values that it computes, so that no graph can have it
    reads_back: str = ""
    overwrites: bool = False  # what it makes takes the place of the hidden states that it is handed, where it may

    @property
    def name(self) -> LayerName:
        part = self.part or ", ".join(self.functions)
        title = part if self.block is None else f"{part} of block {self.block}"
        return LayerName(title, self.block, bool(self.experts))

    @property
    def takes_tokens(self) -> bool:
        return self.token_table is not None

    @property
    def makes_logits(self) -> bool:
        return self.logit_matrix is not None

    @property
    def logit_bias(self) -> str | None:
        """The biases of its logits, which are parted as its logit matrix is."""
        own = f"{(self.logit_matrix or '').removesuffix('.weight')}.bias"
        return own if own in dict(self.tensors) else None

    @cached_property
    def stored(self) -> tuple[TensorSpec, ...]:
        """Its tensors, each once: two of its functions may have names of their own for one."""
        return tuple({tensor.name: tensor for _, tensor in self.tensors}.values())

    @cached_property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.stored)

    @property
    def passed_bytes(self) -> int:
        """Bytes of a row's states as prompts pass them."""
        return sum(one.in_full.nbytes for one in self.states if one.notes is None)

    @cached_property
    def expert_of(self) -> Mapping[str, int]:
        """The expert that tensors belong to, by their names in the model."""
        tensors = dict(self.tensors)
        return {tensors[name].name: number for name, number in self.experts if name in tensors}

    def packed_tensor(self, name: str | None) -> TensorSpec | None:
        """The packed tensor of this name, or None if its values need no decoding."""
        return next((tensor for own, tensor in self.tensors if own == name and tensor.format != PLAIN), None)

    @cached_property
    def in_pieces(self) -> tuple[str, ...]:
        """The packed tensors that are decoded a few rows at a time."""
        tables = (name for name in (self.token_table, self.logit_matrix) if name is not None)
        return tuple(name for name in tables if (packed := self.packed_tensor(name)) and can_be_parted(packed.format))

    @cached_property
    def logit_parts(self) -> tuple[slice, ...]:
        """The rows of a packed logit matrix that are decoded and multiplied at once, far fewer than a vocabulary has. The parts
        are the same under every plan, because the last bits of a product may depend on its rows."""
        packed = self.packed_tensor(self.logit_matrix)
        if packed is None or not can_be_parted(packed.format):
            return ()
        rows = packed.shape[0]
        step = -(-rows // (TABLE_PARTS * PART_ROWS)) * PART_ROWS
        return tuple(slice(start, min(start + step, rows)) for start in range(0, rows, step))

    @cached_property
    def decoded(self) -> tuple[TensorSpec, ...]:
        """The tensors held as values beside their bytes while the layer computes: packed tensors, and the first and largest
        part of a logit matrix. Rows of a token table are decoded as they are looked up."""
        whole = tuple(tensor for name, tensor in self.tensors if tensor.format != PLAIN and name not in self.in_pieces)
        packed = self.packed_tensor(self.logit_matrix)
        if packed is None or not can_be_parted(packed.format):
            return whole
        return (*whole, replace(packed, shape=(self.logit_parts[0].stop, *packed.shape[1:])))

    @cached_property
    def multiplied(self) -> tuple[tuple[TensorSpec, float], ...]:
        """The matrices of its products, and the share of a visit's tokens that each multiplies."""
        tensors = dict(self.tensors)
        return tuple((tensors[name], share) for name, share in self.products)

    @property
    def matrices(self) -> tuple[TensorSpec, ...]:
        return tuple(matrix for matrix, _ in self.multiplied)

    def has_plain(self, names: Sequence[str]) -> bool:
        """Whether those of its tensors that have these names are plain."""
        return all(tensor.format == PLAIN for name, tensor in self.tensors if name in names)

    @property
    def matmul_values(self) -> float:
        """Values that a token is multiplied with on average; each costs two flops."""
        return sum(share * values for (_, share), values in self.multiplied_values.items())

    @cached_property
    def multiplied_values(self) -> Mapping[tuple[str, float], int]:
        """The number of values of its matrices, by format and by the share of tokens that they multiply."""
        values: Counter[tuple[str, float]] = Counter()
        for matrix, share in self.multiplied:
            values[matrix.format, share] += matrix.numel
        return values

    @property
    def values_around_products(self) -> float:
        """Values per token that go into its products and come out of them."""
        return sum(share * prod(matrix.shape[:-2]) * sum(matrix.shape[-2:]) for matrix, share in self.multiplied)

    def without(self, *names: str) -> LayerSpec:
        """The layer without some of its tensors, if it has them."""
        return replace(
            self,
            tensors=tuple(pair for pair in self.tensors if pair[0] not in names),
            products=tuple(pair for pair in self.products if pair[0] not in names),
        )

    def with_heads(self, usual: KVHeads) -> LayerSpec:
        """The layer in a model with other heads: it says itself that it has the usual ones, if it has no own."""
        return replace(self, kv_heads=usual) if self.has_kv and self.kv_heads is None else self

    def each_form(self, change: Callable[[LayerSpec], LayerSpec]) -> LayerSpec:
        """The layer changed, and so in the form in which prompts pass it."""
        made = change(self)
        return made if self.in_prompts is None else replace(made, in_prompts=change(self.in_prompts))

    @property
    def computes(self) -> Hashable:
        """Everything that decides what a visit costs; the same for layers that differ only in their tensors' contents."""
        shapes = tuple((matrix.shape, matrix.format, share) for matrix, share in self.multiplied)
        kind = (
            self.functions,
            self.visits,
            self.has_kv,
            self.kv_heads,
            self.window,
            self.states,
            self.token_table,
            self.logit_matrix,
            self.out_width,
        )
        return kind, shapes


@dataclass(frozen=True)
class ModelSpec:
    name: str
    architecture: str  # a key of models.MODELS
    width: int  # values per token of the hidden states between blocks
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    dtype: str  # type of the values in computations
    layers: tuple[LayerSpec, ...]
    kv_codec: str = PLAIN  # format of a head's key or value of one token
    product: str = PRODUCT  # the op by which packed matrices are multiplied
    sink_scores: bool = False  # query heads have a learned score that takes part in their softmax beside those of keys
    attention_cap: float | None = None  # scores of attention come near it and no further
    values_in_keys: int = 0  # so many last values of a key are the values of its head, which are stored once; 0: they are apart
    prompt_heads: PromptHeads | None = None  # with which prompts may be attended, where keys have their values in them
    position_values: int = 0  # so many first values of a key say where it stands; those of its head follow
    rotary: bool = True  # positions are rotations of queries and keys; otherwise they are learned, and added to the embedding
    labels: Labels | None = None  # that its head scores a text by, instead of the tokens of the vocabulary

    @property
    def itemsize(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def kv_bytes_per_slot(self) -> int:
        """Bytes of key and value that one token leaves in one layer."""
        return self.kv_heads * self.kv_bytes_per_head

    @property
    def kv_bytes_per_head(self) -> int:
        """Bytes of key and value that one token leaves in a KV head."""
        return self.kv_sets * FORMATS[self.kv_codec].nbytes((self.head_dim,), self.itemsize)

    @property
    def kv_sets(self) -> int:
        """The sets of values that one token leaves in a KV head: its key and its value, or a key that has the values in it."""
        return 1 if self.values_in_keys else 2

    @property
    def kv_decoded_bytes_per_slot(self) -> int:
        """The same bytes once they are decoded."""
        return self.kv_sets * self.kv_heads * self.head_dim * self.itemsize

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token leaves in all layers."""
        return sum(self.at(layer).kv_bytes_per_slot for layer in self.kv_layers)

    def at(self, layer: int) -> ModelSpec:
        """The model with the KV heads of a layer in all layers."""
        own = self.layers[layer].kv_heads
        if own is None or own == (self.kv_heads, self.head_dim):
            return self
        if own not in self._by_heads:
            usual = KVHeads(self.kv_heads, self.head_dim)
            layers = tuple(one.each_form(lambda form: form.with_heads(usual)) for one in self.layers)
            self._by_heads[own] = replace(self, kv_heads=own.number, head_dim=own.width, layers=layers)
        return self._by_heads[own]

    @cached_property
    def _by_heads(self) -> dict[KVHeads, ModelSpec]:
        return {}

    @cached_property
    def of_heads(self) -> tuple[ModelSpec, ...]:
        """The model with each kind of KV heads that a layer has."""
        found = {(own.kv_heads, own.head_dim): own for own in map(self.at, self.kv_layers)}
        return tuple(found.values()) or (self,)

    def refuse_unlike_heads(self, what: str, widths: bool = False) -> None:
        """Refuses what is told of each KV head, by its number, where layers have more of them or fewer. `widths`: and where
        those of some layers are wider."""
        told = [({own.kv_heads for own in self.of_heads}, "{} KV heads", "equally many")]
        told += [({own.head_dim for own in self.of_heads}, "KV heads of {} values", "equally wide ones")] if widths else []
        for found, has, alike in told:
            if len(found) > 1:
                there = has.format(" or ".join(map(str, sorted(found))))
                raise ValueError(f"{what}: layers of {self.name} have {there}, and it is for layers that have {alike}")

    def with_kv_heads(self, count: int) -> ModelSpec:
        """The same model with so many KV heads alone, and the query heads that attend them."""
        return self if count == self.kv_heads else replace(self, heads=count * self.heads // self.kv_heads, kv_heads=count)

    @cached_property
    def of_prompts(self) -> ModelSpec:
        """The same model as prompts pass it. Where decode steps are cut at their attentions, it has as many layers, and these
        are cut behind the attentions."""
        if all(layer.in_prompts is None for layer in self.layers):
            return self
        return replace(self, layers=tuple(layer.in_prompts or layer for layer in self.layers))

    @cached_property
    def forms(self) -> tuple[ModelSpec, ...]:
        """The model as decode steps pass it and, where that is another one, as prompts do."""
        return (self,) if self.of_prompts is self else (self, self.of_prompts)

    @cached_property
    def kv_layers(self) -> tuple[int, ...]:
        return tuple(index for index, layer in enumerate(self.layers) if layer.has_kv)

    @property
    def kv_blocks(self) -> tuple[int, ...]:
        """The blocks that they belong to."""
        return tuple(block for layer in self.kv_layers if (block := self.layers[layer].block) is not None)

    @cached_property
    def state_layers(self) -> tuple[int, ...]:
        """The layers in which rows have a state."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.states)

    @cached_property
    def layer_names(self) -> tuple[LayerName, ...]:
        return tuple(layer.name for layer in self.layers)

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer with KV."""
        return tuple(self.layers[index].window for index in self.kv_layers)

    @property
    def seen_positions(self) -> int:
        """The positions of a text in which every token sees all before it, in all layers."""
        return min([self.max_positions, *(window for window in self.windows if window is not None)])

    @cached_property
    def tensors(self) -> dict[str, TensorSpec]:
        """Every tensor of the model once, in layer order: a tied head is the embedding again and is not counted twice."""
        return {tensor.name: tensor for layer in self.layers for _, tensor in layer.tensors}

    @cached_property
    def weight_sizes(self) -> Mapping[str, int]:
        """Bytes of each tensor, layer by layer, the largest of a layer first: when they are spread over tiers, the small ones
        even out what the large ones left uneven."""
        sizes: dict[str, int] = {}
        for layer in self.layers:
            for _, tensor in sorted(layer.tensors, key=lambda pair: -pair[1].nbytes):
                sizes.setdefault(tensor.name, tensor.nbytes)
        return sizes

    @cached_property
    def outsized(self) -> tuple[str, ...]:
        """Tensors that are larger than any layer of a block: tables of a large vocabulary beside small layers."""
        largest = max((layer.nbytes for layer in self.layers if layer.block is not None), default=0)
        return tuple(name for name, size in self.weight_sizes.items() if size > largest)

    @cached_property
    def layer_kinds(self) -> tuple[int, ...]:
        """A number for each layer; layers that compute the same on hidden states of the same sizes share one."""
        return numbered(zip([layer.computes for layer in self.layers], [0, *(layer.out_width for layer in self.layers)]))

    @cached_property
    def stored_kinds(self) -> tuple[int, ...]:
        """A number for each layer; layers with tensors of the same sizes and formats share one."""
        return numbered(tuple(tensor.kind for tensor in layer.stored) for layer in self.layers)

    @cached_property
    def unlike_layers(self) -> tuple[LayerSpec, ...]:
        """A layer of each kind: what holds for all of one kind is asked once."""
        return tuple(dict(zip(self.layer_kinds, self.layers, strict=True)).values())

    @cached_property
    def unlike_tensors(self) -> tuple[TensorSpec, ...]:
        """A tensor of each size: a model with experts has thousands of tensors and few sizes."""
        return tuple({one.kind: one for one in self.tensors.values()}.values())

    @property
    def num_blocks(self) -> int:
        return len(self.block_numbers)

    @property
    def block_numbers(self) -> Sequence[int]:
        """Those of its decoder blocks, in their order."""
        return tuple(self.block_kinds)

    @cached_property
    def block_kinds(self) -> Mapping[int, tuple[int, ...]]:
        """The kinds of the layers of each decoder block."""
        kinds: dict[int, tuple[int, ...]] = {}
        for form in self.forms:
            for layer, kind in zip(form.layers, form.layer_kinds, strict=True):
                if layer.block is not None:
                    kinds[layer.block] = (*kinds.get(layer.block, ()), kind)
        return kinds

    def only_blocks(self, *numbers: int) -> ModelSpec:
        """The same model with only these of its blocks: the costs of one and of two of them tell the cost of any number."""
        if numbers not in self._of_blocks:
            kept = tuple(layer for layer in self.layers if layer.block is None or layer.block in numbers)
            self._of_blocks[numbers] = replace(self, layers=kept)
        return self._of_blocks[numbers]

    @cached_property
    def _of_blocks(self) -> dict[tuple[int, ...], ModelSpec]:
        return {}

    @cached_property
    def worked_out(self) -> dict[Hashable, Any]:
        """What others have worked out of these sizes, by their own keys. Searches ask for the same again and again, and a model
        with experts has thousands of tensors."""
        return {}

    @cached_property
    def usual_matrix(self) -> TensorSpec:
        """A matrix like most of those that it multiplies: in shape and in how it is written, by their values."""
        values, found = Counter[tuple[str, tuple[int, ...]]](), dict[tuple[str, tuple[int, ...]], TensorSpec]()
        for matrix in (matrix for layer in self.layers for matrix in layer.matrices):
            kind = matrix.format, matrix.shape[-2:]
            values[kind] += matrix.numel
            found[kind] = matrix
        return found[values.most_common(1)[0][0]]

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @cached_property
    def widest(self) -> int:
        """Values per token of the widest hidden state between two layers."""
        return max(layer.out_width for layer in self.layers[:-1])

    @cached_property
    def turns(self) -> Counter[tuple[ExpertTurns, int]]:
        """Those of all layers with experts, and how many matrices each multiplies by."""
        return Counter((layer.turns, len(layer.products)) for layer in self.layers if layer.turns is not None)

    @cached_property
    def passing_widths(self) -> frozenset[tuple[int, int]]:
        """The values of a token that layers hold while they compute, and the least tokens of which a recorded step has room."""
        return frozenset((layer.passing_width, layer.least_passing) for layer in self.layers)

    @cached_property
    def widths(self) -> frozenset[tuple[int, int, bool]]:
        """The values of a token that layers behind the first take and hand on, and whether these take the place of those:
        once for every kind of layer."""
        pairs = pairwise(self.layers[:-1])
        return frozenset((before.out_width, layer.out_width, layer.overwrites) for before, layer in pairs)

    def flops(self, layer: int, rows: int, tokens: int, context: float) -> float:
        """Flops of `rows` sequences with `tokens` new tokens each, which attend `context` keys on average."""
        spec = self.layers[layer]
        counted = 1 if spec.makes_logits else tokens
        attention = 4.0 * self.heads * self.at(layer).head_dim * context if spec.has_kv else 0.0
        return rows * (2.0 * spec.matmul_values * counted + attention * tokens)

    @property
    def can_attend_on_host(self) -> bool:
        """Whether others may attend for its layers: each with an attention can be cut there."""
        return all(layer.halves is not None for layer in self.layers if layer.has_kv)

    def cut_at_attention(self) -> ModelSpec:
        """The same model with layers that end where an attention is over: what comes after it begins the next one. Blocks
        that are one layer and those that are two come out the same. For prompts the host does not attend: they pass layers
        that end behind an attention, and so hand on no outcome of it beside their hidden states."""
        if not self.can_attend_on_host:
            raise ValueError(
                f"attention of {self.name} stands beside a scan, and both are one layer; leave attend_on='host' out"
            )
        layers: list[LayerSpec] = []
        rest: LayerSpec | None = None  # a second half that has nothing after it yet
        for number, layer in enumerate(self.layers):
            if layer.halves is not None:
                outcome = layer.halves.beside + self.heads * self.at(number).head_dim
                before, behind = _cut(layer, layer.halves, self.width + outcome)
                layers.append(before if rest is None else _one_behind_the_other(rest, before))
                rest = behind
            else:
                whole = replace(layer, in_prompts=layer)
                layers.append(layer if rest is None else _one_behind_the_other(rest, whole))
                rest = None
            if rest is not None and len(rest.functions) > 1:
                layers.append(rest)
                rest = None
        return replace(self, layers=tuple(layers))

    def map_tensors(self, change: Callable[[TensorSpec], TensorSpec]) -> ModelSpec:
        """The same model with every tensor replaced, e.g. by what the checkpoint really stores."""

        def changed(layer: LayerSpec) -> LayerSpec:
            return replace(layer, tensors=tuple((name, change(tensor)) for name, tensor in layer.tensors))

        return replace(self, layers=tuple(layer.each_form(changed) for layer in self.layers))

    def packed(self, format: str) -> ModelSpec:
        """The same model with its matrices and token tables in this format, but those that the checkpoint has in as few bytes.
        A table of positions stays as it is: it is small, and its rounding would be in every hidden state."""
        own = matrix_format(format)
        tables = {tensor.name for layer in self.layers for name, tensor in layer.tensors if name == layer.token_table}
        packed = tables | {tensor.name for layer in self.layers for tensor in layer.matrices if not tensor.is_never_packed}

        def changed(tensor: TensorSpec) -> TensorSpec:
            new = replace(tensor, format=own)
            return new if tensor.name in packed and (tensor.format == PLAIN or new.nbytes < tensor.nbytes) else tensor

        return self.map_tensors(changed)

    def within_windows(self) -> ModelSpec:
        """The same model for texts that are no longer than its windows, which then hide nothing."""
        layers = tuple(layer.each_form(lambda one: replace(one, window=None)) for layer in self.layers)
        return replace(self, max_positions=self.seen_positions, layers=layers)

    def written_as(
        self, weight_codec: str, kv_codec: str, compute: str, state_dtype: str = FLOAT32, tries: bool = False
    ) -> ModelSpec:
        """The same model with its weights, its KV and states of rows in the formats of a plan, and its products as a plan has
        them. `tries`: tokens may be taken back."""
        if not self.can_keep(kv_codec):
            raise ValueError(
                f"kv_codec {kv_codec!r} rounds keys, and those of {self.name} say by exact numbers where they stand (ALiBi); "
                "leave kv_codec out"
            )
        spec = self if state_dtype == FLOAT32 else self._with_states_in(state_dtype)
        spec = spec._noting_trials() if tries else spec
        spec = spec if weight_codec == PLAIN else spec.packed(weight_codec)
        spec.refuse_to_compute(compute)
        return replace(spec, kv_codec=kv_codec, product=PRODUCTS[compute])

    def _with_states_in(self, dtype: str) -> ModelSpec:
        if not any(state.is_of_heads for layer in self.unlike_layers for state in layer.states):
            raise ValueError(
                f"state_dtype {dtype!r} is for matrices that rows have from step to step, and rows of {self.name} have none; "
                "leave state_dtype out"
            )
        kept = partial(_with_states_in, dtype)
        return replace(self, layers=tuple(layer.each_form(kept) for layer in self.layers))

    def _noting_trials(self) -> ModelSpec:
        noting = partial(_noting_trials, self.dtype)
        return replace(self, layers=tuple(layer.each_form(noting) for layer in self.layers)) if self.state_layers else self

    def can_keep(self, kv_codec: str) -> bool:
        """Whether keys and values may be kept so. What says where a key stands must not be rounded."""
        return kv_codec == PLAIN or not self.position_values

    @cached_property
    def formats(self) -> tuple[str, ...]:
        """The formats of the matrices of its products, that of most values first."""
        values: Counter[str] = Counter()
        for layer in self.layers:
            for (format, _), count in layer.multiplied_values.items():
                values[format] += count
        return tuple(format for format, _ in values.most_common())

    def can_compute(self, compute: str) -> bool:
        """Whether any of its products can be made so. All can be exact, and those with matrices of whole numbers rounded."""
        return compute == EXACT or any(map(rounds, self.formats))

    def refuse_to_compute(self, compute: str) -> None:
        if not self.can_compute(compute):
            raise ValueError(
                f"compute={compute!r} is for weights that are packed into whole numbers, and those of {self.name} are not; "
                "pack them: --compress-weight (in an evaluation --weight-bits, in Python weight_codec)"
            )


def _cut(layer: LayerSpec, halves: AttentionHalves, width: int) -> tuple[LayerSpec, LayerSpec]:
    """A layer up to the outcome of its attention, which it hands on after hidden states, and the rest of it. For prompts it is
    cut behind the attention."""
    at = layer.functions.index(halves.whole)
    after, visits = layer.functions[at + 1 :], tuple(visit for visit in layer.visits if visit != ATTENTION_VISIT)

    def first(function: str, used_behind: Set[str], out_width: int) -> LayerSpec:
        kept = _with_tensors(layer, lambda name: name not in used_behind)
        functions = *layer.functions[:at], function
        return replace(kept, functions=functions, out_width=out_width, visits=(ATTENTION_VISIT,), passing_width=0)

    def then(functions: tuple[str, ...], used: Set[str]) -> LayerSpec:
        kept = _with_tensors(layer, used.__contains__)
        return replace(kept, functions=functions, has_kv=False, window=None, states=(), visits=visits)

    of_prompts = first(halves.whole, halves.used_after, halves.out_width), then(after, halves.used_after)
    steps = first(halves.before, halves.used_behind, width), then((halves.behind, *after), halves.used_behind)
    before, behind = (replace(step, in_prompts=whole) for step, whole in zip(steps, of_prompts))
    return before, behind


def _with_states_in(dtype: str, layer: LayerSpec) -> LayerSpec:
    return replace(layer, states=tuple(one.kept_as(dtype) for one in layer.states))


def _noting_trials(dtype: str, layer: LayerSpec) -> LayerSpec:
    noted = (tensor for one in layer.states for tensor in one.of_trial(dtype))
    return replace(layer, states=(*layer.states, *noted))


def _with_tensors(layer: LayerSpec, is_kept: Callable[[str], bool]) -> LayerSpec:
    """A part of a layer, with those of its tensors that are kept. Its functions say which part it is."""
    return replace(
        layer,
        tensors=tuple(pair for pair in layer.tensors if is_kept(pair[0])),
        products=tuple(pair for pair in layer.products if is_kept(pair[0])),
        halves=None,
        part="",
    )


def _one_behind_the_other(first: LayerSpec, then: LayerSpec) -> LayerSpec:
    return replace(
        then,
        functions=first.functions + then.functions,
        tensors=first.tensors + then.tensors,
        products=first.products + then.products,
        visits=first.visits + then.visits,
        passing_width=max(first.passing_width, then.passing_width),
        least_passing=max(first.least_passing, then.least_passing),
        reads_back=first.reads_back or then.reads_back,
        turns=first.turns or then.turns,
    )


def numbered(kinds: Iterable[Hashable]) -> tuple[int, ...]:
    """Replaces every item by a number, equal items by equal numbers: large keys become small."""
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(kind, len(numbers)) for kind in kinds)
