"""GLM-4.7-Flash: DeepSeek-V3 with a list of which blocks have experts."""

from __future__ import annotations

from typing import ClassVar

from h2o_flexgen.models.config_values import Bounds, Config
from h2o_flexgen.models.deepseek import DeepSeekV3

SPARSE = "sparse"


class GlmMoeLite(DeepSeekV3):
    gguf = None  # its files have the name of DeepSeek's, and are read as such
    bounds: ClassVar[Bounds] = {key: bound for key, bound in DeepSeekV3.bounds.items() if key != "first_k_dense_replace"}

    @staticmethod
    def has_experts(config: Config, block: int) -> bool:
        kinds, blocks = config.mlp_layer_types, config.num_hidden_layers
        if len(kinds) < blocks:
            raise ValueError(f"mlp_layer_types has {len(kinds)} entries for {blocks} blocks; download the model again")
        return bool(kinds[block] == SPARSE)
