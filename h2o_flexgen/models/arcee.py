"""Arcee's AFM and Apertus: LLaMA with an mlp without a gate. The activation of the second has numbers that are learned, and its
heads are normalised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from h2o_flexgen.checkpoints.stored_architecture import (
    ATTENTION,
    HEAD_NORMS,
    NORMS,
    UNGATED_MLP,
    GgufArchitecture,
    biases,
    weights,
)
from h2o_flexgen.core.allowed_values import EOS
from h2o_flexgen.kernels.operations import xielu
from h2o_flexgen.models import layout, tensor_ops
from h2o_flexgen.models.base import Weights
from h2o_flexgen.models.config_values import Config
from h2o_flexgen.models.layout import Parameters
from h2o_flexgen.models.llama import Decoder, Llama, MlpNames, Traits
from h2o_flexgen.models.whole_configs import DECODERS, OFF, TEXT, Usual, end_of_text

ACTIVATION = "mlp.act_fn"
NUMBERS = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}  # of the activation, and their shapes


class Arcee(Decoder):
    usual: ClassVar[Mapping[str, Usual]] = {
        **DECODERS,
        "hidden_act": Usual("relu2", TEXT),
        "rms_norm_eps": Usual(1e-5, (float,)),
        "attention_bias": OFF,
        "mlp_bias": OFF,
        EOS: end_of_text(128001),
    }
    gguf = replace(
        Llama.gguf,
        name="arcee",
        tensors={**weights(ATTENTION, UNGATED_MLP, NORMS), **biases(ATTENTION, UNGATED_MLP)},
        keys={"hidden_act": lambda said: "relu2"},
    )

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return Traits(config.attention_bias, config.attention_bias, config.mlp_bias, gated=False)


class Apertus(Decoder):
    patterns: ClassVar[Mapping[str, str]] = {
        r"\.attention_layernorm\.": ".input_layernorm.",
        r"\.feedforward_layernorm\.": ".post_attention_layernorm.",
    }
    gguf = GgufArchitecture(
        "apertus",
        {**weights(ATTENTION, UNGATED_MLP, NORMS, HEAD_NORMS), **biases(ATTENTION)},
        keys={"hidden_act": lambda said: "xielu"},
        has_divisors=True,
        numbers={f"xielu.{name}": (f"{ACTIVATION}.{name}", shape) for name, shape in NUMBERS.items()},
    )

    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        self._is_learned = config.hidden_act == "xielu"
        super().__init__(config, dtype, sep_layer, name)

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return Traits(config.attention_bias, config.attention_bias, gated=False, head_norm=True)

    @staticmethod
    def activation_of(config: Config) -> str:
        return "relu" if config.hidden_act == "xielu" else Decoder.activation_of(config)  # which is done by `gated`

    def mlp_parameters(self, width: int, inner: int) -> Parameters:
        numbers = [layout.wide(f"{ACTIVATION}.{name}", *shape) for name, shape in NUMBERS.items()] if self._is_learned else []
        return layout.joined(super().mlp_parameters(width, inner), *numbers)

    def gated(self, x: Tensor, weights: Weights, names: MlpNames) -> Tensor:
        if not self._is_learned:
            return super().gated(x, weights, names)
        numbers = (tensor_ops.needed(weights, f"{ACTIVATION}.{name}") for name in NUMBERS)
        return tensor_ops.linear(xielu(tensor_ops.linear(x, weights, names.up), *numbers), weights, names.down)
