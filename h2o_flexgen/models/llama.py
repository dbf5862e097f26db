"""LLaMA: RMS norm, rotary positions, gated mlp, grouped keys and values.

A relative is a class below `Decoder`. Its `traits_of` says which keys of a config it reads, and what they mean. What no trait
says is a method that it overrides.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from torch import Tensor

from h2o_flexgen.checkpoints.stored_architecture import ATTENTION, OF_LLAMA, GgufArchitecture, biases
from h2o_flexgen.checkpoints.stored_architecture import MLP as MLP_IN_FILES
from h2o_flexgen.core.hints import shown
from h2o_flexgen.core.model_spec import LayerSpec, ModelSpec
from h2o_flexgen.kernels.operations import add_scaled, halves_apart
from h2o_flexgen.models import layout, tensor_ops
from h2o_flexgen.models.base import Given, InHalves, Weights
from h2o_flexgen.models.config_values import Config
from h2o_flexgen.models.layout import Origin, Parameters
from h2o_flexgen.models.new_tokens import NewTokens
from h2o_flexgen.models.rotary import Rope, Rotary


@dataclass(frozen=True)
class Traits:
    """The features that some relatives of LLaMA have and others lack."""

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_norm: bool = False  # queries and keys are normalised head by head
    whole_norm: bool = False  # all heads of a query, and of a key, are normalised at once
    windows: Windows = None
    clip: float | None = None  # queries, keys and values are no larger
    sinks: bool = False  # each query head has a score beside those of keys
    attention_cap: float | None = None  # scores of attention come near it and no further
    embedding_scale: float = 1.0
    query_scale: float = 1.0  # of queries, beside that of every attention
    residual_scale: float = 1.0  # of what attention and mlp add to the hidden states
    logit_scale: float = 1.0
    logit_cap: float | None = None  # logits come near it and no further


SLIDING, FULL, SINKS = "sliding_attention", "full_attention", "self_attn.sinks"
Windows: TypeAlias = tuple[int | None, ...] | None  # of each layer, the tokens that a token sees; None: all that are before it


class GatedMlp(NamedTuple):
    """The names of the matrices of an mlp."""

    gate: str
    up: str
    down: str

    @classmethod
    def of(cls, name: str) -> GatedMlp:
        return cls(f"{name}.gate_proj", f"{name}.up_proj", f"{name}.down_proj")

    def parameters(self, width: int, inner: int, bias: bool = False, share: float = 1.0) -> Parameters:
        """`share`: of the tokens, that pass through it."""
        return layout.joined(
            layout.linear(self.gate, inner, width, bias, share),
            layout.linear(self.up, inner, width, bias, share),
            layout.linear(self.down, width, inner, bias, share),
        )


MLP = GatedMlp.of("mlp")


class Decoder(InHalves):
    """What LLaMA and its relatives have in common, and the ways in which they differ."""

    rotates_parts = False  # of each head, where the config asks for it

    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        self._traits = self.traits_of(config)
        self.spec = self._spec(config, dtype, sep_layer, name)
        self._gating = tensor_ops.gating(self.activation_of(config))
        self._eps = config.rms_norm_eps
        self._rotary = self.rotary_of(config)
        self._embedding_scale = self._traits.embedding_scale
        self._interleaved = bool(getattr(config, "rope_interleave", False))

    # -- what relatives say otherwise --------------------------------------------------------------------------------------

    @staticmethod
    @abstractmethod
    def traits_of(config: Config) -> Traits: ...

    @staticmethod
    def activation_of(config: Config) -> str:
        name: str = config.hidden_act
        return name

    def rotary_of(self, config: Config) -> Rotary:
        (rope,) = self.ropes_of(config)
        return rope.rotary(int(rope.share * self.spec.head_dim))

    def ropes_of(self, config: Config) -> Sequence[Rope]:
        """The rotations that its layers have."""
        return [Rope.of(config, partly=self.rotates_parts)]

    def attention_layer(
        self, width: int, q_width: int, kv_width: int, head_dim: int, origin: Origin, window: int | None
    ) -> LayerSpec:
        parameters = attention_parameters(width, q_width, kv_width, head_dim, self._traits)
        return layout.attention(*parameters, width, origin, window)

    def projected(self, x: Tensor, weights: Weights) -> Sequence[Tensor]:
        """Queries, keys and values, all heads of each side by side."""
        return [*tensor_ops.linears(x, weights, *(f"self_attn.{part}_proj" for part in "qkv"))]

    def normed(self, x: Tensor, weights: Weights, name: str) -> Tensor:
        return tensor_ops.rms_norm(x, weights, name, self._eps)

    def behind_attention(self, config: Config, sep_layer: bool, origin: Origin) -> Sequence[LayerSpec]:
        """The layers of a block behind its attention."""
        return [self.mlp_layer(config.hidden_size, config.intermediate_size, origin)]

    # -- the functions of layers -------------------------------------------------------------------------------------------

    def embed(self, tokens: Tensor, weights: Weights, given: Given) -> Tensor:
        hidden, scale = tensor_ops.embedding(tokens, weights, "embed_tokens"), self._embedding_scale
        return hidden if scale == 1.0 else add_scaled(hidden, scale=scale)

    def attended(self, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        return self.attended_by(self._rotary, hidden, weights, given)

    def attended_by(self, rotary: Rotary, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        x, q, k, v = self.asked(hidden, weights)
        q = q if self._traits.query_scale == 1.0 else add_scaled(q, scale=self._traits.query_scale)
        return given.attend(NewTokens(q, k, v, rotary, x, tensor_ops.plain(weights, SINKS)))

    def asked(self, hidden: Tensor, weights: Weights) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What a layer makes queries, keys and values of, and these, head by head."""
        x = self.normed(hidden, weights, "input_layernorm")
        q, k, v = self.projected(x, weights)
        if self._traits.whole_norm:
            q, k = self._normed(q, k, weights)
        if (most := self._traits.clip) is not None:
            q, k, v = (add_scaled(each, limit=most) for each in (q, k, v))
        q, k, v = (tensor_ops.split_heads(each, self.spec.head_dim) for each in (q, k, v))
        if self._interleaved:
            q, k = halves_apart(q), halves_apart(k)
        if self._traits.head_norm:
            q, k = self._normed(q, k, weights)
        return x, q, k, v

    def _normed(self, q: Tensor, k: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
        return self.normed(q, weights, "self_attn.q_norm"), self.normed(k, weights, "self_attn.k_norm")

    def with_attended(self, hidden: Tensor, out: Tensor, weights: Weights) -> Tensor:
        return self.added(tensor_ops.linear(out, weights, "self_attn.o_proj"), hidden)

    def added(self, out: Tensor, hidden: Tensor) -> Tensor:
        """The hidden states behind attention or mlp, of what it made, which is not used elsewhere."""
        return add_scaled(out, hidden, self._traits.residual_scale)

    def mlp(self, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        return self.added(self.gated(self.normed(hidden, weights, "post_attention_layernorm"), weights, MLP), hidden)

    def gated(self, x: Tensor, weights: Weights, names: GatedMlp) -> Tensor:
        made = self._gating(*tensor_ops.linears(x, weights, names.gate, names.up))  # from here on nothing holds gate or up
        return tensor_ops.linear(made, weights, names.down)

    def head(self, hidden: Tensor, weights: Weights) -> Tensor:
        logits = tensor_ops.linear(self.normed(hidden, weights, "norm"), weights, "lm_head")
        logits = logits if self._traits.logit_scale == 1.0 else logits.mul_(self._traits.logit_scale)
        most = self._traits.logit_cap
        return logits if most is None else logits.div_(most).tanh_().mul_(most)

    # -- its layers --------------------------------------------------------------------------------------------------------

    def _spec(self, config: Config, dtype: str, sep_layer: bool, name: str) -> ModelSpec:
        width, heads = config.hidden_size, config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = head_width(config)
        widths = width, heads * head_dim, kv_heads * head_dim, head_dim

        def parts(index: int) -> Sequence[LayerSpec]:
            origin = Origin(dtype, f"model.layers.{index}.", index)
            window = None if self._traits.windows is None else self._traits.windows[index]
            own = self.attention_layer(*widths, origin, window)
            return own, *self.behind_attention(config, sep_layer, origin)

        head_weight = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        outside = Origin(dtype, "model.", stored_as={"lm_head.weight": head_weight})
        embed = layout.embedding(Decoder.embed, layout.table("embed_tokens", config.vocab_size, width), {}, width, outside)
        logits = layout.linear("lm_head", config.vocab_size, width, bias=False)
        head = layout.head(Decoder.head, layout.norm("norm", width, bias=False), logits, outside)
        layers = layout.in_order(embed, config.num_hidden_layers, parts, head, sep_layer)
        own = {
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "attention_cap": self._traits.attention_cap,
            "max_positions": min(rope.longest(config) for rope in self.ropes_of(config)),
            "sink_scores": self._traits.sinks,
        }
        return layout.model_spec(config, dtype, name, config.intermediate_size, layers, **own)

    def mlp_layer(self, width: int, inner: int, origin: Origin) -> LayerSpec:
        parameters = layout.joined(
            layout.norm("post_attention_layernorm", width, bias=False), MLP.parameters(width, inner, self._traits.mlp_bias)
        )
        return layout.mlp(Decoder.mlp, parameters, width, inner, origin)


class Llama(Decoder):
    gguf = GgufArchitecture(
        "llama",
        {**OF_LLAMA, **biases(ATTENTION, MLP_IN_FILES)},
        has_window=False,
        is_interleaved=True,
        has_divisors=True,
    )

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return Traits(config.attention_bias, config.attention_bias, config.mlp_bias)


def head_width(config: Config) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def same_windows(config: Config) -> Windows:
    """The windows of an architecture where all layers have the window that the config names, if it names one."""
    is_there = config.sliding_window is not None
    return _windows(config, [is_there] * config.num_hidden_layers)


def windows_by_kind(config: Config) -> Windows:
    """The windows of an architecture where the config says for each layer whether it has a window."""
    kinds, blocks = getattr(config, "layer_types", None), config.num_hidden_layers
    if kinds is None:  # transformers 4 says how many layers have none
        kinds = [SLIDING if block >= config.max_window_layers and config.sliding_window else FULL for block in range(blocks)]
    return _windows(config, [kind == SLIDING for kind in kinds])


def _windows(config: Config, slides: Sequence[bool]) -> Windows:
    """Windows that no text can be longer than are none."""
    window = config.sliding_window
    if any(slides) and not window:
        raise ValueError(f"sliding_window is {shown(window)}, but layers have one; download the model again")
    if not any(slides) or window >= config.max_position_embeddings:
        return None
    return tuple(window if has_one else None for has_one in slides)


def attention_parameters(
    width: int, q_width: int, kv_width: int, head_dim: int, traits: Traits
) -> tuple[Parameters, Parameters]:
    widths = {"q": q_width, "k": kv_width} if traits.whole_norm else dict.fromkeys("qk", head_dim) if traits.head_norm else {}
    norms = [layout.norm(f"self_attn.{part}_norm", own, bias=False) for part, own in widths.items()]
    before = layout.joined(
        layout.norm("input_layernorm", width, bias=False),
        layout.linear("self_attn.q_proj", q_width, width, traits.qkv_bias),
        layout.linear("self_attn.k_proj", kv_width, width, traits.qkv_bias),
        layout.linear("self_attn.v_proj", kv_width, width, traits.qkv_bias),
        *norms,
        layout.scores(SINKS, q_width // head_dim) if traits.sinks else {},
    )
    return before, layout.linear("self_attn.o_proj", width, q_width, traits.out_bias)
