"""How files have the models of one architecture: TensorNames, and for GGUF files a GgufArchitecture. The file of an
architecture in models/ has these as values. A GgufModel is a file that is read by them.

The names here are those that most architectures share: of tensors in a block, without the number of the block. A matrix
that a file has in another order, or among others, is `Rearranged` from the values that lie there.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from h2o_flexgen.checkpoints.gguf_format import Gguf, GgufTensor, Metadata
from h2o_flexgen.checkpoints.model_files import AGAIN
from h2o_flexgen.core.hints import known_of_many, shown

if TYPE_CHECKING:
    from torch import Tensor


class Rearranged(Protocol):
    """How a matrix is made of values that its file has in another order, or among others."""

    def of(self, values: Tensor) -> Tensor:
        """Its rows (rows, columns), of all values that lie there."""


@dataclass(frozen=True)
class Turned:
    """The file has the transposed matrix: its columns lie one behind the other. It may have other rows, too."""

    rows: int  # in the file
    own: range | None = None  # None: all

    def of(self, values: Tensor) -> Tensor:
        every = values.view(-1, self.rows).T
        return every if self.own is None else every[self.own.start : self.own.stop]


@dataclass(frozen=True)
class OfHeads:
    """Some rows of each head in a matrix of all heads. The matrix of a head may be transposed."""

    heads: int
    rows: range  # of a head
    columns: int
    is_turned: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = (self.columns, len(self.rows)) if self.is_turned else (len(self.rows), self.columns)
        return self.heads * rows, columns

    def of(self, values: Tensor) -> Tensor:
        own = values.view(self.heads, -1, self.columns)[:, self.rows.start : self.rows.stop]
        return (own.transpose(1, 2) if self.is_turned else own).reshape(self.shape)


ARCHITECTURE, KIND, MODEL = "general.architecture", "general.type", "model"
TABLE_OF_MODELS = "docs/checkpoints.md"

# names of tensors in files -> names in models
QKV = {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"}
ATTENTION = {**QKV, "attn_output": "self_attn.o_proj"}
MLP = {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
UNGATED_MLP = {name: own for name, own in MLP.items() if name != "ffn_gate"}
BEHIND_ATTENTION = "post_attention_layernorm"
FIRST_NORM = {"attn_norm": "input_layernorm"}
NORMS = {**FIRST_NORM, "ffn_norm": BEHIND_ATTENTION}
BEHIND_BOTH = {"post_attention_norm": BEHIND_ATTENTION, "post_ffw_norm": "post_feedforward_layernorm"}
NORMS_BY_PLACE = {**FIRST_NORM, "post_attention_norm": BEHIND_ATTENTION}
HEAD_NORMS = {f"attn_{part}_norm": f"self_attn.{part}_norm" for part in "qk"}
ONE = "{}"  # stands for the number of an expert
EXPERTS = {f"{part}_exps": name.replace("mlp.", f"mlp.experts.{ONE}.") for part, name in MLP.items()}
ROUTER = {"ffn_gate_inp": "mlp.gate"}


def shared_expert(name: str) -> dict[str, str]:
    """The matrices of an mlp that all tokens pass through beside their experts."""
    return {f"{part}_shexp": own.replace("mlp.", f"{name}.") for part, own in MLP.items()}


def weights(*names: Mapping[str, str]) -> dict[str, str]:
    return _of("weight", names)


def biases(*names: Mapping[str, str]) -> dict[str, str]:
    return _of("bias", names)


def _of(kind: str, names: tuple[Mapping[str, str], ...]) -> dict[str, str]:
    return {f"{part}.{kind}": f"{name}.{kind}" for some in names for part, name in some.items()}


OF_LLAMA = weights(ATTENTION, MLP, NORMS)
OF_MIXTURES = weights(ATTENTION, EXPERTS, ROUTER, NORMS)
BIAS_OF_LAST_NORM = {"output_norm.bias": "model.norm.bias"}
BIAS_OF_HEAD = {"output.bias": "lm_head.bias"}

# keys of metadata, behind the name of the architecture
EXPERT_COUNT, NORMED, GATING = "expert_count", "expert_weights_norm", "expert_gating_func"
WEIGHTS_SCALE, DENSE_BLOCKS, MORE_TOKENS = "expert_weights_scale", "leading_dense_block_count", "nextn_predict_layers"
WINDOW, CLIP, LAYER_EPS = "attention.sliding_window", "attention.clamp_kqv", "attention.layer_norm_epsilon"
LOGIT_SCALE, TEMPERATURE, LOG_MULTIPLIER = "logit_scale", "attention.temperature_scale", "rope.scaling.yarn_log_multiplier"
PATTERN = f"{WINDOW}_pattern"  # which blocks have a window: yes or no for each, or that each last one of so many has none
KV_HEADS, RMS_EPS = "attention.head_count_kv", "attention.layer_norm_rms_epsilon"
NEAR_WIDTH, NEAR_VALUES = "attention.key_length_swa", "attention.value_length_swa"
NEAR_THETA, ATTENTION_CAP, LOGIT_CAP = "rope.freq_base_swa", "attn_logit_softcapping", "final_logit_softcapping"
BY_SOFTMAX, BY_SIGMOID, BY_SOFTMAX_OF_CHOSEN = 1, 2, 3  # shares of what a router says, as GGUF files number that
ROTATED = "rope.dimension_count"
Heeded = Mapping[str, tuple[float, ...] | None]  # keys of metadata -> the values that its layers do; None: any value


@dataclass(frozen=True)
class GgufArchitecture:
    name: str  # as files have it; where several architectures share one, their experts and windows tell them apart
    tensors: Mapping[str, str]  # of a block: names in files -> names in models, where ONE stands for the number of an expert
    keys: Mapping[str, Said] = field(default_factory=dict)  # of a config, beside those of all: what files say of them
    heeds: Heeded = field(default_factory=dict)  # what would change the arithmetic of other layers
    has_experts: bool | None = False  # None: either
    sums_to_one: bool | None = None  # the weights of the experts of a token; None: a file may say either
    has_window: bool | None = None  # None: either
    is_interleaved: bool = False  # rows of queries and keys are moved so that values that are rotated together are neighbours
    has_divisors: bool = False  # of the frequencies of rotations, as a tensor
    rotates_parts: bool = False  # of each head
    near_heads: bool = False  # layers with a window have KV heads of their own
    more_of_rope: Said | None = None  # keys of the parameters of a rotation by YaRN
    near_rope: Said | None = None  # the rotation of layers with a window, where it is another one
    rounds_waves: bool = True  # between which YaRN blends: the config of a model says this, but no file does
    outside: Mapping[str, str] = field(default_factory=dict)  # of no block, beside those that all have: names, as `tensors`
    numbers: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)  # lists of metadata, by block
    single_rows: tuple[str, ...] = ()  # names in models of matrices that files have as vectors
    of_heads: tuple[str, ...] = ()  # names in models of matrices that files have head by head, with a dimension for heads
    routers: tuple[int, ...] = ()  # how those of its files choose experts; empty: any way
    has_latents: bool = False  # its heads are made of latent vectors, which are one head of keys
    convolutions: tuple[str, ...] = ()  # names in models of what files have otherwise: with a row for each channel at last
    vectors: tuple[str, ...] = ()  # names in models of vectors that files have as matrices
    between_ones: tuple[str, ...] = ()  # names in models of numbers (1, 1, heads, 1): files may lack dimensions of them
    other_names: tuple[str, ...] = ()  # that some of its files have
    has_states: bool = False  # rows have a state in some layers, which have no KV heads


@dataclass(frozen=True)
class GgufModel:
    """A file of an architecture that is known. The keys of its metadata begin with the name of the architecture."""

    gguf: Gguf
    architecture: GgufArchitecture
    model_type: str  # the name that transformers has for it

    @classmethod
    def of(cls, gguf: Gguf, known: Mapping[str, GgufArchitecture]) -> GgufModel:
        """Refuses an architecture that is not known (`known` are those by model_type)."""
        metadata = gguf.metadata
        kind = metadata.text(KIND, MODEL)
        if kind != MODEL:
            raise ValueError(
                f"{metadata.path} holds no model but something of the type {shown(kind)}; give the model's own file"
            )
        name = metadata.text(ARCHITECTURE)
        candidates = [
            cls(gguf, replace(one, name=name), model_type)
            for model_type, one in known.items()
            if name in (one.name, *one.other_names)
        ]
        if not candidates:
            hint = known_of_many(name, (one.name for one in known.values()), TABLE_OF_MODELS)
            raise ValueError(f"{metadata.path} is of the architecture {shown(name)}, which is not read{hint}")
        first = candidates[0]
        alike = [one for one in candidates if one.architecture.has_experts in (None, bool(one.experts))]
        if not alike:
            other, advice = ("with", "give another model") if first.experts else ("without", AGAIN)
            raise first.refusal(EXPERT_COUNT, f"and {name} {other} experts is not read; {advice}")
        router = first.whole(GATING, BY_SOFTMAX)
        alike = [one for one in alike if router in (one.architecture.routers or (router,))] or alike
        return next((one for one in alike if one.architecture.has_window == (one.whole(WINDOW, 0) > 0)), alike[0])

    @property
    def metadata(self) -> Metadata:
        return self.gguf.metadata

    @cached_property
    def tensors(self) -> Mapping[str, GgufTensor]:
        return {tensor.name: tensor for tensor in self.gguf.tensors}

    @property
    def experts(self) -> int:
        return self.whole(EXPERT_COUNT, 0)

    @property
    def blocks(self) -> int:
        """The blocks of the model itself. Those after them predict tokens further ahead, and are not used."""
        return self.whole("block_count") - self.whole(MORE_TOKENS, 0)

    @property
    def expert_width(self) -> int:
        return self.rows_in_block(self.whole(DENSE_BLOCKS, 0), "ffn_gate_exps.weight", dimensions=3)

    @property
    def shared_expert_width(self) -> int:
        return self.rows_in_block(0, "ffn_gate_shexp.weight")

    def rows_in_block(self, block: int, part: str, dimensions: int = 2) -> int:
        """The outputs of a matrix in a block, or of each of several."""
        name = f"blk.{block}.{part}"
        tensor = self.tensors.get(name)
        if tensor is None or len(tensor.shape) != dimensions:
            what = "has no" if tensor is None else f"has {len(tensor.shape)} instead of {dimensions} dimensions for"
            older = " (files from before 2024 have experts apart)" if "ffn_gate_exps" in name else ""
            raise ValueError(f"{self.metadata.path} {what} {name}{older}; {AGAIN}")
        return tensor.shape[-2]

    def sliding_blocks(self, every: int) -> list[bool]:
        """Whether each block has a window. Where the file does not say so, each last one of `every` has none."""
        listed = isinstance(self.value(PATTERN), array)
        return self.listed_blocks(PATTERN) if listed else self.all_but_each_last(self.whole(PATTERN, every))

    def listed_blocks(self, name: str) -> list[bool]:
        """What a list says of each block: yes or no."""
        said = self.value(name)
        if not isinstance(said, array):
            raise self.metadata.wrong(self.key(name), "list of yes or no")
        if len(said) < self.blocks:
            raise self.refusal(name, f"but it has {self.blocks} blocks; {AGAIN}")
        return [bool(one) for one in said[: self.blocks]]

    def all_but_each_last(self, every: int) -> list[bool]:
        """Says of each block whether it is not the last one of so many; 0: none is."""
        return [every == 0 or (block + 1) % every != 0 for block in range(self.blocks)]

    def whole_of_each(self, name: str, otherwise: int) -> list[int]:
        """A whole number for each block, or the one for all."""
        said = self.value(name)
        if not isinstance(said, array):
            return [self.whole(name, otherwise)]
        blocks = max(1, self.blocks)  # where there are none, that is refused later
        if len(said) < blocks or not all(isinstance(one, int) for one in said):
            raise self.refusal(name, f"which are no {blocks} whole numbers, one for each block; {AGAIN}")
        return [*said[:blocks]]

    def key(self, name: str) -> str:
        return f"{self.architecture.name}.{name}"

    def has(self, name: str) -> bool:
        return self.key(name) in self.metadata

    def value(self, name: str) -> Any:
        """As it is there, of whatever type; None: it is not there."""
        return self.metadata.values.get(self.key(name))

    def whole(self, name: str, otherwise: int | None = None) -> int:
        return self.metadata.whole(self.key(name), otherwise)

    def number(self, name: str, otherwise: float | None = None) -> float:
        return self.metadata.number(self.key(name), otherwise)

    def numbers_of_blocks(self, name: str) -> list[int] | None:
        """A whole number for each block, where the file has a list of them."""
        return None if not isinstance(self.value(name), array) else self.whole_of_each(name, 0)

    def flag(self, name: str, otherwise: bool | None = None) -> bool:
        return self.metadata.flag(self.key(name), otherwise)

    def refusal(self, name: str, why: str) -> ValueError:
        return ValueError(f"{self.metadata.path} has {shown(self.value(name))} as {shown(self.key(name))}, {why}")


Said: TypeAlias = Callable[[GgufModel], Any]


# Models of several parts have their text part below one of these.
OF_TEXT_PARTS: Mapping[str, str] = {
    r"^(model\.)?language_model\.lm_head\.": "lm_head.",
    r"^(model\.)?language_model\.(model\.)?": "model.",
}


@dataclass(frozen=True)
class TensorNames:
    """What the files of an architecture call its tensors."""

    model_type: str = ""
    patterns: Mapping[str, str] = field(default_factory=dict)  # of names in safetensors and .bin files -> the usual names
    gguf: GgufArchitecture | None = None  # None: there are no such files
    turned: tuple[str, ...] = ()  # ends of usual names of matrices that the former have transposed
    of_heads: Mapping[str, Mapping[str, OfHeads]] = field(default_factory=dict)  # ends of usual names, and those of the parts

    def usual(self, name: str) -> str:
        """The name that this tensor has in most checkpoints."""
        for pattern, usual in (*OF_TEXT_PARTS.items(), *self.patterns.items()):
            name = re.sub(pattern, usual, name)
        return name


USUAL_NAMES = TensorNames()
BASE_PREFIXES = ("model.", "transformer.", "gpt_neox.", "decoder.")  # missing in base models' files, added with a head


def bare_name(name: str) -> str:
    """A name without what base models' files lack of it."""
    for prefix in BASE_PREFIXES:
        if name.startswith(prefix):
            return bare_name(name.removeprefix(prefix))
    return name
