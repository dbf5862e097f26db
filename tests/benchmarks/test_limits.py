"""The machine's limit, and what it means for a pass over a model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.comparison.checkpoint import spec_of
from benchmarks.comparison.suites import Load
from benchmarks.limits import Limits, PassLimit
from benchmarks.peaks import Peaks

PEAKS = Peaks(fp32=100e9, integer=400e9, bf16=200e9, integer_of_4_bits=None)
LIMITS = Limits(10e9, PEAKS)


def test_a_limit_is_the_longer_of_reading_and_computing() -> None:
    assert LIMITS.seconds(10**9, 10**9, "fp32") == 0.1 and LIMITS.seconds(10**9, 10**12, "fp32") == 10.0
    assert LIMITS.seconds(10**9, 10**12, "exact") == 5.0
    assert LIMITS.seconds(10**9, 10**12, "integer") == 2.5


def test_the_best_of_several_limits_counts() -> None:
    other = Limits(5e9, Peaks(fp32=150e9, integer=300e9, bf16=200e9, integer_of_4_bits=None))
    assert LIMITS.at_best(other) == Limits(10e9, replace(PEAKS, fp32=150e9))
    assert str(LIMITS).startswith("reading 10.0 GB/s, fp32 100 Gop/s, bf16 200 Gop/s")


def test_a_step_reads_the_weights_once_and_the_kv_of_every_row() -> None:
    spec, load = spec_of("facebook/opt-1.3b", "bfloat16"), Load(100, 21)
    read = spec.weight_bytes - spec.tensors["model.decoder.embed_positions.weight"].nbytes
    kv = 110 * spec.kv_bytes_per_slot * len(spec.kv_layers)
    slow = PassLimit(spec, "integer", replace(LIMITS, read_per_s=1e6))
    for rows in (1, 4):
        assert slow.step_tokens_per_s(rows, load) == pytest.approx(rows * 1e6 / (read + rows * kv))
        assert slow.prompt_tokens_per_s(rows, load) == pytest.approx(rows * 100 * 1e6 / read)


def test_many_tokens_are_bounded_by_arithmetic() -> None:
    spec, load = spec_of("facebook/opt-1.3b", "bfloat16"), Load(100, 21)
    exact, rounded = (PassLimit(spec, kind, replace(LIMITS, read_per_s=1e15)) for kind in ("exact", "integer"))
    assert rounded.prompt_tokens_per_s(8, load) == pytest.approx(2 * exact.prompt_tokens_per_s(8, load))
    flops = sum(spec.flops(layer, 8, 100, 50) for layer in range(len(spec.layers)))
    assert exact.prompt_tokens_per_s(8, load) == pytest.approx(800 * 200e9 / flops)
