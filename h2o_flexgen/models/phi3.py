"""Phi-3: LLaMA with one matrix for queries, keys and values, and one for both ways into the mlp."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from h2o_flexgen.core.model_spec import LayerSpec
from h2o_flexgen.models import layout, tensor_ops
from h2o_flexgen.models.base import Weights
from h2o_flexgen.models.config_values import Config
from h2o_flexgen.models.fused_qkv import FusedQkv
from h2o_flexgen.models.layout import Origin, Parameters
from h2o_flexgen.models.llama import Decoder, MlpNames, Traits
from h2o_flexgen.models.windows import same_windows

INTO_MLP, OUT_OF_MLP = "mlp.gate_up_proj", "mlp.down_proj"
FUSED_STATES = 4  # of the inner width, at once: gate and what goes up, as they come and side by side


class FusedMlp(Decoder):
    """LLaMA's relatives with one matrix for both ways into the mlp."""

    def gated(self, x: Tensor, weights: Weights, names: MlpNames) -> Tensor:
        made = self._gating(*(half.contiguous() for half in tensor_ops.linear(x, weights, INTO_MLP).chunk(2, dim=-1)))
        return tensor_ops.linear(made, weights, OUT_OF_MLP)

    def mlp_parameters(self, width: int, inner: int) -> Parameters:
        ways_in = layout.linear(INTO_MLP, 2 * inner, width, bias=False)
        return layout.joined(ways_in, layout.linear(OUT_OF_MLP, width, inner, bias=False))

    def mlp_layer(self, width: int, inner: int, origin: Origin) -> LayerSpec:
        return replace(super().mlp_layer(width, inner, origin), passing_width=FUSED_STATES * inner)


class Phi3(FusedQkv, FusedMlp):
    rotates_parts = True

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return Traits(windows=same_windows(config))
