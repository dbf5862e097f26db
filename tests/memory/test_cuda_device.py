"""What CudaDevice asks of CUDA, on machines that have none: torch.cuda is a book of what was asked, and of which device."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count as count_from
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from h2o_flexgen.engine import resources
from h2o_flexgen.memory import device as devices
from h2o_flexgen.memory.device import ALLOCATOR_SETTINGS, CudaDevice
from h2o_flexgen.memory.host import HostTier
from h2o_flexgen.profiling.measured_machine import SHARE_OF_DEVICE, profile
from h2o_flexgen.schedule.ops import COMPUTE_LANE
from tests.helpers.pretended import PretendedDevice
from tests.helpers.pretended_cudart import PretendedCudart
from tests.profiling.profiles import TINY


class PretendedGraph:
    """A graph in memory that is there as long as one of its graphs is, and that nothing can come back to."""

    def __init__(self, used: Counter[int], left: Counter[int]) -> None:
        """Graphs of each memory: all that there were, and those that are left."""
        self.used, self.left = used, left
        self._memory: int | None = None

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        if self.used[pool] and not self.left[pool]:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        self._memory = pool
        self.used[pool] += 1
        self.left[pool] += 1

    def capture_end(self) -> None:
        pass

    def replay(self) -> None:
        pass

    def __del__(self) -> None:
        if self._memory is not None:
            self.left[self._memory] -= 1


class PretendedTorch:
    """torch, with GPUs that are this CPU. The current device belongs to a thread and is 0 in a new one, as with CUDA."""

    def __init__(self, count: int = 2) -> None:
        self._current = threading.local()
        self.asked: list[tuple[str, int]] = []  # what was asked, and which device was then the current one
        self.cudart = PretendedCudart()
        self.graphs_used, self.graphs_left = Counter[int](), Counter[int]()  # by memory
        self.stream_of_product = list[str | None]()
        self._stream: str | None = None
        names = ("init", "reset_peak_memory_stats", "empty_cache")
        self.cuda = SimpleNamespace(
            is_available=lambda: True,
            device_count=lambda: count,
            current_device=lambda: self.current,
            set_device=lambda device: self._become(device.index),
            device=self._device,
            cudart=lambda: SimpleNamespace(
                cudaHostRegister=self._noted("register", self.cudart.cudaHostRegister),
                cudaHostUnregister=self._noted("unregister", self.cudart.cudaHostUnregister),
            ),
            Stream=lambda device: f"a stream of {device}",
            stream=self._in_stream,
            CUDAGraph=lambda: PretendedGraph(self.graphs_used, self.graphs_left),
            graph_pool_handle=partial(next, count_from(1)),
            **{name: self._noted(name, lambda *_: None) for name in names},
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @property
    def current(self) -> int:
        return getattr(self._current, "index", 0)

    def zeros(self, *shape: int, device: torch.device) -> torch.Tensor:
        return torch.zeros(*shape)

    def ones(self, *shape: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        return torch.ones(*shape, dtype=dtype)

    def addmm(self, *given: torch.Tensor) -> torch.Tensor:
        self.stream_of_product.append(self._stream)
        return torch.addmm(*given)

    def _become(self, index: int) -> None:
        self._current.index = index

    def _noted(self, name: str, function: Any) -> Any:
        def call(*given: Any) -> Any:
            self.asked.append((name, self.current))
            return function(*given)

        return call

    @contextmanager
    def _device(self, device: torch.device) -> Iterator[None]:
        before = self.current
        self._become(device.index)
        try:
            yield
        finally:
            self._become(before)

    @contextmanager
    def _in_stream(self, stream: str) -> Iterator[None]:
        before, self._stream = self._stream, stream
        yield
        self._stream = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> PretendedTorch:
    pretended = PretendedTorch()
    monkeypatch.setattr(devices, "torch", pretended)
    for name in ALLOCATOR_SETTINGS:
        monkeypatch.setenv(name, "")  # so that the tests' own value is restored
        monkeypatch.delenv(name)
    return pretended


def in_another_thread(action: Any) -> None:
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


def test_a_second_gpu_is_the_one_that_other_threads_speak_to(cuda: PretendedTorch) -> None:
    device, held = CudaDevice(1), list[HostTier]()

    def use() -> None:
        held.append(HostTier(device))
        held[0].alloc(4096)
        assert cuda.current == 0, "whose thread it is may have another device"

    in_another_thread(use)
    in_another_thread(held[0].close)
    in_another_thread(device.give_back_freed)
    assert [one for one in cuda.asked if one[0] not in ("init", "reset_peak_memory_stats")] == [
        ("register", 1),
        ("unregister", 1),
        ("empty_cache", 1),
    ]
    assert cuda.cudart.locked == {}


def test_a_refusal_is_forgotten_by_a_kernel(cuda: PretendedTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = list[str]()
    monkeypatch.setattr(torch.Tensor, "cos", lambda self: launched.append("cos"))
    device = CudaDevice(0)
    device.page_lock(4096, 4096)
    with pytest.raises(MemoryError, match="CUDA error 712"):
        device.page_lock(4096, 4096)
    assert launched == ["cos"]
    device.page_unlock(4096)


def test_host_memory_is_used_by_kernels_where_it_lies(cuda: PretendedTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    device, region = CudaDevice(1), torch.arange(64, dtype=torch.uint8)
    asked = list[tuple[dict[str, Any], torch.device, int]]()

    def taken(given: Any, device: torch.device) -> torch.Tensor:
        asked.append((given.__cuda_array_interface__, device, cuda.current))
        return region[:]

    monkeypatch.setattr(cuda, "as_tensor", taken, raising=False)
    assert device.over_link(region).data_ptr() == region.data_ptr()
    interface = {"shape": (64,), "typestr": "|u1", "data": (region.data_ptr(), False), "version": 2}
    assert asked == [(interface, torch.device("cuda", 1), 1)]
    monkeypatch.setattr(cuda, "as_tensor", lambda given, device: region.clone(), raising=False)
    with pytest.raises(ValueError, match=r"this GPU does not read page-locked CPU memory .*; take attend_on='host'"):
        device.over_link(region)


@pytest.mark.cuda
def test_a_kernel_reads_and_writes_page_locked_memory() -> None:
    device = CudaDevice()
    tier = HostTier(device)
    region = tier.alloc(1 << 20)
    region.copy_(torch.arange(1 << 20).to(torch.uint8))
    there, number = device.over_link(region), torch.tensor(1000, device=device.torch_device)
    assert int(there[number]) == 1000 % 256
    there[number] = 7
    there[2000:3000].add_(1)
    device.settle()
    assert int(region[1000]) == 7 and int(region[2000]) == 2000 % 256 + 1
    del there
    tier.close()


def test_libraries_are_loaded_on_the_stream_that_computes(cuda: PretendedTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the host's memory is weighed."""
    weighed = list[int]()
    monkeypatch.setattr(resources, "bytes_to_begin_with", lambda: weighed.append(len(cuda.stream_of_product)) or 1)
    monkeypatch.setattr(CudaDevice, "limit", lambda self, nbytes: None)
    monkeypatch.setattr(CudaDevice, "free_bytes", lambda self: 1)
    device = CudaDevice(0)
    assert cuda.stream_of_product == []
    resources.open_limits([device], None, None)
    assert cuda.stream_of_product == [device._streams[COMPUTE_LANE]] and weighed == [1]


