"""SmolLM3: LLaMA of which some layers rotate nothing."""

from __future__ import annotations

from dataclasses import replace

from h2o_flexgen.checkpoints.stored_architecture import OF_LLAMA
from h2o_flexgen.models.config_values import Config, refuse_short, windows_by_kind
from h2o_flexgen.models.llama import UNROTATED, USUAL, AttentionFunctions, Decoder, Llama, Traits

EVERY = 4  # each last one of so many blocks rotates nothing, in all GGUF files


class SmolLM3(Decoder):
    gguf = replace(
        Llama.gguf,
        name="smollm3",
        tensors=OF_LLAMA,
        keys={"no_rope_layers": lambda said: [int((block + 1) % EVERY != 0) for block in range(said.blocks)]},
    )

    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        refuse_short(config, "no_rope_layers")
        super().__init__(config, dtype, sep_layer, name)

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return Traits(config.attention_bias, config.attention_bias, config.mlp_bias, windows=windows_by_kind(config))

    def attends_by(self, config: Config, block: int) -> AttentionFunctions:
        return USUAL if config.no_rope_layers[block] else UNROTATED
