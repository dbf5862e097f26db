"""gpt-oss: a mixture in every layer, sinks in every attention, and a window in every other one.

The rows of an expert's gate and of what goes up take turns in one matrix, as its checkpoints have them: so their bytes are used
as they lie in the file, and the products are parted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from h2o_flexgen.kernels.operations import halves_apart
from h2o_flexgen.models import layout, ops
from h2o_flexgen.models.base import Weights
from h2o_flexgen.models.layout import Config, Parameters
from h2o_flexgen.models.llama import Traits, windows_of
from h2o_flexgen.models.mixture import Asked, Mixture, MixtureOfExperts

ROUTER = "mlp.router"
LIMIT, ALPHA = 7.0, 1.702  # of configs that are older than the keys


class GptOss(MixtureOfExperts):
    states_of_expert = 5  # both products as they come, and parted, and what torch puts together of all experts

    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        super().__init__(config, dtype, sep_layer, name)
        self._limit = float(getattr(config, "swiglu_limit", LIMIT))
        self._alpha = float(getattr(config, "swiglu_alpha", ALPHA))

    @staticmethod
    def traits_of(config: Config) -> Traits:
        bias = config.attention_bias
        return Traits(bias, bias, windows=windows_of(config, dense=0), sinks=True)

    @staticmethod
    def mixture_of(config: Config) -> Mixture:
        return Mixture(config.num_local_experts, config.num_experts_per_tok, config.intermediate_size, sums_to_one=True)

    @staticmethod
    def activation_of(config: Config) -> str:
        return "silu"  # gates are defined by their sigmoid, whatever the config says

    @staticmethod
    def has_experts(config: Config, block: int) -> bool:
        return True

    # -- its layers --------------------------------------------------------------------------------------------------------

    def routing(self, width: int) -> Parameters:
        return layout.joined(
            layout.norm("post_attention_layernorm", width, bias=False),
            layout.router(ROUTER, self._mixture.experts, width, bias=True),
        )

    def expert(self, number: int, width: int) -> Parameters:
        (both, down), mixture = _names(number), self._mixture
        return layout.joined(
            layout.linear(both, 2 * mixture.inner, width, True, mixture.share),
            layout.linear(down, width, mixture.inner, True, mixture.share),
        )

    # -- the functions of layers -------------------------------------------------------------------------------------------

    def chosen(self, x: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
        likeliest, experts = ops.linear(x, weights, ROUTER).topk(self._mixture.chosen, dim=-1)
        return functional.softmax(likeliest, dim=-1, dtype=torch.float32), experts

    def made_by(self, asked: Asked, x: Tensor, weights: Weights) -> Tensor:
        of_both, of_down = zip(*map(_names, asked.experts))
        (both,) = ops.linears_of_each(x, asked.counts, weights, of_both)
        (down,) = ops.linears_of_each(self._gated(both, asked.counts), asked.counts, weights, of_down)
        return down

    def _gated(self, both: Tensor, counts: Sequence[int]) -> Tensor:
        """(up + 1) * gate * sigmoid(alpha * gate), by what silu makes of alpha * gate."""
        gate, up = halves_apart(both.flatten()).view(2, len(both), -1)
        gate.clamp_(max=self._limit).mul_(self._alpha)
        up.clamp_(-self._limit, self._limit).add_(1.0).div_(self._alpha)
        return ops.gated_each(self._gating, gate, up, counts)


def _names(number: int) -> tuple[str, str]:
    """The names of an expert's matrices: that of gate and up, and that of what goes down."""
    return f"mlp.experts.{number}.gate_up_proj", f"mlp.experts.{number}.down_proj"