def test_graphs_share_memory_while_there_is_one_of_them(cuda: PretendedTorch) -> None:
    device, made = CudaDevice(0), list[int]()

    def fails() -> None:
        raise ValueError("broken")

    for _ in range(2):
        graphs = [device.capture(lambda: made.append(1)) for _ in range(2)]
        with pytest.raises(ValueError, match="broken"):
            device.capture(fails)
        graphs.clear()  # as when rows have left
    with pytest.raises(ValueError, match="broken"):
        device.capture(fails)
    device.capture(lambda: made.append(1))
    assert len(made) == 5
    assert cuda.asked.count(("empty_cache", 0)) == 4, "before memory is taken anew: nothing is given back during a capture"
    assert dict(cuda.graphs_used) == {1: 3, 2: 3, 3: 1, 4: 1} and not any(cuda.graphs_left.values())


def test_a_capture_that_cuda_refuses_to_end_is_over_for_torch_too(
    cuda: PretendedTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or no memory could be given back by a run that goes on without graphs."""
    ended = list[tuple[int, int]]()
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *given: ended.append(given), raising=False)
    monkeypatch.setattr(PretendedGraph, "capture_end", Mock(side_effect=RuntimeError("the capture was invalidated")))
    device = CudaDevice(1)
    with pytest.raises(RuntimeError, match="not permitted"):
        device.capture(Mock(side_effect=RuntimeError("operation not permitted when stream is capturing")))
    with pytest.raises(RuntimeError, match="invalidated"):
        device.capture(lambda: None)
    assert ended == [(1, 1), (1, 2)]


def test_memory_is_kept_in_segments_unless_the_environment_says_otherwise(
    cuda: PretendedTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices.sys, "platform", "linux")
    CudaDevice(0)
    assert os.environ[ALLOCATOR_SETTINGS[0]] == "expandable_segments:True"
    for name in ALLOCATOR_SETTINGS:
        monkeypatch.delenv(ALLOCATOR_SETTINGS[0], raising=False)
        monkeypatch.setenv(name, "max_split_size_mb:64")
        CudaDevice(0)
        assert os.environ.get(ALLOCATOR_SETTINGS[0], "max_split_size_mb:64") == "max_split_size_mb:64"
        monkeypatch.delenv(name)


def test_a_profile_fits_the_device_and_gives_back_what_it_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given_back, folder = list[bool](), tmp_path / "disk"
    monkeypatch.setattr(PretendedDevice, "give_back_freed", lambda self: given_back.append(folder.exists()))
    monkeypatch.setattr(PretendedDevice, "free_bytes", lambda self: SHARE_OF_DEVICE * TINY.memory_bytes)
    profile(PretendedDevice(), folder, "here", "float32", TINY)
    assert given_back[-1:] == [False], "last, when nothing is held any more"
    monkeypatch.setattr(PretendedDevice, "free_bytes", lambda self: SHARE_OF_DEVICE)
    with pytest.raises(ValueError, match=r"a profile needs .* of memory, but 1 .* may be taken"):
        profile(PretendedDevice(), folder, "here", "float32", TINY)
