"""Seed-OSS: LLaMA of which queries, keys and values have biases, and the outcome of attention another setting for its own."""

from __future__ import annotations

from h2o_flexgen.checkpoints.stored_architecture import ATTENTION, MLP, NORMS_BY_PLACE, GgufArchitecture, biases, weights
from h2o_flexgen.models.config_values import Config
from h2o_flexgen.models.llama import Decoder, Traits


class SeedOss(Decoder):
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
