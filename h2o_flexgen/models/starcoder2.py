"""StarCoder2: LLaMA with biases, norms by mean and variance, and an mlp without a gate. All layers may have a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from h2o_flexgen.checkpoints.stored_architecture import (
    ATTENTION,
    BIAS_OF_LAST_NORM,
    LAYER_EPS,
    NORMS,
    UNGATED_MLP,
    GgufArchitecture,
    biases,
    weights,
)
from h2o_flexgen.core.allowed_values import EOS
from h2o_flexgen.models.config_values import Bounds, Config, Number, same_windows
from h2o_flexgen.models.llama import LAYER, Decoder, Traits
from h2o_flexgen.models.whole_configs import COUNT, DECODERS, ON, TEXT, Usual, end_of_text


class Starcoder2(Decoder):
    usual: ClassVar[Mapping[str, Usual]] = {
        **{key: one for key, one in DECODERS.items() if key != "rms_norm_eps"},
        "num_key_value_heads": Usual(2, (int,)),
        "hidden_act": Usual("gelu_pytorch_tanh", TEXT),
        "norm_epsilon": Usual(1e-5, (float,)),
        "sliding_window": Usual(None, COUNT),
        "use_bias": ON,
        "tie_word_embeddings": ON,
        EOS: end_of_text(50256),
    }
    bounds: ClassVar[Bounds] = {"norm_epsilon": Number(0.0, 1.0)}
    patterns: ClassVar[Mapping[str, str]] = {r"\.mlp\.c_fc\.": ".mlp.up_proj.", r"\.mlp\.c_proj\.": ".mlp.down_proj."}
    gguf = GgufArchitecture(
        "starcoder2",
        {**weights(ATTENTION, UNGATED_MLP, NORMS), **biases(ATTENTION, UNGATED_MLP, NORMS)},
        keys={
            "norm_epsilon": lambda said: said.number(LAYER_EPS),
            "hidden_act": lambda said: "gelu_pytorch_tanh",
            "use_bias": lambda said: "blk.0.attn_q.bias" in said.tensors,
        },
        outside=BIAS_OF_LAST_NORM,
    )

    @staticmethod
    def traits_of(config: Config) -> Traits:
        has_bias = bool(config.use_bias)
        return Traits(has_bias, has_bias, has_bias, gated=False, norm=LAYER, windows=same_windows(config))

    @staticmethod
    def eps_of(config: Config) -> float:
        eps: float = config.norm_epsilon
        return eps
