"""Sizes for profiles of a second."""

from __future__ import annotations

from h2o_flexgen.profiling.bench import ProfileSizes

TINY = ProfileSizes(
    budget_seconds=1e6,
    rounds=1,
    seconds=0.0,
    disk_seconds=0.0,
    disk_bytes=1 << 20,
    pool_bytes=1 << 17,
    copied_bytes=1 << 16,
    side=64,
    rows=(1, 8, 32),
    heads=4,
    head_dim=16,
    kv_rows=2,
    slots=16,
    prompt_len=16,
    prompt_tokens=32,
    width=64,
    steps=3,
)
