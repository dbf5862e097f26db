"""A GGUF file of the architecture llama as a model of transformers, with the values that the package gguf decodes from it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.helpers.gguf_files import NAMES

IN_MODEL = {there: here for here, there in NAMES.items()}


def dequantised_model(file: Path) -> LlamaForCausalLM:
    """The model in float32. The head is the table of tokens where the file has no other."""
    reader = GGUFReader(file)
    config = LlamaConfig(
        vocab_size=len(reader.fields["tokenizer.ggml.tokens"].data),
        hidden_size=_said(reader, "embedding_length"),
        intermediate_size=_said(reader, "feed_forward_length"),
        num_hidden_layers=_said(reader, "block_count"),
        num_attention_heads=_said(reader, "attention.head_count"),
        num_key_value_heads=_said(reader, "attention.head_count_kv"),
        max_position_embeddings=_said(reader, "context_length"),
        rms_norm_eps=_said(reader, "attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": _said(reader, "rope.freq_base")},
    )
    values = dict(_values(reader, config))
    values.setdefault("lm_head.weight", values["model.embed_tokens.weight"])
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(values, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its frequencies are no part of the state
    return model.eval()


def _said(reader: GGUFReader, key: str) -> Any:
    return reader.fields[f"llama.{key}"].contents()


def _values(reader: GGUFReader, config: LlamaConfig) -> Iterator[tuple[str, Tensor]]:
    heads = {"self_attn.q_proj.weight": config.num_attention_heads, "self_attn.k_proj.weight": config.num_key_value_heads}
    for tensor in reader.tensors:
        name, value = name_in_model(tensor.name), torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        turned = next((number for end, number in heads.items() if name.endswith(end)), None)
        yield name, value if turned is None else _halves_apart(value, turned)


def _halves_apart(rows: Tensor, heads: int) -> Tensor:
    """The rows of queries or keys in transformers' order: in the file, those that are rotated together are neighbours."""
    return rows.view(heads, -1, 2, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)


def name_in_model(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("blk."):
        return f"{IN_MODEL[stem]}.{kind}"
    block, _, part = stem.removeprefix("blk.").partition(".")
    return f"model.layers.{block}.{IN_MODEL[part]}.{kind}"
