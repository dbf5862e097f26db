"""ERNIE 4.5 without experts: LLaMA in which neighbours are rotated together."""

from __future__ import annotations

from h2o_flexgen.checkpoints.stored_architecture import ATTENTION, MLP, OF_LLAMA, GgufArchitecture, biases
from h2o_flexgen.models.config_values import Config
from h2o_flexgen.models.llama import Decoder, Traits


class Ernie(Decoder):
    rotates_neighbours = True
    gguf = GgufArchitecture(
        "ernie4_5",
        {**OF_LLAMA, **biases(ATTENTION, MLP)},
        keys={"use_bias": lambda said: "blk.0.attn_q.bias" in said.tensors},
        is_interleaved=True,
    )

    @staticmethod
    def traits_of(config: Config) -> Traits:
        has_bias = bool(config.use_bias)
        return Traits(has_bias, has_bias, has_bias)
