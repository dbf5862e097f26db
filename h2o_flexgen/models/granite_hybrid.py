"""Granite 4 H: Granite with Mamba-2 in most blocks, and an mlp that all tokens pass through, with experts beside it or without.
Attention may rotate nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from h2o_flexgen.checkpoints.stored_architecture import (
    ATTENTION,
    EXPERTS,
    KV_HEADS,
    MLP,
    NORMS,
    ROUTER,
    GgufModel,
    shared_expert,
    weights,
)
from h2o_flexgen.core.model_spec import MOST_WIDTH, LayerSpec
from h2o_flexgen.models import layout, tensor_ops
from h2o_flexgen.models.base import Weights
from h2o_flexgen.models.config_values import FULL, MOST_EXPERTS, Bounds, Config, Whole, refuse_short
from h2o_flexgen.models.granite import IN_GGUF, GraniteMoe
from h2o_flexgen.models.granite import KEYS as OF_GRANITE
from h2o_flexgen.models.layout import Origin, Parameters
from h2o_flexgen.models.llama import UNROTATED, USUAL, AttentionFunctions, MlpNames
from h2o_flexgen.models.mamba import IN_FILES, KERNEL, KEYS, SCAN, SIZES, VECTORS, Mamba
from h2o_flexgen.models.mixture import SHARED, Mixture
from h2o_flexgen.models.phi3 import FUSED_STATES
from h2o_flexgen.models.whole_configs import Usual

INTO_SHARED, OUT_OF_SHARED = f"{SHARED}.gate_up_proj", f"{SHARED}.down_proj"
ROTATED, FINETUNED = "rope", "rope.scaling.finetuned"


def _shared_width(said: GgufModel) -> int:
    return said.shared_expert_width if said.experts else said.rows_in_block(0, "ffn_gate.weight")


class GraniteHybrid(Mamba, GraniteMoe):
    usual: ClassVar[Mapping[str, Usual]] = {}  # it reads more than the class above
    bounds: ClassVar[Bounds] = {
        **GraniteMoe.bounds,
        **SIZES,
        "shared_intermediate_size": Whole(MOST_WIDTH),
        "num_local_experts": Whole(MOST_EXPERTS, may_be_zero=True),
    }
    patterns: ClassVar[Mapping[str, str]] = {
        **GraniteMoe.patterns,
        r"\.shared_mlp\.input_linear\.": f".{INTO_SHARED}.",
        r"\.shared_mlp\.output_linear\.": f".{OUT_OF_SHARED}.",
    }
    gguf = replace(
        IN_GGUF,
        name="granitehybrid",
        tensors={
            **weights(ATTENTION, NORMS, EXPERTS, ROUTER, shared_expert(SHARED)),
            **weights({name: own.replace("mlp.", f"{SHARED}.") for name, own in MLP.items()}),  # where there are no experts
            **IN_FILES,
        },
        keys={
            **OF_GRANITE,
            **KEYS,
            "mamba_expand": lambda said: said.whole("ssm.inner_size") // max(1, said.whole("embedding_length")),
            "num_local_experts": lambda said: said.experts,
            "num_experts_per_tok": lambda said: said.whole("expert_used_count", 1),
            "intermediate_size": lambda said: said.expert_width if said.experts else said.whole("feed_forward_length"),
            "shared_intermediate_size": _shared_width,
            "layer_types": lambda said: [FULL if heads else SCAN for heads in said.numbers_of_blocks(KV_HEADS) or ()],
            "position_embedding_type": lambda said: ROTATED if said.flag(FINETUNED, False) else "nope",
            "mlps_are_apart": lambda said: True,
        },
        heeds={**IN_GGUF.heeds, FINETUNED: None},
        has_experts=None,
        sums_to_one=True,
        convolutions=(KERNEL,),
        vectors=VECTORS,
        has_states=True,
    )

    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        refuse_short(config, "layer_types")
        self._mlps_are_apart = bool(getattr(config, "mlps_are_apart", False))  # in GGUF files, from what their gates are
        super().__init__(config, dtype, sep_layer, name)

    @staticmethod
    def inner_of(config: Config) -> int:
        inner: int = config.shared_intermediate_size
        return inner

    @staticmethod
    def mixture_of(config: Config) -> Mixture:
        experts, chosen = max(1, config.num_local_experts), config.num_experts_per_tok or 1
        own = Mixture(experts, chosen, config.intermediate_size, sums_to_one=True, of_chosen=True)
        return replace(own, shared=config.shared_intermediate_size)

    @staticmethod
    def has_experts(config: Config, block: int) -> bool:
        return bool(config.num_local_experts)

    def attends_by(self, config: Config, block: int) -> AttentionFunctions:
        return USUAL if config.position_embedding_type == ROTATED else UNROTATED

    # -- the mlp that all tokens pass through ----------------------------------------------------------------------------

    def routing(self, width: int) -> Parameters:
        mixture = self._mixture
        norm, router = self.norm_parameters(width, self.norm_of_experts), layout.router(mixture.router, mixture.experts, width)
        return layout.joined(norm, router, self.mlp_parameters(width, mixture.shared))

    def mlp_parameters(self, width: int, inner: int) -> Parameters:
        if self._mlps_are_apart:
            return MlpNames.of(SHARED).parameters(width, inner)
        ways_in = layout.linear(INTO_SHARED, 2 * inner, width, bias=False)
        return layout.joined(ways_in, layout.linear(OUT_OF_SHARED, width, inner, bias=False))

    def mlp_layer(self, width: int, inner: int, origin: Origin) -> LayerSpec:
        return replace(super().mlp_layer(width, inner, origin), passing_width=FUSED_STATES * inner)

    def gated(self, x: Tensor, weights: Weights, names: MlpNames) -> Tensor:
        if self._mlps_are_apart:
            return super().gated(x, weights, MlpNames.of(SHARED))
        made = self._gating(*(half.contiguous() for half in tensor_ops.linear(x, weights, INTO_SHARED).chunk(2, dim=-1)))
        return tensor_ops.linear(made, weights, OUT_OF_SHARED)
