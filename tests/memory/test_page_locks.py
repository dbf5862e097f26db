"""Page-locked memory: the driver's book holds what is there, and nothing else, however memory is dropped. Proved with a book
that is kept as CUDA keeps its own, and with pages that tell when they go."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from h2o_flexgen.llm import LLM
from h2o_flexgen.memory.device import CudaPageLocks, Device, open_device
from h2o_flexgen.memory.host import HostTier, Meter, Pages, shortage_of
from h2o_flexgen.memory.memories import Memories
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.working_space import DEVICE_LIBRARIES
from h2o_flexgen.profiling import moving, profile_cache
from h2o_flexgen.profiling.measured_machine import profile
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.session import loaded_model
from h2o_flexgen.session.plan_finder import PlanFinder
from tests.helpers.contract import Case, Checkpoints
from tests.helpers.pretended_cudart import LockingDevice, PretendedCudart, failing_once, watched_pages
from tests.profiling.profiles import TINY

ON_HOST, KV_ON_HOST = (0, 100, 0, 100, 0, 100), (100, 0, 0, 100, 100, 0)


@pytest.fixture
def cudart() -> PretendedCudart:
    return PretendedCudart()


@pytest.fixture
def locker(cudart: PretendedCudart, monkeypatch: pytest.MonkeyPatch) -> Iterator[LockingDevice]:
    """The device of every LLM. When a test ends, nothing may be locked, and nothing may have gone while it was."""
    device = LockingDevice(cudart)
    monkeypatch.setattr(loaded_model, "open_device", lambda name: device)
    with watched_pages(cudart) as stale:
        yield device
        gc.collect()
        assert (cudart.locked, stale, cudart.last_error) == ({}, [], 0)


# -- a tier --------------------------------------------------------------------------------------------------------------


def test_what_is_freed_stays_locked_for_the_next_and_what_is_trimmed_does_not(
    locker: LockingDevice, cudart: PretendedCudart
) -> None:
    tier = HostTier(locker)
    kept_region, freed = tier.alloc(8192), tier.alloc(1 << 20)
    tier.free(freed)
    assert cudart.nbytes == 8192 + (1 << 20)
    tier.trim()
    assert cudart.locked == {kept_region.data_ptr(): 8192}
    tier.close()
    assert cudart.locked == {}
    assert int(freed.sum()) == 0, "what still looks at it may"


@pytest.mark.parametrize("seen_as", [lambda region: region, lambda region: region[:100], lambda region: region.numpy()])
def test_what_is_looked_at_is_locked_until_the_last_look(
    seen_as: Callable[[Tensor], object], locker: LockingDevice, cudart: PretendedCudart
) -> None:
    with torch.inference_mode():  # a view then keeps its memory, and not the tensor that it is a view of
        view = seen_as(HostTier(locker).alloc(4096))
    gc.collect()
    assert cudart.nbytes == 4096
    del view
    gc.collect()
    assert cudart.locked == {}


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_an_error_behind_the_locking_leaves_nothing_locked(
    error: type[BaseException], locker: LockingDevice, cudart: PretendedCudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Meter, "add", failing_once(Meter.add, error))
    tier = HostTier(locker)
    with pytest.raises(error, match="in between"):
        tier.alloc(4096)
    assert tier.alloc(4096).nbytes == 4096


def test_the_check_finds_pages_that_are_not_unlocked(cudart: PretendedCudart) -> None:
    class Forgetful(Pages):
        def __del__(self) -> None:
            pass

    with watched_pages(cudart, Forgetful) as stale:
        HostTier(LockingDevice(cudart)).alloc(4096)
        gc.collect()
    assert len(stale) == len(cudart.locked) == 1


def test_a_refusal_is_a_lack_of_host_memory_and_is_forgotten(cudart: PretendedCudart) -> None:
    cudart.room = 4096
    tier = HostTier(LockingDevice(cudart))
    with pytest.raises(MemoryError, match=r"page-locking 0\.00 GB of CPU memory failed \(CUDA error 2\); .*ulimit") as refused:
        tier.alloc(8192)
    found = shortage_of(refused.value)
    assert found is not None and found.tier == "host"
    assert tier.meter.used_bytes == 0 and cudart.last_error == 0
    assert tier.alloc(4096).nbytes == 4096


def test_memory_that_cuda_does_not_unlock_is_told_and_forgotten(cudart: PretendedCudart) -> None:
    locks = CudaPageLocks(cudart, cudart.launch)
    with pytest.warns(RuntimeWarning, match=r"CUDA did not unlock CPU memory \(CUDA error 713\)"):
        locks.unlock(4096)
    assert cudart.last_error == 0


def test_a_fork_unlocks_nothing_of_its_parent(cudart: PretendedCudart, monkeypatch: pytest.MonkeyPatch) -> None:
    locks = CudaPageLocks(cudart, cudart.launch)
    locks.lock(4096, 4096)
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    locks.unlock(4096)
    assert cudart.locked == {4096: 4096}


# -- whole runs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("closes", [True, False])
@pytest.mark.parametrize("percent", [ON_HOST, (0, 0, 0, 0, 0, 0)])
def test_an_llm_leaves_nothing_locked_closed_or_not(
    closes: bool,
    percent: tuple[float, ...],
    locker: LockingDevice,
    cudart: PretendedCudart,
    checkpoints: Checkpoints,
    tmp_path: Path,
) -> None:
    case = Case(percent=percent)
    llm = case.open(checkpoints, tmp_path / "offload")
    llm.generate(case.prompts, SamplingParams(max_tokens=3))
    assert cudart.nbytes > 0
    if closes:
        llm.close()
        assert cudart.locked == {}


def test_only_weights_go_without(
    locker: LockingDevice, cudart: PretendedCudart, checkpoints: Checkpoints, offload: Path
) -> None:
    """With everything in host memory."""
    case, most = Case(percent=ON_HOST), {}
    for pin_weight in (True, False):
        cudart.most_locked = 0
        with case.open(checkpoints, offload, pin_weight=pin_weight) as llm:
            llm.generate(case.prompts, SamplingParams(max_tokens=3))
            weights = llm.spec.weight_bytes
        most[pin_weight] = cudart.most_locked
    assert most[False] > 0 and most[True] - most[False] >= weights


def test_on_a_cpu_nothing_is_locked_and_on_a_device_weights_are_asked_about(
    locker: LockingDevice, cudart: PretendedCudart, tmp_path: Path
) -> None:
    for device, pin_weight, locked in ((Device(), True, 0), (locker, False, 4096), (locker, True, 8192)):
        memories = Memories(device, tmp_path, pin_weight)
        regions = [tier.alloc(4096) for tier in (memories.host, memories.weights)]
        assert cudart.nbytes == locked and len(regions) == 2
        memories.close()
        assert cudart.locked == {}


def test_a_profile_leaves_nothing_locked(locker: LockingDevice, cudart: PretendedCudart, tmp_path: Path) -> None:
    profile(locker, tmp_path, "here", "float32", TINY)
    assert cudart.locked == {} and cudart.most_locked >= TINY.copied_bytes


def test_nor_does_one_that_breaks_off(
    locker: LockingDevice, cudart: PretendedCudart, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = moving.links
    monkeypatch.setattr(moving, "links", lambda *given: [*links(*given), 1 // 0])
    with pytest.raises(ZeroDivisionError):
        profile(locker, tmp_path, "here", "float32", TINY)
    assert cudart.most_locked >= TINY.copied_bytes


def test_a_plan_that_is_found_behind_a_profile_of_the_same_process_runs(
    locker: LockingDevice, cudart: PretendedCudart, checkpoints: Checkpoints, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `--percent auto` from an empty cache, but for the process of its own that a profile usually has."""
    locked_behind, room = list[int](), DEVICE_LIBRARIES + 160_000  # less than all takes, so that host memory has to serve

    def profile_here(device: Device, folder: Path, name: str, dtype: str | None, *_: object) -> Machine:
        machine = profile(device, folder, name, dtype, TINY)
        locked_behind.append(cudart.nbytes)
        return replace(machine, device_bytes=room)

    monkeypatch.setattr(profile_cache, "profile_apart", profile_here)
    monkeypatch.setattr(profile_cache, "saved_machine", lambda name: None)
    monkeypatch.setattr(LockingDevice, "free_bytes", lambda self: room)
    monkeypatch.setattr(PlanFinder, "_plan_with_room", lambda *_: None)
    case = Case(percent=ON_HOST)
    with case.open(checkpoints, offload) as llm:
        expected = [one.token_ids for one in llm.generate(case.prompts, SamplingParams(max_tokens=3))]
    folder, cudart.most_locked = checkpoints.folder(case.kind, case.stored), 0
    with LLM(str(folder), tokenizer="bytes", percent="auto", dtype="float32", offload_dir=offload) as llm:
        found = [one.token_ids for one in llm.generate(case.prompts, SamplingParams(max_tokens=3))]
    assert found == expected and locked_behind == [0] and cudart.most_locked > 0


