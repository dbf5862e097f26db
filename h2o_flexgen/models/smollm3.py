"""SmolLM3: LLaMA of which some layers rotate nothing."""

from __future__ import annotations

from dataclasses import replace

from h2o_flexgen.checkpoints.stored_architecture import OF_LLAMA
from h2o_flexgen.models.config_values import Config
from h2o_flexgen.models.llama import UNROTATED, USUAL, AttentionFunctions, Decoder, Llama, Traits
from h2o_flexgen.models.windows import windows_by_kind

EVERY = 4  # each last one of so many blocks rotates nothing, in all GGUF files


class SmolLM3(Decoder):
    gguf = replace(
        Llama.gguf,
        name="smollm3",
        tensors=OF_LLAMA,
        keys={"no_rope_layers": lambda said: [int((block + 1) % EVERY != 0) for block in range(said.blocks)]},
    )

    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        if len(config.no_rope_layers) < config.num_hidden_layers:
            blocks = f"{config.num_hidden_layers} blocks"
            raise ValueError(f"no_rope_layers has {len(config.no_rope_layers)} entries for {blocks}; download the model again")
        super().__init__(config, dtype, sep_layer, name)

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return Traits(config.attention_bias, config.attention_bias, config.mlp_bias, windows=windows_by_kind(config))

    def attends_by(self, config: Config, block: int) -> AttentionFunctions:
        return USUAL if config.no_rope_layers[block] else UNROTATED
