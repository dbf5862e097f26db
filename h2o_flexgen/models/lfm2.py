"""LFM2, with experts and without: in most blocks a short convolution takes the place of attention. It mixes a token with the
few before it, and the inputs of these are all that a row keeps there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from h2o_flexgen.checkpoints.stored_architecture import (
    BY_SIGMOID,
    DENSE_BLOCKS,
    EXPERTS,
    GATING,
    HEAD_NORMS,
    KV_HEADS,
    OF_LLAMA,
    RMS_EPS,
    ROUTER,
    WEIGHTS_SCALE,
    GgufArchitecture,
    Said,
    weights,
)
from h2o_flexgen.core.model_spec import LayerSpec, OfToken, StateTensor
from h2o_flexgen.kernels.operations import gated_identity
from h2o_flexgen.kernels.routing import SIGMOID_OF_EACH, RouterRule, RouterScores
from h2o_flexgen.models import layout, tensor_ops
from h2o_flexgen.models.base import Given, Weights
from h2o_flexgen.models.config_values import CONVOLVED_TOKENS, FULL, Bounds, Config, Flag, Number, Whole, refuse_short
from h2o_flexgen.models.glm import CORRECTION_IN_FILES, CorrectedMixture
from h2o_flexgen.models.layout import Origin, Parameters
from h2o_flexgen.models.llama import Decoder, Traits
from h2o_flexgen.models.mixture import Mixture, MixtureOfExperts

CONVOLUTION = "conv"  # what configs call such a block
INPUTS = "inputs"  # the state of a row
KERNEL = "conv.conv.weight"
IN_FILES = weights(
    {"shortconv.conv": "conv.conv", "shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj"},
)
KEYS: Mapping[str, Said] = {
    "conv_L_cache": lambda said: said.whole("shortconv.l_cache"),
    "conv_bias": lambda said: False,
    "norm_eps": lambda said: said.number(RMS_EPS),
    "layer_types": lambda said: [FULL if heads else CONVOLUTION for heads in said.numbers_of_blocks(KV_HEADS) or ()],
}
OF_FILES = GgufArchitecture(
    "lfm2",
    {**OF_LLAMA, **weights(HEAD_NORMS), **IN_FILES},
    keys={**KEYS, "block_auto_adjust_ff_dim": lambda said: False},
    outside={"token_embd_norm.weight": "model.norm.weight"},
    convolutions=(KERNEL,),
    has_states=True,
)
CONVOLVED = 8  # times the width: values that a token has at once
LEAST_SUM = 1e-6  # prevents a division by zero
SIZES: Bounds = {"conv_L_cache": CONVOLVED_TOKENS, "norm_eps": Number(0.0, 1.0)}


class Convolutions(Decoder):
    """What both have in common."""

    patterns: ClassVar[Mapping[str, str]] = {
        r"\.operator_norm\.": ".input_layernorm.",
        r"\.ffn_norm\.": ".post_attention_layernorm.",
        r"\.self_attn\.out_proj\.": ".self_attn.o_proj.",
        r"\.([qk])_layernorm\.": r".\1_norm.",
        r"\.feed_forward\.": ".mlp.",
        r"\.w1\.": ".gate_proj.",
        r"\.w3\.": ".up_proj.",
        r"\.w2\.": ".down_proj.",
        r"\.mlp\.expert_bias$": ".mlp.gate.e_score_correction_bias",
        r"^model\.embedding_norm\.": "model.norm.",
    }

    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        refuse_short(config, "layer_types")
        super().__init__(config, dtype, sep_layer, name)

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return Traits(head_norm=True)

    @staticmethod
    def activation_of(config: Config) -> str:
        return "silu"

    @staticmethod
    def eps_of(config: Config) -> float:
        eps: float = config.norm_eps
        return eps

    def mixing_layer(self, config: Config, block: int, origin: Origin) -> LayerSpec:
        if config.layer_types[block] != CONVOLUTION:
            return super().mixing_layer(config, block, origin)
        width, mixed, bias = config.hidden_size, config.conv_L_cache, bool(config.conv_bias)
        parameters = layout.joined(
            self.norm_parameters(width, self._traits.norms.before_attention),
            layout.linear("conv.in_proj", 3 * width, width, bias),
            layout.wide(KERNEL, width, 1, mixed),
            layout.wide("conv.conv.bias", width) if bias else {},
            layout.linear("conv.out_proj", width, width, bias),
        )
        states = [StateTensor(INPUTS, (mixed - 1, width), brings=(OfToken((width,)),))]
        return layout.stateful(Convolutions.convolution, parameters, states, width, CONVOLVED * width, origin)

    def convolution(self, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        x = self.normed(hidden, weights, self._traits.norms.before_attention)
        before, behind, x = tensor_ops.linear(x, weights, "conv.in_proj").chunk(3, dim=-1)
        kernel, bias = tensor_ops.needed(weights, KERNEL), tensor_ops.plain(weights, "conv.conv.bias")
        opened = gated_identity(before.contiguous(), x.contiguous())
        mixed = given.states.convolve(INPUTS, opened, kernel, bias, is_activated=False)
        out = gated_identity(mixed, behind.contiguous())
        return self.added(tensor_ops.linear(out, weights, "conv.out_proj"), hidden)


class Lfm2(Convolutions):
    gguf = OF_FILES
    bounds: ClassVar[Bounds] = {
        **SIZES,
        "block_multiple_of": Whole(1 << 20),
        "block_ffn_dim_multiplier": Number(1e-3, 1e3),
        **dict.fromkeys(("conv_bias", "block_auto_adjust_ff_dim"), Flag()),
    }

    @staticmethod
    def inner_of(config: Config) -> int:
        inner: int = config.intermediate_size
        if not config.block_auto_adjust_ff_dim:
            return inner
        multiple, scale = config.block_multiple_of, config.block_ffn_dim_multiplier
        inner = int(2 * inner / 3)
        return inner if scale is None else -(-int(scale * inner) // multiple) * multiple


class Lfm2Moe(Convolutions, CorrectedMixture):
    """Its first blocks have a single mlp. A correction changes which experts are chosen, where the config asks for it."""

    gguf = replace(
        OF_FILES,
        name="lfm2moe",
        tensors={**OF_FILES.tensors, **weights(EXPERTS, ROUTER), **CORRECTION_IN_FILES},
        keys={
            **KEYS,
            "num_experts": lambda said: said.experts,
            "num_dense_layers": lambda said: said.whole(DENSE_BLOCKS),
            "moe_intermediate_size": lambda said: said.expert_width,
            "routed_scaling_factor": lambda said: said.number(WEIGHTS_SCALE, 0.0) or 1.0,
            "use_expert_bias": lambda said: any(name.endswith("exp_probs_b.bias") for name in said.tensors),
        },
        heeds={GATING: (BY_SIGMOID,), DENSE_BLOCKS: None, WEIGHTS_SCALE: None},
        has_experts=True,
        sums_to_one=True,
    )
    bounds: ClassVar[Bounds] = {
        **SIZES,
        "num_dense_layers": Whole(1 << 12, may_be_zero=True),
        **dict.fromkeys(("conv_bias", "use_expert_bias"), Flag()),
    }
    routes_wide = False

    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        self._is_corrected = bool(config.use_expert_bias)
        super().__init__(config, dtype, sep_layer, name)

    @staticmethod
    def mixture_of(config: Config) -> Mixture:
        experts, chosen, inner = config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size
        return Mixture(experts, chosen, inner, bool(config.norm_topk_prob), factor=config.routed_scaling_factor)

    @staticmethod
    def has_experts(config: Config, block: int) -> bool:
        return block >= int(config.num_dense_layers)

    def routing(self, width: int) -> Parameters:
        return super().routing(width) if self._is_corrected else MixtureOfExperts.routing(self, width)

    def scored(self, hidden: Tensor, x: Tensor, weights: Weights) -> RouterScores:
        return super().scored(hidden, x, weights) if self._is_corrected else MixtureOfExperts.scored(self, hidden, x, weights)

    @property
    def router_rule(self) -> RouterRule:
        return self.chosen_by(SIGMOID_OF_EACH, LEAST_SUM)
