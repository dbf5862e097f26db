"""Ring: buffers of one size, given back together."""

from __future__ import annotations

import pytest
from torch import Tensor

from h2o_flexgen.memory.host import HostTier
from h2o_flexgen.memory.memories import Ring


def test_slots_are_apart_and_as_large_as_asked() -> None:
    ring = Ring(HostTier(), 3, 5000)
    assert len(ring) == 3 and ring
    assert len({ring[slot].data_ptr() for slot in range(3)}) == 3
    assert all(ring[slot].nbytes >= 5000 for slot in range(3))


def test_a_ring_of_no_bytes_holds_nothing() -> None:
    memory = HostTier()
    assert not Ring(memory, 3, 0) and memory.meter.used_bytes == 0


def test_used_memory_is_zeroed_when_asked() -> None:
    memory = HostTier()
    used = memory.alloc(4096).fill_(7)
    memory.free(used)
    ring = Ring(memory, 2, 4096)
    assert ring[0].data_ptr() == used.data_ptr() and ring[0].any()
    ring.zero()
    assert not ring[0].any()


def test_what_was_freed_is_there_for_others_and_freed_once() -> None:
    memory = HostTier()
    ring = Ring(memory, 2, 4096)
    ring.free()
    ring.free()
    assert not ring
    memory.alloc(4096), memory.alloc(4096)
    assert memory.meter.used_bytes == 2 * 4096, "freed regions are used again, each by one"
    memory.alloc(4096)
    assert memory.meter.used_bytes == 3 * 4096


def test_a_ring_that_cannot_be_made_gives_back_its_first_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, left, alloc = HostTier(), iter(range(2)), HostTier.alloc

    def refuse(tier: HostTier, nbytes: int) -> Tensor:
        if next(left, None) is None:
            raise MemoryError("full")
        return alloc(tier, nbytes)

    monkeypatch.setattr(HostTier, "alloc", refuse)
    with pytest.raises(MemoryError, match="full"):
        Ring(memory, 3, 4096)
    memory.trim()
    assert memory.meter.used_bytes == 0
