"""Gemma 1 to 3: LLaMA with norms that count from one, and an embedding that is scaled. From the second on there are norms
before and behind attention and mlp. Scores and logits of the second have caps; in the third heads are normalised, and layers
with a window have a rotation of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import NoneType
from typing import Any, ClassVar

import torch

from h2o_flexgen.checkpoints.stored_architecture import (
    ATTENTION,
    ATTENTION_CAP,
    BEHIND_BOTH,
    FIRST_NORM,
    HEAD_NORMS,
    LOGIT_CAP,
    MLP,
    NEAR_THETA,
    OF_LLAMA,
    WINDOW,
    GgufArchitecture,
    GgufModel,
    Said,
    weights,
)
from h2o_flexgen.core.allowed_values import EOS
from h2o_flexgen.core.model_spec import MOST_WIDTH
from h2o_flexgen.models.config_values import FULL, SLIDING, SOFTCAP, Bounds, Config, Whole, kinds_in, windows_by_kind
from h2o_flexgen.models.llama import RMS_FROM_ONE, RMS_WIDE, Decoder, NearRotated, NormPlaces, Traits, head_width
from h2o_flexgen.models.whole_configs import COUNT, DECODERS, OFF, ON, SEVERAL, TEXT, Usual, end_of_text

AROUND = NormPlaces(
    behind_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    behind_mlp="post_feedforward_layernorm",
)
ACTIVATION = "gelu_pytorch_tanh"
BLOCKS_OF_27B = {"gemma2": 46, "gemma3": 62}  # scores of these are scaled otherwise, which no file says


def _score_width(said: GgufModel) -> int:
    width, heads = said.whole("embedding_length"), max(said.whole("attention.head_count"), 1)
    is_27b = said.blocks == BLOCKS_OF_27B[said.architecture.name]
    return width // heads if is_27b else said.whole("attention.key_length", width // heads)


KEYS: Mapping[str, Said] = {  # of the second and the third
    "hidden_activation": lambda said: ACTIVATION,
    "norms_are_whole": lambda said: True,
    "query_pre_attn_scalar": _score_width,
    "final_logit_softcapping": lambda said: said.number(LOGIT_CAP, 0.0) or None,
}
TENSORS = weights(ATTENTION, MLP, FIRST_NORM, BEHIND_BOTH, {"ffn_norm": AROUND.before_mlp or ""})


USUAL: Mapping[str, Usual] = {
    **DECODERS,
    "num_key_value_heads": Usual(16, (int,)),
    "head_dim": Usual(256, (int,)),
    "hidden_act": Usual(ACTIVATION, TEXT, only=(ACTIVATION,)),  # another name of an older release means it, too
    "tie_word_embeddings": ON,
    "attention_bias": OFF,
    EOS: end_of_text(1),
}
CAP = (float, NoneType)


def _every_second(values: Mapping[str, Any]) -> list[str]:
    return [FULL if block % 2 else SLIDING for block in range(values["num_hidden_layers"])]


class Gemma(Decoder):
    """The first, and what all have in common."""

    usual: ClassVar[Mapping[str, Usual]] = USUAL
    gguf: ClassVar[GgufArchitecture | None] = GgufArchitecture(
        "gemma", OF_LLAMA, keys={"hidden_act": lambda said: ACTIVATION, "norms_are_whole": lambda said: True}
    )

    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        if getattr(config, "use_bidirectional_attention", False) in (True, "all"):
            raise ValueError("use_bidirectional_attention is set, but tokens are made one after the other; take another model")
        super().__init__(config, dtype, sep_layer, name)
        rounded = torch.tensor(self._traits.embedding_scale, dtype=getattr(torch, dtype))  # as the model was trained with
        self._embedding_scale = float(rounded)

    @staticmethod
    def traits_of(config: Config) -> Traits:
        norm = RMS_WIDE if getattr(config, "norms_are_whole", False) else RMS_FROM_ONE  # the first in GGUF files alone
        return Traits(config.attention_bias, config.attention_bias, norm=norm, embedding_scale=config.hidden_size**0.5)


class Gemma2(Gemma):
    usual: ClassVar[Mapping[str, Usual]] = {
        **{key: one for key, one in USUAL.items() if key != "hidden_act"},
        "hidden_activation": Usual(ACTIVATION, TEXT),
        "num_key_value_heads": Usual(4, (int,)),
        "query_pre_attn_scalar": Usual(256, (int,)),
        "sliding_window": Usual(4096, COUNT),
        "layer_types": Usual(None, SEVERAL, follows=_every_second),
        "final_logit_softcapping": Usual(30.0, CAP),
        "attn_logit_softcapping": Usual(50.0, CAP),
    }
    bounds: ClassVar[Bounds] = {
        "query_pre_attn_scalar": Whole(MOST_WIDTH),
        "final_logit_softcapping": SOFTCAP,
        "attn_logit_softcapping": SOFTCAP,
    }
    gguf = GgufArchitecture(
        "gemma2",
        TENSORS,
        keys={
            **KEYS,
            "attn_logit_softcapping": lambda said: said.number(ATTENTION_CAP, 0.0) or None,
            "sliding_window": lambda said: said.whole(WINDOW, 4096),
            "layer_types": lambda said: kinds_in(said, 2),
        },
        heeds=dict.fromkeys((ATTENTION_CAP, LOGIT_CAP)),
    )

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return replace(around(config), attention_cap=config.attn_logit_softcapping)

    @staticmethod
    def activation_of(config: Config) -> str:
        name: str = config.hidden_activation
        return name


class Gemma3(NearRotated, Gemma2):
    usual: ClassVar[Mapping[str, Usual]] = {}  # its layers have two rotations, which transformers reads
    gguf = GgufArchitecture(
        "gemma3",
        {**TENSORS, **weights(HEAD_NORMS)},
        keys={**KEYS, "layer_types": lambda said: kinds_in(said, 6) if said.has(WINDOW) else [FULL] * said.blocks},
        heeds=dict.fromkeys((LOGIT_CAP, NEAR_THETA)),
        near_rope=lambda said: {"rope_type": "default", "rope_theta": said.number(NEAR_THETA, 10000.0)},
    )

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return replace(around(config), head_norm=True)  # it has a word for a cap of scores, and no use


def around(config: Config) -> Traits:
    return replace(
        Gemma.traits_of(config),
        norms=AROUND,
        windows=windows_by_kind(config),
        query_scale=math.sqrt(head_width(config) / config.query_pre_attn_scalar),
        logit_cap=getattr(config, "final_logit_softcapping", None),
    )
