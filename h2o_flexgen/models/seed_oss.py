"""Seed-OSS: LLaMA of which queries, keys and values have biases, and the outcome of attention another setting for its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from h2o_flexgen.checkpoints.stored_architecture import ATTENTION, MLP, NORMS_BY_PLACE, GgufArchitecture, biases, weights
from h2o_flexgen.core.allowed_values import EOS
from h2o_flexgen.models.config_values import Config
from h2o_flexgen.models.llama import Decoder, Traits
from h2o_flexgen.models.whole_configs import COUNT, DECODERS, OFF, ON, Usual, end_of_text


class SeedOss(Decoder):
    usual: ClassVar[Mapping[str, Usual]] = {
        **DECODERS,
        "num_key_value_heads": Usual(8, COUNT),
        "head_dim": Usual(128, COUNT),
        "attention_bias": ON,
        "attention_out_bias": OFF,
        "mlp_bias": OFF,
        EOS: end_of_text(2),
    }
    gguf = GgufArchitecture(
        "seed_oss",
        {**weights(ATTENTION, MLP, NORMS_BY_PLACE), **biases(ATTENTION, MLP)},
        keys={
            "attention_bias": lambda said: "blk.0.attn_q.bias" in said.tensors,
            "attention_out_bias": lambda said: "blk.0.attn_output.bias" in said.tensors,
        },
    )

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return Traits(config.attention_bias, config.attention_out_bias, config.mlp_bias)
