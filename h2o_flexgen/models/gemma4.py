"""Gemma 4 without experts: Gemma with whole weights of norms, and values that are normalised, too. Layers without a window have
KV heads of their own, and may take their values from their keys. What a layer makes is multiplied by a number of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import sqrt
from typing import ClassVar, cast

from torch import Tensor

from h2o_flexgen.checkpoints.stored_architecture import GgufArchitecture
from h2o_flexgen.core.model_spec import MOST_HEAD_DIM, KVHeads, LayerSpec
from h2o_flexgen.kernels.operations import add_scaled
from h2o_flexgen.models import layout, tensor_ops
from h2o_flexgen.models.base import Given, Weights
from h2o_flexgen.models.config_values import HEADS, SOFTCAP, Bounds, Config, Whole
from h2o_flexgen.models.gemma import AROUND, Gemma
from h2o_flexgen.models.layout import Origin, Parameters
from h2o_flexgen.models.llama import NearRotated, Traits
from h2o_flexgen.models.norms import RMS_WIDE
from h2o_flexgen.models.windows import FULL, SLIDING, windows_by_kind

VALUES, SCALAR = "self_attn.v_proj", "layer_scalar"
UNSUPPORTED = {
    "hidden_size_per_layer_input": "embeddings of each layer",
    "num_kv_shared_layers": "layers that attend the keys of others",
}
OF_FAR = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}  # of layers without a window


class Gemma4Dense(NearRotated, Gemma):
    bounds: ClassVar[Bounds] = {
        "global_head_dim": Whole(MOST_HEAD_DIM),
        "num_global_key_value_heads": Whole(HEADS),
        "final_logit_softcapping": SOFTCAP,
    }
    gguf: ClassVar[GgufArchitecture | None] = None

    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        config = _of_both_kinds(config)
        for key, what in UNSUPPORTED.items():
            if getattr(config, key, None):
                raise ValueError(f"{key} is {getattr(config, key)}: {what} are not supported; take a larger Gemma 4")
        self._kinds, self._has_own_values = config.layer_types, not config.attention_k_eq_v
        super().__init__(config, dtype, sep_layer, name)

    # -- what it reads of a config ---------------------------------------------------------------------------------------

    @staticmethod
    def traits_of(config: Config) -> Traits:
        bias, width = config.attention_bias, config.hidden_size
        traits = Traits(bias, bias, norm=RMS_WIDE, norms=AROUND, head_norm=True, embedding_scale=width**0.5)
        return replace(traits, windows=windows_by_kind(config), logit_cap=config.final_logit_softcapping)

    @staticmethod
    def activation_of(config: Config) -> str:
        name: str = config.hidden_activation
        return name

    def kv_heads_of(self, config: Config, block: int) -> KVHeads:
        if config.layer_types[block] == SLIDING:
            return self.usual_kv_heads(config)
        return KVHeads(config.num_global_key_value_heads, config.global_head_dim)

    def rotated_widths(self, config: Config) -> Sequence[int]:
        return config.global_head_dim, config.head_dim

    # -- its layers ------------------------------------------------------------------------------------------------------

    def attention_layer(
        self, width: int, q_width: int, kv_width: int, head_dim: int, origin: Origin, window: int | None
    ) -> LayerSpec:
        made = super().attention_layer(width, q_width, kv_width, head_dim, origin, window)
        if self._has_own_values or self._kinds[origin.block or 0] == SLIDING:
            return made
        return made.without(f"{VALUES}.weight", f"{VALUES}.bias")

    def mlp_parameters(self, width: int, inner: int) -> Parameters:
        return layout.joined(super().mlp_parameters(width, inner), layout.wide(SCALAR, 1))

    # -- the functions of layers -------------------------------------------------------------------------------------------

    def width_of_heads(self, weights: Weights) -> int:
        return tensor_ops.needed(weights, "self_attn.q_norm.weight").numel()

    def projected(self, x: Tensor, weights: Weights) -> Sequence[Tensor]:
        if f"{VALUES}.weight" in weights:
            return super().projected(x, weights)
        q, k = tensor_ops.linears(x, weights, "self_attn.q_proj", "self_attn.k_proj")
        return q, k, k

    def asked(self, hidden: Tensor, weights: Weights) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Every attention scales scores. Those of this one are not scaled, so that its queries are longer by as much."""
        x, q, k, v = super().asked(hidden, weights)
        return x, add_scaled(q, scale=sqrt(q.shape[-1])), k, tensor_ops.bare_rms_norm(v, self._eps)

    def mlp(self, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        return self.scaled(super().mlp(hidden, weights, given), weights)

    def scaled(self, hidden: Tensor, weights: Weights) -> Tensor:
        return add_scaled(hidden, by=tensor_ops.needed(weights, SCALAR))


def _of_both_kinds(config: Config) -> Config:
    """A config with the KV heads of layers of both kinds. That of transformers has a config for each layer, and is not to be
    asked for what differs."""
    layers = getattr(config, "per_layer_config", None)
    if layers is None:
        return config
    unlike, found = {*(config.per_layer_attributes or ())} - {*OF_FAR}, dict[str, dict[str, int]]()
    for kind, layer in zip(config.layer_types, layers, strict=True):
        heads = {key: getattr(layer, key) for key in OF_FAR}
        unlike |= set() if found.setdefault(kind, heads) == heads else {*OF_FAR}
    if unlike:
        what = ", ".join(sorted(unlike))
        raise ValueError(f"per_layer_config has layers that differ in {what} beside their windows; give another model")
    near, far = found.get(SLIDING) or found[FULL], found.get(FULL) or found[SLIDING]
    return cast("Config", _WithHeads(config, {**near, **{OF_FAR[key]: value for key, value in far.items()}}))


class _WithHeads:
    """A config with other values for some of its keys."""

    def __init__(self, config: Config, heads: Mapping[str, int]) -> None:
        self._config, self._heads = config, heads

    def __getattr__(self, key: str) -> object:
        return self._heads[key] if key in self._heads else getattr(self._config, key)
