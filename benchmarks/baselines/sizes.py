"""Bytes that a request needs, from the headers of the checkpoint alone: nothing is loaded to learn that it does not fit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from benchmarks.baselines.request import Request

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def weight_bytes(request: Request) -> int:
    """Bytes of all tensors of the checkpoint in the requested dtype."""
    return tensor_elements(request) * ELEMENT_BYTES[request.dtype]


def tensor_elements(request: Request) -> int:
    return sum(math.prod(shape) for shape in tensor_shapes(request.checkpoint).values())


def tensor_shapes(checkpoint: str) -> dict[str, list[int]]:
    files = sorted(Path(checkpoint).glob("*.safetensors"))
    if not files:
        raise ValueError(f"{checkpoint} has no safetensors: peers read nothing else, convert it first")
    return {name: entry["shape"] for file in files for name, entry in _header(file).items() if name != "__metadata__"}


def config_of(request: Request) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((Path(request.checkpoint) / "config.json").read_text(encoding="utf-8"))
    return content


def kv_bytes(request: Request) -> int:
    """Bytes of the KV of all rows at their longest, in a cache without a window."""
    config = config_of(request)
    heads = config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    per_token = 2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * head_size
    return request.rows * request.last * per_token * ELEMENT_BYTES[request.dtype]


def _header(file: Path) -> dict[str, Any]:
    """Safetensors begin with the length of their header, eight bytes, and the header, which is JSON."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header: dict[str, Any] = json.loads(opened.read(length))
    return header
