"""Shortage: which errors say that memory has run out, and when a block is stopped before it has."""

from __future__ import annotations

import errno
import time
from types import SimpleNamespace

import psutil
import pytest
import torch

from h2o_flexgen.memory import host
from h2o_flexgen.memory.host import FLOOR_BYTES, HostGuard, Shortage, shortage_of


def raised_from(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "tier"),
    [
        (MemoryError("no room"), "host"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "host"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."), "host"),
        (torch.OutOfMemoryError("Tried to allocate 2 GiB"), "device"),
        (raised_from(MemoryError("GPU memory: 2 GB could not be allocated"), torch.OutOfMemoryError("2 GiB")), "device"),
        (RuntimeError("CUDA error: out of memory\nkernel errors might be reported later"), "device"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "device"),
        (ValueError("out of memory"), None),
        (OSError(errno.ENOSPC, "No space left on device"), None),
        (RuntimeError("shape mismatch"), None),
        (KeyboardInterrupt(), None),
        (None, None),
    ],
)
def test_errors_that_are_a_want_of_memory(error: BaseException | None, tier: str | None) -> None:
    found = shortage_of(error)
    assert (None if found is None else found.tier) == tier
    assert found is None or "\n" not in found.reason


def test_what_torch_really_says_is_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    found = shortage_of(caught.value)
    assert found is not None and found.tier == "host"
    assert shortage_of(MemoryError()) == Shortage("host", "MemoryError")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What is left, what the process holds, and what time it is."""
    world = SimpleNamespace(left=FLOOR_BYTES - 1, held=1 << 30, now=100.0, looks=0)

    def left() -> int:
        world.looks += 1
        return world.left

    monkeypatch.setattr(host, "available_bytes", left)
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=world.held)))
    monkeypatch.setattr(time, "monotonic", lambda: world.now)
    return world


def test_a_block_that_has_taken_the_last_memory_is_stopped(world: SimpleNamespace) -> None:
    guard = HostGuard()
    world.held += FLOOR_BYTES
    with pytest.raises(MemoryError, match="CPU memory: only 34 MB are left"):
        guard.look()


def test_what_earlier_blocks_have_left_for_it_is_held_by_it(world: SimpleNamespace) -> None:
    guard = HostGuard(spare_bytes=FLOOR_BYTES)
    with pytest.raises(MemoryError):
        guard.look()


def test_a_block_is_not_stopped_for_what_others_have_taken(world: SimpleNamespace) -> None:
    guard = HostGuard()
    world.held += FLOOR_BYTES - 1
    guard.look()
    assert world.looks == 1


def test_a_block_is_not_stopped_while_memory_is_left_however_much_it_holds(world: SimpleNamespace) -> None:
    guard = HostGuard()
    world.held, world.left = 1 << 40, FLOOR_BYTES
    guard.look()
    assert world.looks == 1


def test_looks_are_few(world: SimpleNamespace) -> None:
    guard = HostGuard()
    for _ in range(1000):
        world.now += host.SECONDS_BETWEEN_LOOKS / 100
        guard.look()
    assert world.looks <= 11
