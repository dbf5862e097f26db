"""GPT-NeoX and Pythia: rotary positions on a part of each head, attention and mlp side by side or one after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_flexgen.core.model_spec import LayerSpec, ModelSpec
from h2o_flexgen.models import ops
from h2o_flexgen.models.base import Attend, Weights
from h2o_flexgen.models.layout import Config, Shapes, in_order, joined, layer, linear, norm
from h2o_flexgen.models.rotary import Rope


class NeoX:
    """With the parallel residual the mlp works on what the attention was given, so attention hands on that and its result."""

    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        self.spec = _spec(config, dtype, sep_layer, name)
        self._activation = ops.activation(config.hidden_act)
        self._eps = config.layer_norm_eps
        self._parallel = bool(config.use_parallel_residual)
        rope = Rope.of(config)
        self._rotary = rope.rotary(int(self.spec.head_dim * rope.share))

    def embed(self, tokens: Tensor, positions: Tensor, weights: Weights) -> Tensor:
        return ops.embedding(tokens, weights, "embed_in")

    def attention(self, hidden: Tensor, weights: Weights, attend: Attend) -> Tensor:
        x = ops.layer_norm(hidden, weights, "input_layernorm", self._eps)
        # one head's query, key and value lie side by side
        fused = ops.split_heads(ops.linear(x, weights, "attention.query_key_value"), 3 * self.spec.head_dim)
        q, k, v = fused.chunk(3, dim=-1)
        out = ops.linear(attend(q, k, v, self._rotary), weights, "attention.dense")
        if self._parallel:
            return torch.cat((hidden, out), dim=-1)
        out += hidden
        return out

    def mlp(self, hidden: Tensor, weights: Weights) -> Tensor:
        x, *attended = hidden.chunk(2, dim=-1) if self._parallel else (hidden,)
        normed = ops.layer_norm(x, weights, "post_attention_layernorm", self._eps)
        wide = self._activation(ops.linear(normed, weights, "mlp.dense_h_to_4h"))
        out = ops.linear(wide, weights, "mlp.dense_4h_to_h")
        for residual in (*attended, x):
            out += residual
        return out

    def head(self, hidden: Tensor, weights: Weights) -> Tensor:
        return ops.linear(ops.layer_norm(hidden, weights, "final_layer_norm", self._eps), weights, "embed_out")


def _spec(config: Config, dtype: str, sep_layer: bool, name: str) -> ModelSpec:
    hidden, heads, ffn = config.hidden_size, config.num_attention_heads, config.intermediate_size
    attention_width = 2 * hidden if config.use_parallel_residual else hidden

    def parts(index: int) -> tuple[LayerSpec, LayerSpec]:
        prefix = f"gpt_neox.layers.{index}."
        return (
            layer("attention", _attention_shapes(hidden, config.attention_bias), attention_width, dtype, prefix, index),
            layer("mlp", _mlp_shapes(hidden, ffn), hidden, dtype, prefix, index),
        )

    head_weight = "gpt_neox.embed_in.weight" if config.tie_word_embeddings else "embed_out.weight"
    embed_shapes = {"embed_in.weight": (config.vocab_size, hidden)}
    embed = layer("embed", embed_shapes, hidden, dtype, "gpt_neox.", table="embed_in.weight")
    head_shapes = joined(norm("final_layer_norm", hidden), linear("embed_out", config.vocab_size, hidden, bias=False))
    stored_as, table = {"embed_out.weight": head_weight}, "embed_out.weight"
    head = layer("head", head_shapes, config.vocab_size, dtype, "gpt_neox.", stored_as=stored_as, table=table)
    return ModelSpec(
        name=name,
        architecture="gpt_neox",
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=config.vocab_size,
        max_positions=config.max_position_embeddings,
        dtype=dtype,
        layers=in_order(embed, config.num_hidden_layers, parts, head, sep_layer),
    )


def _attention_shapes(hidden: int, bias: bool) -> Shapes:
    return joined(
        norm("input_layernorm", hidden),
        linear("attention.query_key_value", 3 * hidden, hidden, bias),
        linear("attention.dense", hidden, hidden, bias),
    )


def _mlp_shapes(hidden: int, ffn: int) -> Shapes:
    return joined(
        norm("post_attention_layernorm", hidden),
        linear("mlp.dense_h_to_4h", ffn, hidden, bias=True),
        linear("mlp.dense_4h_to_h", hidden, ffn, bias=True),
    )
