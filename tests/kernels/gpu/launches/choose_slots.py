"""A step's choice of slots: its index lies head by head, without gaps, and is read as keys and as values."""

from __future__ import annotations

import torch

from h2o_flexgen.formats.table import FORMATS
from h2o_flexgen.kernels.chosen_slots import Always
from h2o_flexgen.kernels.decode_attention import KVSlots
from h2o_flexgen.kernels.gpu.choose_slots import choose_slots
from h2o_flexgen.policies.recall import FIRST, INDEX, RECENT
from tests.kernels.gpu.launch import Launch


def launch(dtype: torch.dtype, shape: tuple[int, int, int], registers: int, widest: int) -> Launch:
    """`shape`: KV heads, queries of each, values of a head."""
    rows, (kv_heads, group, dim), slots = 8, shape, 543

    def call() -> None:
        width = FORMATS[INDEX].nbytes((dim,), dtype.itemsize)
        codes = torch.empty(rows, kv_heads, slots, width, dtype=torch.uint8, device="meta")
        q = torch.empty(rows, kv_heads, group, dim, dtype=dtype, device="meta")
        held = torch.empty(rows, dtype=torch.int64, device="meta")
        choose_slots(q, KVSlots(codes, INDEX), held, held, 60, Always(FIRST, RECENT))

    loads = {"attend_chunk_kernel": widest, "join_chunks_kernel": 16}
    narrowest = {"attend_chunk_kernel": 2, "join_chunks_kernel": 4}
    return Launch(f"{dtype}, {shape}", call, registers, loads, narrowest, kernels=2)


LAUNCHES = (
    launch(torch.float16, (56, 1, 128), 168, 8),  # of OPT-30B
    launch(torch.float16, (8, 4, 128), 255, 8),  # of Qwen3-8B
)
