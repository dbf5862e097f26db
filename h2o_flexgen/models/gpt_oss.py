"""gpt-oss: a mixture in every layer, sinks in every attention, and a window in every other one.

An expert's gate and what goes up are used as they lie in the file: in safetensors their rows take turns in one matrix, and the
products are parted; in GGUF files they are two.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from torch import Tensor

from h2o_flexgen.checkpoints.stored_architecture import (
    ATTENTION,
    BY_SOFTMAX_OF_CHOSEN,
    EXPERTS,
    GATING,
    NORMS_BY_PLACE,
    WINDOW,
    GgufArchitecture,
    biases,
    weights,
)
from h2o_flexgen.kernels.operations import Counts, clamped_silu_of_each, halves_apart
from h2o_flexgen.models import layout, tensor_ops
from h2o_flexgen.models.base import Weights
from h2o_flexgen.models.config_values import FACTOR, FULL, SLIDING, Bounds, Config, Number, windows_by_kind
from h2o_flexgen.models.layout import Parameters
from h2o_flexgen.models.llama import SINKS, Traits
from h2o_flexgen.models.mixture import ExpertGroup, Mixture, MixtureOfExperts

ROUTER = "mlp.router"
ROUTER_IN_FILES = {"ffn_gate_inp": ROUTER}
LIMIT, ALPHA = 7.0, 1.702  # of configs that are older than the keys


class GptOss(MixtureOfExperts):
    bounds: ClassVar[Bounds] = {"swiglu_limit": Number(0.0, 1e6), "swiglu_alpha": FACTOR}
    gguf = GgufArchitecture(
        "gpt-oss",
        {
            **weights(ATTENTION, EXPERTS, ROUTER_IN_FILES, NORMS_BY_PLACE),
            **biases(ATTENTION, EXPERTS, ROUTER_IN_FILES),
            "attn_sinks.weight": SINKS,
        },
        keys={
            "num_local_experts": lambda said: said.experts,
            "intermediate_size": lambda said: said.expert_width,
            "experts_apart": lambda said: True,  # elsewhere it has gate and up in one matrix
            "sliding_window": lambda said: said.whole(WINDOW),
            "layer_types": lambda said: [FULL if block % 2 else SLIDING for block in range(said.blocks)],
        },
        heeds={GATING: (0, BY_SOFTMAX_OF_CHOSEN), f"{WINDOW}_pattern": (2,)},
        has_experts=True,
        sums_to_one=True,
        rounds_waves=False,
    )

    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        self._are_apart = bool(getattr(config, "experts_apart", False))  # of a GGUF file: transformers has no such key
        super().__init__(config, dtype, sep_layer, name)
        self._limit = float(getattr(config, "swiglu_limit", LIMIT))
        self._alpha = float(getattr(config, "swiglu_alpha", ALPHA))

    @staticmethod
    def traits_of(config: Config) -> Traits:
        bias = config.attention_bias
        return Traits(bias, bias, windows=windows_by_kind(config), sinks=True)

    @staticmethod
    def mixture_of(config: Config) -> Mixture:
        return Mixture(
            config.num_local_experts,
            config.num_experts_per_tok,
            config.intermediate_size,
            sums_to_one=True,
            of_chosen=True,
            router=ROUTER,
            router_bias=True,
            expert_bias=True,
        )

    @staticmethod
    def activation_of(config: Config) -> str:
        return "silu"  # gates are defined by their sigmoid, whatever the config says

    # -- its layers --------------------------------------------------------------------------------------------------------

    def expert(self, number: int, width: int) -> Parameters:
        if self._are_apart:
            return super().expert(number, width)
        mixture, down = self._mixture, f"mlp.experts.{number}.down_proj"
        return layout.joined(
            layout.linear(_both(number), 2 * mixture.inner, width, True, mixture.share),
            layout.linear(down, width, mixture.inner, True, mixture.share),
        )

    # -- the functions of layers -------------------------------------------------------------------------------------------

    def gate_and_up(self, asked: ExpertGroup, weights: Weights) -> Iterable[Tensor]:
        if self._are_apart:
            return super().gate_and_up(asked, weights)
        (both,) = tensor_ops.linears_of_each(asked.x, asked.counts, weights, [_both(number) for number in asked.experts])
        return halves_apart(both.flatten()).view(2, len(both), -1)

    def gated_by_expert(self, gate: Tensor, up: Tensor, counts: Counts) -> Tensor:
        """(up + 1) * gate * sigmoid(alpha * gate), by what silu makes of alpha * gate."""
        return clamped_silu_of_each(gate, up, counts, self._limit, self._alpha)


def _both(number: int) -> str:
    """The matrix of an expert's gate and of what goes up."""
    return f"mlp.experts.{number}.gate_up_proj"
