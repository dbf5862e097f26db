"""Attention over a text that 64 rows share, also with a cap."""

from __future__ import annotations

import torch

from h2o_flexgen.formats.table import FORMATS
from h2o_flexgen.kernels.decode_attention import KVSlots
from h2o_flexgen.kernels.gpu.shared_attention import shared_attention
from tests.kernels.gpu.launch import Launch


def launch(
    format: str,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    registers: int,
    widest: int,
    cap: float | None = None,
    is_rare: bool = False,
) -> Launch:
    """`shape`: KV heads, queries of each, values of a head."""
    kv_heads, group, dim = shape
    kind = dtype if format == "plain" else torch.uint8
    width = FORMATS[format].nbytes((dim,), dtype.itemsize) // kind.itemsize

    def call() -> None:
        keys, values = torch.empty(800, 2, kv_heads, width, dtype=kind, device="meta").permute(1, 2, 0, 3)
        q = torch.empty(64, kv_heads * group, dim, dtype=dtype, device="meta")
        shared_attention(q, KVSlots(keys, format), KVSlots(values, format), cap)

    loads, narrowest = {"attend_text_kernel": widest, "join_text_kernel": 16}, {"attend_text_kernel": 2, "join_text_kernel": 4}
    return Launch(f"{format}, {dtype}, {shape}, cap {cap}", call, registers, loads, narrowest, is_rare=is_rare)


LAUNCHES = (
    launch("group4", torch.float16, (32, 1, 128), 248, 8),
    launch("plain", torch.float32, (8, 4, 256), 255, 16, is_rare=True),
    launch("plain", torch.bfloat16, (8, 2, 256), 255, 16, 50.0),
)
