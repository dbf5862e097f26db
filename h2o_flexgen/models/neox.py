"""GPT-NeoX and Pythia: rotary positions on a part of each head, attention and mlp side by side or one after the other."""

from __future__ import annotations

from torch import Tensor

from h2o_flexgen.core.model_spec import LayerSpec, ModelSpec
from h2o_flexgen.kernels.operations import add_scaled
from h2o_flexgen.models import layout, tensor_ops
from h2o_flexgen.models.base import Given, InHalves, Weights
from h2o_flexgen.models.config_values import Config, refuse_other_heads
from h2o_flexgen.models.layout import Origin, Parameters
from h2o_flexgen.models.new_tokens import NewTokens
from h2o_flexgen.models.rotary import Rope


class NeoX(InHalves):
    """A parallel residual feeds the mlp the attention's input, so attention hands on that and its result."""

    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        refuse_other_heads(config)
        self.spec = _spec(config, dtype, sep_layer, name)
        self._activation = tensor_ops.gating(config.hidden_act)
        self._eps = config.layer_norm_eps
        self._parallel = bool(config.use_parallel_residual)
        rope = Rope.of(config)
        self._rotary = rope.rotary(int(self.spec.head_dim * rope.share))

    def embed(self, tokens: Tensor, weights: Weights, given: Given) -> Tensor:
        return tensor_ops.embedding(tokens, weights, "embed_in")

    def attended(self, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        x = tensor_ops.layer_norm(hidden, weights, "input_layernorm", self._eps)
        # one head's query, key and value lie side by side
        fused = tensor_ops.split_heads(tensor_ops.linear(x, weights, "attention.query_key_value"), 3 * self.spec.head_dim)
        q, k, v = fused.chunk(3, dim=-1)
        return given.attend(NewTokens(q, k, v, self._rotary, x))

    def with_attended(self, hidden: Tensor, out: Tensor, weights: Weights) -> Tensor:
        out = tensor_ops.linear(out, weights, "attention.dense")
        return tensor_ops.side_by_side(hidden, out) if self._parallel else add_scaled(out, hidden)

    def mlp(self, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        x, *attended = hidden.chunk(2, dim=-1) if self._parallel else (hidden,)
        normed = tensor_ops.layer_norm(x, weights, "post_attention_layernorm", self._eps)
        wide = self._activation(tensor_ops.linear(normed, weights, "mlp.dense_h_to_4h"))
        out = tensor_ops.linear(wide, weights, "mlp.dense_4h_to_h")
        for residual in (*attended, x):
            add_scaled(out, residual)
        return out

    def head(self, hidden: Tensor, weights: Weights) -> Tensor:
        return tensor_ops.linear(self.last_states(hidden, weights), weights, "embed_out")

    def last_states(self, hidden: Tensor, weights: Weights) -> Tensor:
        return tensor_ops.layer_norm(hidden, weights, "final_layer_norm", self._eps)


def _spec(config: Config, dtype: str, sep_layer: bool, name: str) -> ModelSpec:
    width, ffn = config.hidden_size, config.intermediate_size
    attention_width = 2 * width if config.use_parallel_residual else width

    def parts(index: int) -> tuple[LayerSpec, LayerSpec]:
        origin = Origin(dtype, f"gpt_neox.layers.{index}.", index)
        return (
            layout.attention(*_attention_parameters(width, config.attention_bias), attention_width, origin),
            layout.mlp(NeoX.mlp, _mlp_parameters(width, ffn), width, ffn, origin),
        )

    head_weight = "gpt_neox.embed_in.weight" if config.tie_word_embeddings else "embed_out.weight"
    outside = Origin(dtype, "gpt_neox.", stored_as={"embed_out.weight": head_weight})
    embed = layout.embedding(NeoX.embed, layout.table("embed_in", config.vocab_size, width), {}, width, outside)
    logits = layout.linear("embed_out", config.vocab_size, width, bias=False)
    head = layout.head(NeoX.head, layout.norm("final_layer_norm", width), logits, outside)
    layers = layout.in_order(embed, config.num_hidden_layers, parts, head, sep_layer)
    return layout.model_spec(config, dtype, name, ffn, layers)


def _attention_parameters(width: int, bias: bool) -> tuple[Parameters, Parameters]:
    fused = layout.linear("attention.query_key_value", 3 * width, width, bias)
    return layout.joined(layout.norm("input_layernorm", width), fused), layout.linear("attention.dense", width, width, bias)


def _mlp_parameters(width: int, ffn: int) -> Parameters:
    return layout.joined(
        layout.norm("post_attention_layernorm", width),
        layout.linear("mlp.dense_h_to_4h", ffn, width, bias=True),
        layout.linear("mlp.dense_4h_to_h", width, ffn, bias=True),
    )
