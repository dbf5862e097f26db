"""Command R (Cohere), and Command R7B and A (Cohere 2): attention and mlp stand side by side behind one norm, neighbours are
rotated together, and logits are scaled. In the first, heads may be normalised; in the second, layers without a window rotate
nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from h2o_flexgen.checkpoints.stored_architecture import (
    ATTENTION,
    FIRST_NORM,
    HEAD_NORMS,
    LAYER_EPS,
    LOGIT_SCALE,
    MLP,
    GgufArchitecture,
    biases,
    weights,
)
from h2o_flexgen.models.config_values import FACTOR, SLIDING, Bounds, Config, kinds_in, windows_by_kind
from h2o_flexgen.models.llama import LAYER_UNBIASED, ONE_BEFORE, UNROTATED, USUAL, AttentionFunctions, Decoder, Traits


class Cohere(Decoder):
    bounds: ClassVar[Bounds] = {"logit_scale": FACTOR}
    gguf = GgufArchitecture(
        "command-r",
        {**weights(ATTENTION, MLP, FIRST_NORM, HEAD_NORMS), **biases(ATTENTION)},
        keys={
            "layer_norm_eps": lambda said: said.number(LAYER_EPS),
            "logit_scale": lambda said: said.number(LOGIT_SCALE, 0.0) or 1.0,
            "use_qk_norm": lambda said: "blk.0.attn_q_norm.weight" in said.tensors,
        },
        heeds={LOGIT_SCALE: None},
    )
    rotates_neighbours = True

    @staticmethod
    def traits_of(config: Config) -> Traits:
        has_norms = bool(getattr(config, "use_qk_norm", False))
        return Traits(
            config.attention_bias,
            config.attention_bias,
            norm=LAYER_UNBIASED,
            norms=ONE_BEFORE,
            is_parallel=True,
            head_norm=has_norms,
            own_norms=has_norms,
            logit_scale=config.logit_scale,
        )

    @staticmethod
    def eps_of(config: Config) -> float:
        eps: float = config.layer_norm_eps
        return eps


class Cohere2(Cohere):
    gguf = replace(
        Cohere.gguf,
        name="cohere2",
        tensors={**weights(ATTENTION, MLP, FIRST_NORM), **biases(ATTENTION)},
        keys={**Cohere.gguf.keys, "use_qk_norm": lambda said: False, "layer_types": lambda said: kinds_in(said, 4)},
    )

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return replace(Cohere.traits_of(config), head_norm=False, own_norms=False, windows=windows_by_kind(config))

    def attends_by(self, config: Config, block: int) -> AttentionFunctions:
        return USUAL if config.layer_types[block] == SLIDING else UNROTATED
