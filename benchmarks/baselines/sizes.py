"""Bytes that a request needs, from the headers of the checkpoint alone: nothing is loaded to learn that it does not fit."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.baselines.made_up import is_made_up, shapes_in
from benchmarks.baselines.request import Request
from h2o_flexgen.planning.workload_plan import largest

LAYER = re.compile(r".*?\.\d+\.")  # how the names of a layer's tensors begin
MOST_ROWS = 4096
OWN_BYTES = 1 << 30  # of a GPU: what its allocator cannot use, and what libraries for products work in
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def weight_bytes(request: Request) -> int:
    """Bytes of all tensors of the checkpoint in the requested dtype."""
    return tensor_elements(request) * ELEMENT_BYTES[request.dtype]


def tensor_elements(request: Request) -> int:
    return sum(math.prod(shape) for shape in tensor_shapes(request.checkpoint).values())


def part_bytes(request: Request) -> int:
    """Bytes of the largest part that is needed at once: a layer, or a tensor that belongs to none."""
    sizes = Counter[str]()
    for name, shape in tensor_shapes(request.checkpoint).items():
        layer = LAYER.match(name)
        sizes[layer[0] if layer else name] += math.prod(shape)
    return max(sizes.values()) * ELEMENT_BYTES[request.dtype]


def rows_beside(request: Request, weights: int) -> int:
    """The most rows that are expected to fit where a model of transformers computes, beside so many bytes of weights."""
    if request.device == "cuda" and request.device_bytes is not None:
        room = request.device_bytes
    else:
        room = request.host_bytes or psutil.virtual_memory().total
    return largest(lambda rows: weights + bytes_beside_weights(replace(request, rows=rows)) <= room, MOST_ROWS)


def bytes_beside_weights(request: Request) -> int:
    return kv_bytes(request) + activation_bytes(request) + OWN_BYTES


def activation_bytes(request: Request) -> int:
    """The most bytes at once in prefill: hidden states, queries, keys, values and feed-forward values, twice in passing."""
    config = config_of(request)
    hidden = config["hidden_size"]
    inner = config.get("intermediate_size") or config.get("ffn_dim") or 4 * hidden
    per_token = ELEMENT_BYTES[request.dtype] * (6 * hidden + 2 * inner)
    return 2 * request.rows * request.prompt_len * per_token


def tensor_shapes(checkpoint: str) -> dict[str, list[int]]:
    if is_made_up(checkpoint):
        return shapes_in(checkpoint)
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
