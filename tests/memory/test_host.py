"""Host memory: page-aligned regions, reused when they are free, counted to the byte."""

from __future__ import annotations

import mmap
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as draw

from h2o_flexgen.memory.host import HostTier
from h2o_flexgen.memory.tier import ALIGNMENT


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 1 << 20])
def test_a_region_starts_at_a_page_and_is_a_whole_number_of_them(nbytes: int) -> None:
    tier = HostTier()
    region = tier.alloc(nbytes)
    assert region.data_ptr() % ALIGNMENT == 0
    assert nbytes <= region.nbytes < nbytes + 2 * ALIGNMENT and region.nbytes % ALIGNMENT == 0
    assert tier.meter.used_bytes == region.nbytes
    assert not region.any(), "fresh memory is zeroed"


def test_what_was_freed_is_used_again_and_the_smallest_that_fits() -> None:
    tier = HostTier()
    small, large = tier.alloc(4096), tier.alloc(40_960)
    places = {small.data_ptr(), large.data_ptr()}
    tier.free(large)
    tier.free(small)
    assert tier.alloc(100).data_ptr() == small.data_ptr()
    assert tier.alloc(100).data_ptr() == large.data_ptr()
    assert tier.alloc(100).data_ptr() not in places
    assert tier.meter.used_bytes == 4096 + 40_960 + 4096


def test_trimmed_memory_is_no_longer_held() -> None:
    tier = HostTier()
    kept, freed = tier.alloc(8192), tier.alloc(1 << 20)
    tier.free(freed)
    assert tier.meter.used_bytes == 8192 + (1 << 20), "kept for reuse is held all the same"
    tier.trim()
    assert tier.meter.used_bytes == kept.nbytes
    assert tier.meter.peak_bytes == 8192 + (1 << 20)
    tier.meter.restart_peak()
    assert tier.meter.peak_bytes == kept.nbytes


@settings(max_examples=50, deadline=None)
@given(draw.lists(draw.tuples(draw.booleans(), draw.integers(0, 50_000)), max_size=30))
def test_regions_in_use_never_overlap(steps: list[tuple[bool, int]]) -> None:
    tier, used = HostTier(), list[torch.Tensor]()
    for free, nbytes in steps:
        if free and used:
            tier.free(used.pop(nbytes % len(used)))
        else:
            used.append(tier.alloc(nbytes))
            used[-1].fill_(len(used) % 256)
        spans = sorted((region.data_ptr(), region.data_ptr() + region.nbytes) for region in used)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert sum(region.nbytes for region in used) <= tier.meter.used_bytes <= tier.meter.peak_bytes


def test_memory_that_cannot_be_had_is_told_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> object:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    tier = HostTier()
    with pytest.raises(MemoryError, match=r"host memory: 3\.00 GB could not be had .*; lower the CPU share"):
        tier.alloc(3_000_000_000)
    assert tier.meter.used_bytes == 0
    assert mmap.PAGESIZE <= ALIGNMENT


@pytest.mark.cuda
def test_pinned_memory_can_be_copied_without_waiting() -> None:
    tier = HostTier(pinned=True)
    region = tier.alloc(1 << 20)
    assert region.is_pinned()
    tier.free(region)
    tier.trim()
    assert tier.meter.used_bytes == 0


FREEING = """
import psutil, torch
from h2o_flexgen.memory.host import give_back_freed
rss = lambda: psutil.Process().memory_info().rss
before = rss()
blocks = [torch.ones(30_000) for _ in range(1000)]  # 120 kB each, below the size from which memory is mapped
held, stays = rss(), torch.ones(30_000)
del blocks
give_back_freed()
print(held - before, rss() - before, int(stays.sum()))
"""


def test_what_was_freed_goes_back_to_the_system() -> None:
    """Of blocks that are too small to be mapped, below one that stays. In a process where nothing was freed before."""
    run = subprocess.run([sys.executable, "-c", FREEING], capture_output=True, text=True, check=True)
    held, left, kept = map(int, run.stdout.split())
    assert held > 100e6 and left < 30e6 and kept == 30_000
