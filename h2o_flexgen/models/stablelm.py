"""StableLM: LLaMA with norms by mean and variance, where a part of each head is rotated. Attention and mlp stand side by side,
or one after the other."""

from __future__ import annotations

from h2o_flexgen.checkpoints.stored_architecture import (
    BIAS_OF_LAST_NORM,
    LAYER_EPS,
    NORMS,
    OF_LLAMA,
    QKV,
    GgufArchitecture,
    biases,
)
from h2o_flexgen.models.config_values import Config, refuse_other_heads
from h2o_flexgen.models.llama import BEFORE, LAYER, ONE_BEFORE, Decoder, Traits


class StableLM(Decoder):
    rotates_parts = True
    gguf = GgufArchitecture(
        "stablelm",
        {**OF_LLAMA, **biases(QKV, NORMS)},
        keys={
            "layer_norm_eps": lambda said: said.number(LAYER_EPS),
            "use_parallel_residual": lambda said: "blk.0.ffn_norm.weight" not in said.tensors,
            "use_qkv_bias": lambda said: "blk.0.attn_q.bias" in said.tensors,
            "qk_layernorm": lambda said: "blk.0.attn_q_norm.weight" in said.tensors,
        },
        rotates_parts=True,
        outside=BIAS_OF_LAST_NORM,
    )

    @staticmethod
    def traits_of(config: Config) -> Traits:
        refuse_other_heads(config)
        if config.qk_layernorm:
            raise ValueError("qk_layernorm is True: heads with norms of their own are not supported; give another model")
        is_parallel = bool(config.use_parallel_residual)
        norms = ONE_BEFORE if is_parallel else BEFORE
        return Traits(bool(config.use_qkv_bias), norm=LAYER, norms=norms, is_parallel=is_parallel)

    @staticmethod
    def eps_of(config: Config) -> float:
        eps: float = config.layer_norm_eps
        return eps
