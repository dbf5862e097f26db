"""EXAONE 4: LLaMA with norms behind attention and mlp, and with normalised heads. Where some layers have a window, the others
rotate nothing."""

from __future__ import annotations

from h2o_flexgen.checkpoints.stored_architecture import (
    ATTENTION,
    BEHIND_BOTH,
    HEAD_NORMS,
    MLP,
    WINDOW,
    GgufArchitecture,
    weights,
)
from h2o_flexgen.models.config_values import FULL, SLIDING, Config, kinds_in, windows_by_kind
from h2o_flexgen.models.llama import BEHIND, UNROTATED, USUAL, AttentionFunctions, Decoder, Traits


class Exaone4(Decoder):
    gguf = GgufArchitecture(
        "exaone4",
        weights(ATTENTION, MLP, BEHIND_BOTH, HEAD_NORMS),
        keys={"layer_types": lambda said: kinds_in(said, 4) if said.whole(WINDOW, 0) else [FULL] * said.blocks},
        has_divisors=True,
    )

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return Traits(norms=BEHIND, head_norm=True, windows=windows_by_kind(config))

    def attends_by(self, config: Config, block: int) -> AttentionFunctions:
        return USUAL if config.sliding_window is None or config.layer_types[block] == SLIDING else UNROTATED
