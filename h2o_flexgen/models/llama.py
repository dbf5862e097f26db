"""LLaMA: RMS norm, rotary positions, gated mlp, grouped keys and values.

A relative is a class below `Decoder`. Its `traits_of` says which keys of a config it reads, and what they mean. What no trait
says is a method that it overrides. Among traits are what its norms do, where they stand in a block, and what checkpoints call
them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.checkpoints.stored_architecture import ATTENTION, OF_LLAMA, GgufArchitecture, biases
from h2o_flexgen.checkpoints.stored_architecture import MLP as MLP_IN_FILES
from h2o_flexgen.core.model_spec import KVHeads, LayerSpec, ModelSpec, PromptHeads
from h2o_flexgen.kernels.operations import add_scaled, halves_apart
from h2o_flexgen.models import layout, tensor_ops
from h2o_flexgen.models.base import Given, InHalves, Weights
from h2o_flexgen.models.config_values import FULL, SLIDING, Config, Windows, labels_of
from h2o_flexgen.models.layout import Origin, Parameters
from h2o_flexgen.models.new_tokens import NewTokens
from h2o_flexgen.models.rotary import Rope, Rotary
from h2o_flexgen.models.whole_configs import LLAMA


@dataclass(frozen=True)
class NormKind:
    """What a norm does with its values, (x, weights, name, eps), and which tensors it has."""

    function: Callable[[Tensor, Weights, str, float], Tensor]
    weight: bool = True
    bias: bool = False
    is_wide: bool = False  # its weight has more bits than hidden states may have

    def parameters(self, name: str, *shape: int) -> Parameters:
        if self.is_wide:
            return layout.wide(f"{name}.weight", *shape)
        return layout.norm(name, *shape, weight=self.weight, bias=self.bias)


RMS = NormKind(tensor_ops.rms_norm)
RMS_FROM_ONE = NormKind(tensor_ops.rms_norm_from_one)  # a weight says what is added to one
RMS_WIDE = NormKind(tensor_ops.rms_norm, is_wide=True)  # in 16 bits nothing but the outcome is rounded
LAYER = NormKind(tensor_ops.layer_norm, bias=True)
LAYER_UNBIASED = NormKind(tensor_ops.layer_norm)
LAYER_BARE = NormKind(tensor_ops.layer_norm, weight=False)


@dataclass(frozen=True)
class NormPlaces:
    """The names of the norms of a block, by where they stand; None: there is none."""

    before_attention: str | None = "input_layernorm"
    behind_attention: str | None = None  # of what attention adds to the hidden states
    before_mlp: str | None = "post_attention_layernorm"
    behind_mlp: str | None = None


BEFORE = NormPlaces()
BEHIND = NormPlaces(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
ONE_BEFORE = NormPlaces(before_mlp=None)  # where the mlp stands beside attention


@dataclass(frozen=True)
class Traits:
    """The features that some relatives of LLaMA have and others lack."""

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    gated: bool = True  # an mlp has a gate beside what goes up
    norm: NormKind = RMS
    norms: NormPlaces = BEFORE
    is_parallel: bool = False  # attention and mlp get the same hidden states, and without a norm of its own the mlp shares one
    head_norm: bool = False  # queries and keys are normalised head by head
    own_norms: bool = False  # and each head has weights of its own
    whole_norm: bool = False  # all heads of a query, and of a key, are normalised at once
    windows: Windows = None
    clip: float | None = None  # queries, keys and values are no larger
    sinks: bool = False  # each query head has a score beside those of keys
    attention_cap: float | None = None  # scores of attention come near it and no further
    embedding_scale: float = 1.0
    query_scale: float = 1.0  # of queries, beside that of every attention
    residual_scale: float = 1.0  # of what attention and mlp add to the hidden states
    head_bias: bool = False  # of logits
    logit_scale: float = 1.0
    logit_cap: float | None = None  # logits come near it and no further


SINKS = "self_attn.sinks"


class MlpNames(NamedTuple):
    """The names of the matrices of an mlp."""

    gate: str  # empty: there is none
    up: str
    down: str

    @classmethod
    def of(cls, name: str, gated: bool = True) -> MlpNames:
        return cls(f"{name}.gate_proj" if gated else "", f"{name}.up_proj", f"{name}.down_proj")

    @property
    def ways_in(self) -> tuple[str, ...]:
        return (self.gate, self.up) if self.gate else (self.up,)

    def parameters(self, width: int, inner: int, bias: bool = False, share: float = 1.0) -> Parameters:
        """`share`: of the tokens, that pass through it."""
        ways_in = (layout.linear(name, inner, width, bias, share) for name in self.ways_in)
        return layout.joined(*ways_in, layout.linear(self.down, width, inner, bias, share))


class AttentionFunctions(NamedTuple):
    """The methods of a layer that attends: all of it, and its first half."""

    whole: str
    first_half: str


USUAL = AttentionFunctions("attention", "before_attended")
NEAR = AttentionFunctions("near_attention", "before_near_attended")  # with the rotation of layers that have a window
UNROTATED = AttentionFunctions("unrotated_attention", "before_unrotated_attended")
SHARED_NORM = "shared_layernorm"  # an mlp's own name for the norm that it has with the attention beside it


class Decoder(InHalves):
    """What LLaMA and its relatives have in common, and the ways in which they differ."""

    rotates_parts = False  # of each head, where the config asks for it
    rotates_neighbours = False  # values that are rotated together follow each other
    rotates = True  # otherwise positions are learned, and added to the embedding
    classifies = True

    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        self._traits = self.traits_of(config)
        self._mlp = MlpNames.of("mlp", self._traits.gated)
        self.spec = self._spec(config, dtype, sep_layer, name)
        self._gating = tensor_ops.gating(self.activation_of(config))
        self._eps = self.eps_of(config)
        ropes = self.ropes_of(config)
        widths = [int(rope.share * width) for rope, width in zip(ropes, self.rotated_widths(config), strict=True)]
        rotations = [self.rotary_of(rope, width) for rope, width in zip(ropes, widths)]
        self._rotary, self._rotary_near = rotations[0], rotations[-1]
        self._rotated = widths[0]  # values of a head
        self._embedding_scale = self._traits.embedding_scale
        self._interleaved = self.rotates_neighbours or bool(getattr(config, "rope_interleave", False))

    # -- what relatives say otherwise --------------------------------------------------------------------------------------

    @staticmethod
    @abstractmethod
    def traits_of(config: Config) -> Traits: ...

    @staticmethod
    def activation_of(config: Config) -> str:
        name: str = config.hidden_act
        return name

    @staticmethod
    def inner_of(config: Config) -> int:
        """The inner width of an mlp."""
        width: int = config.intermediate_size
        return width

    @staticmethod
    def eps_of(config: Config) -> float:
        """What norms add before they divide."""
        eps: float = config.rms_norm_eps
        return eps

    def ropes_of(self, config: Config) -> Sequence[Rope]:
        """The rotation that its layers have, and the one of layers with a window, where that is another."""
        return [Rope.of(config, partly=self.rotates_parts)]

    def rotated_widths(self, config: Config) -> Sequence[int]:
        """Values of the heads that each of these rotates."""
        return [self.spec.head_dim] * len(self.ropes_of(config))

    def rotary_of(self, rope: Rope, width: int) -> Rotary:
        """The rotation for heads of which the first `width` values are rotated."""
        return rope.rotary(width)

    def attends_by(self, config: Config, block: int) -> AttentionFunctions:
        """How the attention of a block rotates queries and keys."""
        return USUAL

    def usual_kv_heads(self, config: Config) -> KVHeads:
        """Those of most layers."""
        return KVHeads(getattr(config, "num_key_value_heads", None) or config.num_attention_heads, head_width(config))

    def kv_heads_of(self, config: Config, block: int) -> KVHeads:
        """Those of the attention of a block."""
        return self.usual_kv_heads(config)

    @property
    def values_in_keys(self) -> int:
        """The last values of a key that are those of its head; 0: they are apart."""
        return 0

    @property
    def prompt_heads(self) -> PromptHeads | None:
        """Keys and values of heads with which prompts may be attended, where others are kept."""
        return None

    @property
    def position_values(self) -> int:
        """The first values of a key that say where it stands."""
        return 0

    def positions_of(self, config: Config) -> int:
        """The tokens of the longest text."""
        return min(rope.longest(config) for rope in self.ropes_of(config))

    def width_of_heads(self, weights: Weights) -> int:
        """Values of a head in a layer with these weights."""
        return self.spec.head_dim

    def attention_layer(
        self, width: int, q_width: int, kv_width: int, head_dim: int, origin: Origin, window: int | None
    ) -> LayerSpec:
        parameters = self.attention_parameters(width, q_width, kv_width, head_dim)
        return layout.attention(*parameters, 2 * width if self._traits.is_parallel else width, origin, window)

    def projected(self, x: Tensor, weights: Weights) -> Sequence[Tensor]:
        """Queries, keys and values, all heads of each side by side."""
        return [*tensor_ops.linears(x, weights, *tensor_ops.QKV)]

    def normed(self, x: Tensor, weights: Weights, name: str | None) -> Tensor:
        return x if name is None else self._traits.norm.function(x, weights, name, self._eps)

    def behind_attention(self, config: Config, sep_layer: bool, origin: Origin) -> Sequence[LayerSpec]:
        """The layers of a block behind its attention."""
        return [self.mlp_layer(config.hidden_size, self.inner_of(config), origin)]

    def beside_tokens(self, config: Config) -> Parameters:
        """What the first layer has beside the table of tokens: that of learned positions, or a norm."""
        return {}

    # -- the functions of layers -------------------------------------------------------------------------------------------

    def embed(self, tokens: Tensor, weights: Weights, given: Given) -> Tensor:
        hidden, scale = tensor_ops.embedding(tokens, weights, "embed_tokens"), self._embedding_scale
        return hidden if scale == 1.0 else add_scaled(hidden, scale=scale)

    def attended(self, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        return self.attended_by(self._rotary, hidden, weights, given)

    def near_attention(self, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        return self.with_attended(hidden, self.attended_by(self._rotary_near, hidden, weights, given), weights)

    def before_near_attended(self, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        return torch.cat((hidden, self.attended_by(self._rotary_near, hidden, weights, given)), dim=-1)

    def unrotated_attention(self, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        return self.with_attended(hidden, self.attended_by(None, hidden, weights, given), weights)

    def before_unrotated_attended(self, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        return torch.cat((hidden, self.attended_by(None, hidden, weights, given)), dim=-1)

    def attended_by(self, rotary: Rotary | None, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        return given.attend(self.new_tokens(rotary, hidden, weights))

    def new_tokens(self, rotary: Rotary | None, hidden: Tensor, weights: Weights) -> NewTokens:
        """What a layer attends, and by which rotation."""
        x, q, k, v = self.asked(hidden, weights)
        q = q if self._traits.query_scale == 1.0 else add_scaled(q, scale=self._traits.query_scale)
        return NewTokens(q, k, v, rotary, x, sink_scores=tensor_ops.plain(weights, SINKS))

    def asked(self, hidden: Tensor, weights: Weights) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What a layer makes queries, keys and values of, and these, head by head."""
        x = self.normed(hidden, weights, self._traits.norms.before_attention)
        q, k, v = self.projected(x, weights)
        if self._traits.whole_norm:
            q, k = self.queries_and_keys_normed(q, k, weights)
        if (most := self._traits.clip) is not None:
            q, k, v = (add_scaled(each, limit=most) for each in (q, k, v))
        q, k, v = (tensor_ops.split_heads(each, self.width_of_heads(weights)) for each in (q, k, v))
        if self._traits.head_norm:
            q, k = self.queries_and_keys_normed(q, k, weights)
        if self._interleaved:
            q, k = halves_apart(q, self._rotated), halves_apart(k, self._rotated)
        return x, q, k, v

    def queries_and_keys_normed(self, q: Tensor, k: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
        return self.normed(q, weights, "self_attn.q_norm"), self.normed(k, weights, "self_attn.k_norm")

    def with_attended(self, hidden: Tensor, out: Tensor, weights: Weights) -> Tensor:
        out = self.normed(tensor_ops.linear(out, weights, "self_attn.o_proj"), weights, self._traits.norms.behind_attention)
        out = self.added(out, hidden)
        return tensor_ops.side_by_side(hidden, out) if self._traits.is_parallel else out

    def added(self, out: Tensor, hidden: Tensor) -> Tensor:
        """The hidden states behind attention or mlp, of what it made, which is not used elsewhere."""
        return add_scaled(out, hidden, self._traits.residual_scale)

    def mlp(self, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        x, sums = hidden.chunk(2, dim=-1) if self._traits.is_parallel else (hidden, hidden)
        made = self.gated(self.normed(x, weights, self._norm_of_mlp), weights, self._mlp)
        return self.added(self.normed(made, weights, self._traits.norms.behind_mlp), sums)

    @property
    def _norm_of_mlp(self) -> str | None:
        """Its name inside the layer."""
        return self._traits.norms.before_mlp or (SHARED_NORM if self._traits.is_parallel else None)

    def gated(self, x: Tensor, weights: Weights, names: MlpNames) -> Tensor:
        made = self._gating(*tensor_ops.linears(x, weights, *names.ways_in))  # from here on nothing holds gate or up
        return tensor_ops.linear(made, weights, names.down)

    def head(self, hidden: Tensor, weights: Weights) -> Tensor:
        logits = tensor_ops.linear(self.last_states(hidden, weights), weights, "lm_head")
        logits = logits if self._traits.logit_scale == 1.0 else logits.mul_(self._traits.logit_scale)
        most = self._traits.logit_cap
        return logits if most is None else logits.div_(most).tanh_().mul_(most)

    def label_scores(self, hidden: Tensor, weights: Weights) -> Tensor:
        return tensor_ops.linear(self.last_states(hidden, weights), weights, layout.LABEL_MATRIX)

    def last_states(self, hidden: Tensor, weights: Weights) -> Tensor:
        return self.normed(hidden, weights, "norm")

    # -- its layers --------------------------------------------------------------------------------------------------------

    def _spec(self, config: Config, dtype: str, sep_layer: bool, name: str) -> ModelSpec:
        width, usual = config.hidden_size, self.usual_kv_heads(config)

        def parts(index: int) -> Sequence[LayerSpec]:
            return self.layers_of_block(config, index, sep_layer, Origin(dtype, f"model.layers.{index}.", index))

        outside = Origin(dtype, "model.")
        tokens = layout.table("embed_tokens", config.vocab_size, width)
        embed = layout.embedding(Decoder.embed, tokens, self.beside_tokens(config), width, outside)
        layers = layout.in_order(embed, config.num_hidden_layers, parts, self._head_layer(config, outside), sep_layer)
        own = {
            "kv_heads": usual.number,
            "head_dim": usual.width,
            "values_in_keys": self.values_in_keys,
            "prompt_heads": self.prompt_heads,
            "position_values": self.position_values,
            "attention_cap": self._traits.attention_cap,
            "max_positions": self.positions_of(config),
            "sink_scores": self._traits.sinks,
            "rotary": self.rotates,
            "labels": labels_of(config),
        }
        return layout.model_spec(config, dtype, name, self.inner_of(config), layers, **own)

    def _head_layer(self, config: Config, outside: Origin) -> LayerSpec:
        """The head of tokens, or of labels."""
        norm = self._traits.norm.parameters("norm", config.hidden_size)
        if (labels := labels_of(config)) is not None:
            matrix = layout.router(layout.LABEL_MATRIX, len(labels.names), config.hidden_size)
            return layout.head(Decoder.label_scores, norm, matrix, replace(outside, stored_as={name: name for name in matrix}))
        weight = "model.embed_tokens.weight" if self.ties_head(config) else "lm_head.weight"
        named = replace(outside, stored_as={"lm_head.weight": weight, "lm_head.bias": "lm_head.bias"})
        logits = layout.linear("lm_head", config.vocab_size, config.hidden_size, self._traits.head_bias)
        return layout.head(Decoder.head, norm, logits, named)

    @staticmethod
    def ties_head(config: Config) -> bool:
        """Whether the head of tokens is the table of the embedding."""
        return bool(config.tie_word_embeddings)

    def layers_of_block(self, config: Config, block: int, sep_layer: bool, origin: Origin) -> Sequence[LayerSpec]:
        return self.mixing_layer(config, block, origin), *self.behind_attention(config, sep_layer, origin)

    def mixing_layer(self, config: Config, block: int, origin: Origin) -> LayerSpec:
        """The layer of a block in which a token meets those before it: its attention."""
        width, usual, own = config.hidden_size, self.usual_kv_heads(config), self.kv_heads_of(config, block)
        window = None if self._traits.windows is None else self._traits.windows[block]
        widths = width, config.num_attention_heads * own.width, own.number * own.width, own.width
        made = layout.attending_by(self.attention_layer(*widths, origin, window), *self.attends_by(config, block))
        return replace(made, kv_heads=None if own == usual else own)

    def attention_parameters(self, width: int, q_width: int, kv_width: int, head_dim: int) -> tuple[Parameters, Parameters]:
        """Those of attention up to its outcome, and those behind it."""
        traits = self._traits
        widths = {"q": q_width, "k": kv_width}
        shapes = {part: (width // head_dim, head_dim) if traits.own_norms else (head_dim,) for part, width in widths.items()}
        shapes = {part: (width,) for part, width in widths.items()} if traits.whole_norm else shapes
        before = layout.joined(
            self.norm_parameters(width, traits.norms.before_attention),
            layout.linear("self_attn.q_proj", q_width, width, traits.qkv_bias),
            layout.linear("self_attn.k_proj", kv_width, width, traits.qkv_bias),
            layout.linear("self_attn.v_proj", kv_width, width, traits.qkv_bias),
            *(
                traits.norm.parameters(f"self_attn.{part}_norm", *shape)
                for part, shape in shapes.items()
                if traits.whole_norm or traits.head_norm
            ),
            layout.scores(SINKS, q_width // head_dim) if traits.sinks else {},
        )
        out = layout.linear("self_attn.o_proj", width, q_width, traits.out_bias)
        return before, layout.joined(out, self.norm_parameters(width, traits.norms.behind_attention))

    def mlp_layer(self, width: int, inner: int, origin: Origin) -> LayerSpec:
        norms = self.norm_parameters(width, self._norm_of_mlp, self._traits.norms.behind_mlp)
        if self._norm_of_mlp == SHARED_NORM:
            there = self._traits.norms.before_attention or ""
            origin = origin.with_names({name: name.replace(SHARED_NORM, there) for name in norms})
        return layout.mlp(Decoder.mlp, layout.joined(norms, self.mlp_parameters(width, inner)), width, inner, origin)

    def mlp_parameters(self, width: int, inner: int) -> Parameters:
        return self._mlp.parameters(width, inner, self._traits.mlp_bias)

    def norm_parameters(self, width: int, *names: str | None) -> Parameters:
        """Those of norms of hidden states, where there are any."""
        return layout.joined(*(self._traits.norm.parameters(name, width) for name in names if name is not None))


class Llama(Decoder):
    gguf = GgufArchitecture(
        "llama",
        {**OF_LLAMA, **biases(ATTENTION, MLP_IN_FILES)},
        has_window=False,
        is_interleaved=True,
        has_divisors=True,
    )
    usual = LLAMA

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return Traits(config.attention_bias, config.attention_bias, config.mlp_bias)


class NearRotated(Decoder):
    """LLaMA's relatives of which layers with a window have a rotation of their own."""

    def ropes_of(self, config: Config) -> Sequence[Rope]:
        return [Rope.of(config, kind, partly=self.rotates_parts) for kind in (FULL, SLIDING)]

    def attends_by(self, config: Config, block: int) -> AttentionFunctions:
        return NEAR if config.layer_types[block] == SLIDING else USUAL


def head_width(config: Config) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
