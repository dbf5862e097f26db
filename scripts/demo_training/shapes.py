"""The demo models: three architectures, small enough to travel with the package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

POSITIONS = 1024


@dataclass(frozen=True)
class Shape:
    config: Callable[[int], PretrainedConfig]  # makes the config for a size of vocabulary
    model: type[PreTrainedModel]

    def build(self, vocab: int) -> PreTrainedModel:
        return self.model(self.config(vocab))


def _llama(vocab: int) -> PretrainedConfig:
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        rope_theta=100_000.0,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )


def _opt(vocab: int) -> PretrainedConfig:
    return OPTConfig(
        vocab_size=vocab,
        hidden_size=128,
        word_embed_proj_dim=128,
        ffn_dim=512,
        num_hidden_layers=5,
        num_attention_heads=4,
        max_position_embeddings=POSITIONS,
        dropout=0.0,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )


def _neox(vocab: int) -> PretrainedConfig:
    return GPTNeoXConfig(
        vocab_size=vocab,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=4,
        rotary_pct=0.5,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )


SHAPES: Mapping[str, Shape] = {
    "llama": Shape(_llama, LlamaForCausalLM),
    "opt": Shape(_opt, OPTForCausalLM),
    "neox": Shape(_neox, GPTNeoXForCausalLM),
}