def test_a_block_whose_memory_is_not_locked_shrinks_and_its_tokens_are_the_same(
    locker: LockingDevice, cudart: PretendedCudart, checkpoints: Checkpoints, offload: Path
) -> None:
    """The first kernel behind the refusal is not told of it."""
    case = Case(percent=KV_ON_HOST, lengths=(5, 9, 2, 7), gpu_batch_size=2, num_gpu_batches=2)
    with case.open(checkpoints, offload) as llm:
        expected = [one.token_ids for one in llm.generate(case.prompts, SamplingParams(max_tokens=4))]
    cudart.room, cudart.most_locked = cudart.most_locked - 1, 0
    with case.open(checkpoints, offload) as llm:
        found = llm.generate(case.prompts, SamplingParams(max_tokens=4), on_shrink=lambda _: None)
        assert [one.token_ids for one in found] == expected
        assert llm.stats is not None and llm.stats.shrunk == ((2, 2),) and cudart.most_locked > 0


@pytest.mark.cuda
def test_cuda_forgets_a_refusal() -> None:
    """Memory that is locked already is refused, and the next kernel is not told."""
    device = open_device()
    region = HostTier(device).alloc(1 << 20)
    with pytest.raises(MemoryError, match="CUDA error 712"):
        device.page_lock(region.data_ptr(), region.nbytes)
    assert float(torch.ones(8, device=device.torch_device).sum()) == 8 and region.is_pinned()
    address = region.data_ptr()
    del region
    gc.collect()
    with pytest.warns(RuntimeWarning, match="CUDA error"):
        device.page_unlock(address)
    assert float(torch.ones(8, device=device.torch_device).sum()) == 8
