"""OPT: learned positions, layer norm before (350m: after) attention and mlp, 350m with projections around its blocks."""

from __future__ import annotations

from torch import Tensor

from h2o_flexgen.core.model_spec import LayerSpec, ModelSpec
from h2o_flexgen.models import ops
from h2o_flexgen.models.base import Attend, Weights
from h2o_flexgen.models.layout import Config, Shapes, in_order, joined, layer, linear, norm

POSITION_OFFSET = 2  # the first rows of the position table belong to padding, which is never embedded here


class OPT:
    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        self.spec = _spec(config, dtype, sep_layer, name)
        self._norm_first = bool(config.do_layer_norm_before)
        self._norm_last = _has_last_norm(config)
        self._activation = ops.activation(config.activation_function)

    def embed(self, tokens: Tensor, positions: Tensor, weights: Weights) -> Tensor:
        hidden = ops.embedding(tokens, weights, "embed_tokens")
        if "project_in.weight" in weights:
            hidden = ops.linear(hidden, weights, "project_in")
        hidden += ops.embedding(positions + POSITION_OFFSET, weights, "embed_positions")
        return hidden

    def attention(self, hidden: Tensor, weights: Weights, attend: Attend) -> Tensor:
        x = ops.layer_norm(hidden, weights, "self_attn_layer_norm") if self._norm_first else hidden
        q, k, v = (ops.split_heads(ops.linear(x, weights, f"self_attn.{part}_proj"), self.spec.head_dim) for part in "qkv")
        out = ops.linear(attend(q, k, v), weights, "self_attn.out_proj")
        out += hidden
        return out if self._norm_first else ops.layer_norm(out, weights, "self_attn_layer_norm")

    def mlp(self, hidden: Tensor, weights: Weights) -> Tensor:
        x = ops.layer_norm(hidden, weights, "final_layer_norm") if self._norm_first else hidden
        out = ops.linear(self._activation(ops.linear(x, weights, "fc1")), weights, "fc2")
        out += hidden
        return out if self._norm_first else ops.layer_norm(out, weights, "final_layer_norm")

    def head(self, hidden: Tensor, weights: Weights) -> Tensor:
        if self._norm_last:
            hidden = ops.layer_norm(hidden, weights, "final_layer_norm")
        if "project_out.weight" in weights:
            hidden = ops.linear(hidden, weights, "project_out")
        return ops.linear(hidden, weights, "lm_head")


def _has_last_norm(config: Config) -> bool:
    return bool(config.do_layer_norm_before and not getattr(config, "_remove_final_layer_norm", False))


def _spec(config: Config, dtype: str, sep_layer: bool, name: str) -> ModelSpec:
    hidden, heads = config.hidden_size, config.num_attention_heads

    def parts(index: int) -> tuple[LayerSpec, LayerSpec]:
        prefix = f"model.decoder.layers.{index}."
        return (
            layer("attention", _attention_shapes(config), hidden, dtype, prefix, index),
            layer("mlp", _mlp_shapes(config), hidden, dtype, prefix, index),
        )

    outside = "model.decoder."
    head_weight = outside + "embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    embed = layer("embed", _embed_shapes(config), hidden, dtype, outside, table="embed_tokens.weight")
    stored_as, table = {"lm_head.weight": head_weight}, "lm_head.weight"
    head = layer("head", _head_shapes(config), config.vocab_size, dtype, outside, stored_as=stored_as, table=table)
    return ModelSpec(
        name=name,
        architecture="opt",
        hidden=hidden,
        ffn=config.ffn_dim,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=config.vocab_size,
        max_positions=config.max_position_embeddings,
        dtype=dtype,
        layers=in_order(embed, config.num_hidden_layers, parts, head, sep_layer),
        rotary=False,
    )


def _embed_shapes(config: Config) -> Shapes:
    hidden, inner = config.hidden_size, config.word_embed_proj_dim
    return {
        "embed_tokens.weight": (config.vocab_size, inner),
        "embed_positions.weight": (config.max_position_embeddings + POSITION_OFFSET, hidden),
        **(linear("project_in", hidden, inner, bias=False) if inner != hidden else {}),
    }


def _attention_shapes(config: Config) -> Shapes:
    hidden, affine = config.hidden_size, config.layer_norm_elementwise_affine
    projections = [linear(f"self_attn.{part}_proj", hidden, hidden, config.enable_bias) for part in ("k", "v", "q", "out")]
    return joined(*projections, norm("self_attn_layer_norm", hidden, affine, affine))


def _mlp_shapes(config: Config) -> Shapes:
    hidden, affine = config.hidden_size, config.layer_norm_elementwise_affine
    up = linear("fc1", config.ffn_dim, hidden, config.enable_bias)
    down = linear("fc2", hidden, config.ffn_dim, config.enable_bias)
    return joined(up, down, norm("final_layer_norm", hidden, affine, affine))


def _head_shapes(config: Config) -> Shapes:
    hidden, inner, affine = config.hidden_size, config.word_embed_proj_dim, config.layer_norm_elementwise_affine
    last_norm = norm("final_layer_norm", hidden, affine, affine) if _has_last_norm(config) else {}
    project = linear("project_out", inner, hidden, bias=False) if inner != hidden else {}
    return joined(last_norm, project, linear("lm_head", config.vocab_size, inner, bias=False))
