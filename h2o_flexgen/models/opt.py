"""OPT: learned positions, layer norm before (350m: after) attention and mlp, 350m with projections around its blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from h2o_flexgen.core.allowed_values import EOS
from h2o_flexgen.core.model_spec import MOST_WIDTH, LayerSpec, ModelSpec
from h2o_flexgen.kernels.operations import add_scaled
from h2o_flexgen.models import layout, tensor_ops
from h2o_flexgen.models.base import Given, InHalves, Weights
from h2o_flexgen.models.config_values import Bounds, Config, Whole
from h2o_flexgen.models.layout import Origin, Parameters
from h2o_flexgen.models.new_tokens import NewTokens
from h2o_flexgen.models.whole_configs import COUNT, OFF, ON, TEXT, Usual, end_of_text

POSITION_OFFSET = 2  # the first rows of the position table belong to padding, which is never embedded here


class OPT(InHalves):
    usual: ClassVar[Mapping[str, Usual]] = {
        **dict.fromkeys(("enable_bias", "layer_norm_elementwise_affine", "do_layer_norm_before", "tie_word_embeddings"), ON),
        "_remove_final_layer_norm": OFF,
        "activation_function": Usual("relu", TEXT),
        "word_embed_proj_dim": Usual(None, COUNT, follows=lambda values: values["hidden_size"]),
        EOS: end_of_text(2),
    }
    bounds: ClassVar[Bounds] = {
        "ffn_dim": Whole(MOST_WIDTH, is_required=True),
        "intermediate_size": Whole(MOST_WIDTH),
        "word_embed_proj_dim": Whole(MOST_WIDTH),
    }

    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        self.spec = _spec(config, dtype, sep_layer, name)
        self._norm_first = bool(config.do_layer_norm_before)
        self._norm_last = _has_last_norm(config)
        self._activation = tensor_ops.gating(config.activation_function)

    def embed(self, tokens: Tensor, weights: Weights, given: Given) -> Tensor:
        hidden = tensor_ops.embedding(tokens, weights, "embed_tokens")
        if "project_in.weight" in weights:
            hidden = tensor_ops.linear(hidden, weights, "project_in")
        return add_scaled(hidden, tensor_ops.embedding(given.positions, weights, "embed_positions", first=POSITION_OFFSET))

    def attended(self, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        x = tensor_ops.layer_norm(hidden, weights, "self_attn_layer_norm") if self._norm_first else hidden
        q, k, v = [tensor_ops.split_heads(each, self.spec.head_dim) for each in tensor_ops.linears(x, weights, *tensor_ops.QKV)]
        return given.attend(NewTokens(q, k, v, x=x))

    def with_attended(self, hidden: Tensor, out: Tensor, weights: Weights) -> Tensor:
        out = add_scaled(tensor_ops.linear(out, weights, "self_attn.out_proj"), hidden)
        return out if self._norm_first else tensor_ops.layer_norm(out, weights, "self_attn_layer_norm")

    def mlp(self, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        x = tensor_ops.layer_norm(hidden, weights, "final_layer_norm") if self._norm_first else hidden
        inner = self._activation(tensor_ops.linear(x, weights, "fc1"))
        out = add_scaled(tensor_ops.linear(inner, weights, "fc2"), hidden)
        return out if self._norm_first else tensor_ops.layer_norm(out, weights, "final_layer_norm")

    def head(self, hidden: Tensor, weights: Weights) -> Tensor:
        return tensor_ops.linear(self.last_states(hidden, weights), weights, "lm_head")

    def last_states(self, hidden: Tensor, weights: Weights) -> Tensor:
        if self._norm_last:
            hidden = tensor_ops.layer_norm(hidden, weights, "final_layer_norm")
        return tensor_ops.linear(hidden, weights, "project_out") if "project_out.weight" in weights else hidden


def _has_last_norm(config: Config) -> bool:
    return bool(config.do_layer_norm_before and not getattr(config, "_remove_final_layer_norm", False))


def _spec(config: Config, dtype: str, sep_layer: bool, name: str) -> ModelSpec:
    width = config.hidden_size

    def parts(index: int) -> tuple[LayerSpec, LayerSpec]:
        origin = Origin(dtype, f"model.decoder.layers.{index}.", index)
        return (
            layout.attention(*_attention_parameters(config), width, origin),
            layout.mlp(OPT.mlp, _mlp_parameters(config), width, config.ffn_dim, origin),
        )

    head_weight = "model.decoder.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    outside = Origin(dtype, "model.decoder.", stored_as={"lm_head.weight": head_weight})
    embed, head = _embedding(config, outside), _head(config, outside)
    layers = layout.in_order(embed, config.num_hidden_layers, parts, head, sep_layer)
    return layout.model_spec(config, dtype, name, config.ffn_dim, layers, rotary=False)


def _embedding(config: Config, origin: Origin) -> LayerSpec:
    width, inner = config.hidden_size, config.word_embed_proj_dim
    tokens = layout.table("embed_tokens", config.vocab_size, inner)
    positions = layout.table("embed_positions", config.max_position_embeddings + POSITION_OFFSET, width)
    project = layout.linear("project_in", width, inner, bias=False) if inner != width else {}
    return layout.embedding(OPT.embed, tokens, layout.joined(positions, project), width, origin)


def _attention_parameters(config: Config) -> tuple[Parameters, Parameters]:
    width, affine = config.hidden_size, config.layer_norm_elementwise_affine
    *kvq, out = (layout.linear(f"self_attn.{part}_proj", width, width, config.enable_bias) for part in ("k", "v", "q", "out"))
    norm = layout.norm("self_attn_layer_norm", width, weight=affine, bias=affine)
    if config.do_layer_norm_before:
        return layout.joined(*kvq, norm), out
    return layout.joined(*kvq), layout.joined(out, norm)


def _mlp_parameters(config: Config) -> Parameters:
    width, affine = config.hidden_size, config.layer_norm_elementwise_affine
    up = layout.linear("fc1", config.ffn_dim, width, config.enable_bias)
    down = layout.linear("fc2", width, config.ffn_dim, config.enable_bias)
    return layout.joined(up, down, layout.norm("final_layer_norm", width, weight=affine, bias=affine))


def _head(config: Config, origin: Origin) -> LayerSpec:
    width, inner, affine = config.hidden_size, config.word_embed_proj_dim, config.layer_norm_elementwise_affine
    last_norm = layout.norm("final_layer_norm", width, weight=affine, bias=affine) if _has_last_norm(config) else {}
    project = layout.linear("project_out", inner, width, bias=False) if inner != width else {}
    logits = layout.linear("lm_head", config.vocab_size, inner, bias=False)
    return layout.head(OPT.head, layout.joined(last_norm, project), logits, origin)
