"""Attention of a step: heads with queries of their own and shared ones, plain and packed slots, with sums and without, and with
a cap."""

from __future__ import annotations

import torch

from h2o_flexgen.formats.kernel_table import MAX, SUM
from h2o_flexgen.formats.table import FORMATS
from h2o_flexgen.kernels.decode_attention import KVSlots
from h2o_flexgen.kernels.gpu.decode_attention import decode_attention
from tests.kernels.gpu.launch import Launch


def attended(
    format: str, dtype: torch.dtype, shape: tuple[int, int, int], slots: int, gathers: str | None, cap: float | None
) -> None:
    """Slots lie slot by slot, as beside an accelerator."""
    rows, (kv_heads, group, dim) = 8, shape
    width = FORMATS[format].nbytes((dim,), dtype.itemsize)
    kind = dtype if format == "plain" else torch.uint8
    image = torch.empty(slots, 2, rows, kv_heads, width // kind.itemsize, dtype=kind, device="meta").permute(1, 2, 3, 0, 4)
    q = torch.empty(rows, kv_heads, group, dim, dtype=dtype, device="meta")
    held = torch.empty(rows, dtype=torch.int64, device="meta")
    decode_attention(q, KVSlots(image[0], format), KVSlots(image[1], format), held, held, None, gathers, cap)


def launch(
    format: str,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    registers: int,
    widest: int,
    gathers: str | None = None,
    cap: float | None = None,
    is_rare: bool = False,
) -> Launch:
    """`shape`: KV heads, queries of each, values of a head. Slots of packed heads begin where rows of a codec end: so far apart
    can threads read."""

    def call() -> None:
        attended(format, dtype, shape, 543, gathers, cap)

    loads = {"attend_chunk_kernel": widest, "join_chunks_kernel": 16}
    name = f"{format}, {dtype}, {shape}, gathering {gathers}, cap {cap}"
    narrowest = {"attend_chunk_kernel": 2, "join_chunks_kernel": 4}
    return Launch(name, call, registers, loads, narrowest, kernels=2, is_rare=is_rare)


OWN, SHARED, NARROW = (56, 1, 128), (8, 8, 128), (12, 1, 64)  # of OPT-30B, of LLaMA-3-70B, of OPT-125m
CAPPED = (8, 2, 256)  # of Gemma-2-9B
LAUNCHES = (
    launch("plain", torch.float16, OWN, 104, 16, SUM),
    launch("group8", torch.float16, OWN, 168, 8, SUM),
    launch("group4", torch.float16, OWN, 144, 8, SUM),
    launch("group8", torch.float16, NARROW, 168, 4, is_rare=True),
    launch("group4", torch.float16, SHARED, 232, 8),  # registers of sm_75, which has no tensor cores for Triton
    launch("plain", torch.float32, (8, 4, 256), 255, 16, MAX, is_rare=True),
    launch("plain", torch.bfloat16, CAPPED, 255, 16, SUM, 50.0),
)
