"""Host memory: page-aligned regions, reused when they are free, counted to the byte."""

from __future__ import annotations

import mmap
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as draw

from h2o_flexgen.core.buffer_layout import ALIGNMENT
from h2o_flexgen.memory import host
from h2o_flexgen.memory.device import open_device
from h2o_flexgen.memory.host import HostTier, peak_resident_bytes


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


def test_the_peak_of_a_process_stays_when_memory_is_given_back() -> None:
    held = bytearray(b"1") * 300_000_000
    before = peak_resident_bytes()
    assert before > 300_000_000
    del held
    assert peak_resident_bytes() >= before - 10_000_000


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

    monkeypatch.setattr(host, "Pages", refuse)
    tier = HostTier()
    with pytest.raises(MemoryError, match=r"CPU memory: 3\.00 GB could not be allocated .*; lower the CPU share"):
        tier.alloc(3_000_000_000)
    assert tier.meter.used_bytes == 0
    assert mmap.PAGESIZE <= ALIGNMENT


def control_group(folder: Path, limit: str, used: str, names: tuple[str, str]) -> None:
    folder.mkdir(parents=True)
    for name, value in zip(names, (limit, used)):
        (folder / name).write_text(value)
    (folder / "memory.stat").write_text("cache 999\nactive_file 3000\ninactive_file 2000\n")


@pytest.mark.parametrize(
    ("line", "top", "names"),
    [
        ("0::/user/own.scope", ".", ("memory.max", "memory.current")),
        ("4:memory:/user/own.scope", "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    ],
)
def test_the_control_groups_of_this_process_limit_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, top: str, names: tuple[str, str]
) -> None:
    """The tightest of its own and those above; what is page cache can be had."""
    control_group(tmp_path / "groups" / top / "user" / "own.scope", "max" if top == "." else str(1 << 62), "10000", names)
    own = tmp_path / "own"
    own.write_text(f"9:name=systemd:/\n{line}\n")
    for name, value in zip(names, ("1000000", "20000")):
        (tmp_path / "groups" / top / "user" / name).write_text(value)
    statistics = "active_file 1\ntotal_active_file 5000\ninactive_file 0\nslab_reclaimable 700\n"
    (tmp_path / "groups" / top / "user" / "memory.stat").write_text(statistics)
    found = host._control_groups

    monkeypatch.setattr(host, "_control_groups", lambda *_: found(own, tmp_path / "groups"))
    assert host.available_bytes() == 1_000_000 - 20_000 + 5_700
    assert host.whole_bytes() == 1_000_000


def test_in_a_container_whose_group_is_not_to_be_seen_the_root_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a limit without statistics is a limit."""
    (tmp_path / "own").write_text("0::/docker/1234\n")
    (tmp_path / "memory.max").write_text("90000")
    (tmp_path / "memory.current").write_text("20000")
    found = list(host._control_groups(tmp_path / "own", tmp_path))
    monkeypatch.setattr(host, "_control_groups", lambda *_: found)
    assert host.available_bytes() == 70_000


def test_without_control_groups_the_machine_is_the_limit(tmp_path: Path) -> None:
    assert list(host._control_groups(tmp_path / "none", tmp_path)) == []
    assert 0 < host.available_bytes() <= host.whole_bytes() <= psutil.virtual_memory().total


@pytest.mark.cuda
def test_pinned_memory_can_be_copied_without_waiting() -> None:
    tier = HostTier(open_device())
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


KEEPING = """
import psutil, torch
from h2o_flexgen.memory.host import keep_little_freed
keep_little_freed()
rss = lambda: psutil.Process().memory_info().rss
for _ in range(3):
    torch.ones(5_000_000)  # by which glibc would learn to keep blocks up to this size
before = rss()
blocks = [torch.ones(1_000_000) for _ in range(40)]
stays = torch.ones(1_000_000)
held = rss()
del blocks
print(held - before, rss() - before)
"""


def test_where_memory_is_short_nothing_large_that_was_freed_is_kept() -> None:
    """Of blocks below one that stays, without being asked to give anything back."""
    run = subprocess.run([sys.executable, "-c", KEEPING], capture_output=True, text=True, check=True)
    held, left = map(int, run.stdout.split())
    assert held > 150e6 and left < 30e6
