"""LLaMA and its relatives Mistral, Qwen2 and Qwen3: RMS norm, rotary positions, gated mlp, grouped keys and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from h2o_flexgen.core.model_spec import LayerSpec, ModelSpec
from h2o_flexgen.kernels.operations import halves_apart
from h2o_flexgen.models import layout, ops
from h2o_flexgen.models.base import Given, Weights
from h2o_flexgen.models.halves import InHalves
from h2o_flexgen.models.layout import Config, Origin, Parameters
from h2o_flexgen.models.rotary import Rope


@dataclass(frozen=True)
class Traits:
    """The features that some relatives of LLaMA have and others lack."""

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_norm: bool = False  # queries and keys are normalised head by head
    window: int | None = None  # how far back a token can see, where that is not everything


TRAITS: Mapping[str, Callable[[Config], Traits]] = {
    "llama": lambda config: Traits(config.attention_bias, config.attention_bias, config.mlp_bias),
    "mistral": lambda config: Traits(window=_window(config)),
    "qwen2": lambda config: Traits(qkv_bias=True, window=_window(config)),
    "qwen3": lambda config: Traits(config.attention_bias, config.attention_bias, head_norm=True, window=_window(config)),
}


class Llama(InHalves):
    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        self.spec = _spec(config, dtype, sep_layer, name)
        self._gating = ops.gating(config.hidden_act)
        self._eps = config.rms_norm_eps
        self._rotary = Rope.of(config).rotary(self.spec.head_dim)
        self._interleaved = bool(getattr(config, "rope_interleave", False))

    def embed(self, tokens: Tensor, weights: Weights, given: Given) -> Tensor:
        return ops.embedding(tokens, weights, "embed_tokens")

    def attended(self, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        x = ops.rms_norm(hidden, weights, "input_layernorm", self._eps)
        products = ops.linears(x, weights, *(f"self_attn.{part}_proj" for part in "qkv"))
        q, k, v = (ops.split_heads(each, self.spec.head_dim) for each in products)
        if self._interleaved:
            q, k = halves_apart(q), halves_apart(k)
        if "self_attn.q_norm.weight" in weights:
            q = ops.rms_norm(q, weights, "self_attn.q_norm", self._eps)
            k = ops.rms_norm(k, weights, "self_attn.k_norm", self._eps)
        return given.attend(q, k, v, self._rotary, x)

    def with_attended(self, hidden: Tensor, out: Tensor, weights: Weights) -> Tensor:
        out = ops.linear(out, weights, "self_attn.o_proj")
        out += hidden
        return out

    def mlp(self, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        x = ops.rms_norm(hidden, weights, "post_attention_layernorm", self._eps)
        gate, up = ops.linears(x, weights, "mlp.gate_proj", "mlp.up_proj")
        out = ops.linear(self._gating(gate, up), weights, "mlp.down_proj")
        out += hidden
        return out

    def head(self, hidden: Tensor, weights: Weights) -> Tensor:
        return ops.linear(ops.rms_norm(hidden, weights, "norm", self._eps), weights, "lm_head")


def _window(config: Config) -> int | None:
    window = getattr(config, "sliding_window", None)
    if not window or not getattr(config, "use_sliding_window", True):
        return None
    kinds = getattr(config, "layer_types", None)  # transformers 5 says it layer by layer, 4 by the number of dense layers
    if kinds is not None:
        return window if "sliding_attention" in kinds else None
    return window if getattr(config, "max_window_layers", 0) < config.num_hidden_layers else None


def _spec(config: Config, dtype: str, sep_layer: bool, name: str) -> ModelSpec:
    width, heads, traits = config.hidden_size, config.num_attention_heads, TRAITS[config.model_type](config)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or width // heads
    attention_parameters = _attention_parameters(width, heads * head_dim, kv_heads * head_dim, head_dim, traits)
    mlp_parameters = _mlp_parameters(width, config.intermediate_size, traits)

    def parts(index: int) -> tuple[LayerSpec, LayerSpec]:
        origin = Origin(dtype, f"model.layers.{index}.", index)
        return (
            layout.attention(*attention_parameters, width, origin),
            layout.mlp(Llama.mlp, mlp_parameters, width, config.intermediate_size, origin),
        )

    head_weight = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    outside = Origin(dtype, "model.", stored_as={"lm_head.weight": head_weight})
    embed = layout.embedding(Llama.embed, layout.table("embed_tokens", config.vocab_size, width), {}, width, outside)
    logits = layout.linear("lm_head", config.vocab_size, width, bias=False)
    head = layout.head(Llama.head, layout.norm("norm", width, bias=False), logits, outside)
    layers = layout.in_order(embed, config.num_hidden_layers, parts, head, sep_layer)
    # within its window a text is attended like any other; longer ones are refused rather than computed otherwise
    reach = min(config.max_position_embeddings, traits.window or config.max_position_embeddings)
    own = {"kv_heads": kv_heads, "head_dim": head_dim, "max_positions": reach}
    return layout.model_spec(config, dtype, name, config.intermediate_size, layers, **own)


def _attention_parameters(
    width: int, q_width: int, kv_width: int, head_dim: int, traits: Traits
) -> tuple[Parameters, Parameters]:
    head_norms = [layout.norm(f"self_attn.{part}_norm", head_dim, bias=False) for part in "qk" if traits.head_norm]
    before = layout.joined(
        layout.norm("input_layernorm", width, bias=False),
        layout.linear("self_attn.q_proj", q_width, width, traits.qkv_bias),
        layout.linear("self_attn.k_proj", kv_width, width, traits.qkv_bias),
        layout.linear("self_attn.v_proj", kv_width, width, traits.qkv_bias),
        *head_norms,
    )
    return before, layout.linear("self_attn.o_proj", width, q_width, traits.out_bias)


def _mlp_parameters(width: int, ffn: int, traits: Traits) -> Parameters:
    return layout.joined(
        layout.norm("post_attention_layernorm", width, bias=False),
        layout.linear("mlp.gate_proj", ffn, width, traits.mlp_bias),
        layout.linear("mlp.up_proj", ffn, width, traits.mlp_bias),
        layout.linear("mlp.down_proj", width, ffn, traits.mlp_bias),
    )
