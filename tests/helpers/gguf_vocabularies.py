"""Tokenizers as GGUF files have them: the metadata that llama.cpp's converters write, and files with nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gguf import GGUFValueType, GGUFWriter, TokenType
from transformers import AutoTokenizer

PREFIX = "tokenizer.ggml."
BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]
SPACE = "▁"


def metadata_of_folder(folder: Path, rule: str) -> dict[str, Any]:
    """The byte-level tokenizer of a model folder. `rule` is llama.cpp's name of how it cuts texts into words."""
    values = json.loads((folder / "tokenizer.json").read_text())
    model, added = values["model"], {token["id"]: token for token in values["added_tokens"]}
    texts = {token: text for text, token in model["vocab"].items()} | {token: one["content"] for token, one in added.items()}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    types = dict.fromkeys(texts, TokenType.NORMAL)
    types |= {token: TokenType.CONTROL if one["special"] else TokenType.USER_DEFINED for token, one in added.items()}
    made = {
        "model": "gpt2",
        "pre": rule,
        "tokens": [texts[token] for token in range(len(texts))],
        "token_type": [int(types[token]) for token in range(len(texts))],
        "merges": [" ".join(merge) for merge in model["merges"]],
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "add_bos_token": tokenizer("").input_ids == [tokenizer.bos_token_id],
    }
    return {PREFIX + key: value for key, value in made.items()}


def metadata_of_pieces(scores: Mapping[str, float], user_defined: Sequence[str] = (), **changes: Any) -> dict[str, Any]:
    """A tokenizer of SentencePiece's with these pieces; all bytes are tokens too."""
    specials = {"<unk>": TokenType.UNKNOWN, "<s>": TokenType.CONTROL, "</s>": TokenType.CONTROL}
    types = {**specials, **dict.fromkeys(BYTE_PIECES, TokenType.BYTE), **dict.fromkeys(scores, TokenType.NORMAL)}
    types |= dict.fromkeys(user_defined, TokenType.USER_DEFINED)
    made = {
        "model": "llama",
        "pre": "default",
        "tokens": list(types),
        "token_type": [int(kind) for kind in types.values()],
        "scores": [float(scores.get(text, 0)) for text in types],
    }
    return {PREFIX + key: value for key, value in {**made, **changes}.items()}


def save_metadata(file: Path, values: Mapping[str, Any]) -> Path:
    """A file with this metadata and no tensors."""
    writer = GGUFWriter(file, "llama")
    for key, value in values.items():
        writer.add_key_value(key, value, GGUFValueType.get_type(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
