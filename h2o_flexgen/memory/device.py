"""The device that computes: an accelerator with its own memory, streams and events, or the CPU, which works in host memory.

All differences between the two are here, so that the engine has one code path: on a CPU every marker is already passed and
every stream is the calling thread.
"""

from __future__ import annotations

import os
import sys
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor
from torch.cuda._gpu_trace import EventSynchronizationCallbacks as HearOfEnds

from h2o_flexgen.core.site import HOST
from h2o_flexgen.formats.kernel_table import CPU, TORCH
from h2o_flexgen.kernels.native import processor
from h2o_flexgen.kernels.raw_memory import addresses_of
from h2o_flexgen.kernels.recording import CallRecording, Program, WorkingRoom
from h2o_flexgen.memory.host import HostTier, Meter
from h2o_flexgen.memory.threads import FORKED, SPAWN, Handover

PORTABLE = 1  # page-locked for every device of the process, and in every thread
MAPPED = 2  # and kernels may read and write it, at the address that the host has for it
SUCCESS = 0


class Runtime(Protocol):
    """The functions of torch.cuda.cudart() that are used; they return CUDA's status."""

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int: ...

    def cudaHostUnregister(self, pointer: int) -> int: ...


class CudaPageLocks:
    """Host memory that CUDA has page-locked: ranges are registered with its driver, and unregistered again.

    The driver keeps a list of its own. It refuses a range that is already in the list, and does not remove a range when its
    pages are freed. It also keeps the last error of a thread, and reports it at the next kernel launch, which did not cause it.

    `launch` launches any kernel. That raises and clears the last error of this thread; torch offers no other way."""

    def __init__(self, runtime: Runtime, launch: Callable[[], object]) -> None:
        self._runtime = runtime
        self._launch = launch
        self._process = os.getpid()

    def lock(self, address: int, nbytes: int) -> None:
        status = int(self._runtime.cudaHostRegister(address, nbytes, PORTABLE | MAPPED))
        if status != SUCCESS:
            self._forget_error()
            raise MemoryError(
                f"page-locking {nbytes / 1e9:.2f} GB of CPU memory failed (CUDA error {status}); raise the limit on locked "
                "memory (ulimit -l), lower the CPU shares, or use --pin-weight 0 if it was for weights"
            )

    def unlock(self, address: int) -> None:
        """Only warns if CUDA refuses: memory is often freed because of another error, which the user should see instead."""
        if self._process != os.getpid():
            return  # a fork has the pages, but what is page-locked is the parent's
        status = int(self._runtime.cudaHostUnregister(address))
        if status != SUCCESS:
            self._forget_error()
            warnings.warn(
                f"CUDA did not unlock CPU memory (CUDA error {status}); start a new process if copies fail from here on",
                RuntimeWarning,
                stacklevel=2,
            )

    def _forget_error(self) -> None:
        with suppress(RuntimeError):
            self._launch()


ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


class Marker(Protocol):
    """A point in a lane's stream of work."""

    def query(self) -> bool:
        """Whether the work before it is over."""

    def synchronize(self) -> None:
        """Makes the calling thread wait until it is."""


class Device:
    """The CPU: work is over when the call returns."""

    accelerator = False
    chains = True  # whether what was captured can be joined to one launch
    steps_before_capture = 1  # in which tensors are made that stay: what is recorded finds them
    graph_bytes: int | None = None  # of an accelerator: what a graph takes; None: it is not known whether graphs hold there
    kind = "cpu"

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.handover = Handover()
        self._room = WorkingRoom()  # of all that is recorded

    @property
    def captures(self) -> bool:
        """Whether work can be captured: on a CPU, where kernels in C do it."""
        return processor(CPU).build != TORCH

    def stream(self, lane: str) -> AbstractContextManager[object]:
        """A context in which work is issued to this lane's stream."""
        return nullcontext()

    def mark(self, timed: bool = False, blocking: bool = False) -> Marker | None:
        """Marks the point that the current stream has reached; None if its work is done already. `timed`: seconds can be
        measured between it and another. `blocking`: a thread that waits for it sleeps, and does not keep a core busy."""
        return None

    def wait(self, marker: Marker | None) -> None:
        """Makes work issued next on the current stream wait for the marker; the calling thread does not wait."""

    def finish(self) -> None:
        """Waits until everything that was issued on the current stream is over, before the CPU works in memory that the stream
        has used or waits for."""
        marker = self.mark(blocking=True)
        if marker is not None:
            marker.synchronize()

    def seconds_between(self, start: Marker, end: Marker) -> float:
        raise AssertionError("a CPU has no markers to measure between")

    def upload(self, values: Tensor, device: torch.device) -> Tensor:
        """Copies a few values of the host to the device; the calling thread does not wait. They must not change later."""
        return values

    def read_back(self, values: Tensor) -> Tensor:
        """A few values of the device in host memory; the calling thread sleeps until they are there."""
        return values.cpu()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """A function that repeats this work, as one launch and on the same addresses; the work is not done now."""
        return CallRecording.of(work, self._room)

    def empty_room(self) -> None:
        """Returns the memory in which captured work is done to the system until some of it runs again."""
        self._room.empty()

    def chained(self, captured: Sequence[Callable[[], None]], moments: Tensor) -> Callable[[], None]:
        """What was captured, one after the other as one launch; `moments` (captured + 1,), int64, gets when each begins and the
        last one ends, in nanoseconds of time.perf_counter."""
        return Program.timed([each for each in captured if isinstance(each, Program)], moments)

    def memory(self, host: HostTier) -> HostTier | DeviceTier:
        return host

    def names_of(self, count: int) -> list[str]:
        """The names of this many devices of this kind, one for each process."""
        return [self.kind] * count

    def warm_up(self, lane: str) -> None:
        """Makes libraries load the memory that they keep for products on this lane, so that it is counted before a plan is
        compared with a budget."""

    def page_lock(self, address: int, nbytes: int) -> None:
        """Page-locks host memory, for copies that no thread waits for. A CPU has no such copies."""

    def page_unlock(self, address: int) -> None:
        """Undoes `page_lock`, before the memory is freed."""

    def over_link(self, region: Tensor) -> Tensor:
        """Page-locked bytes of the host as a tensor of the device, for kernels that read and write them where they lie."""
        return region

    def peak_bytes(self) -> int:
        return 0

    def restart_peak(self) -> None:
        """Measures the peak from now on."""

    def free_bytes(self) -> int | None:
        return None

    def whole_bytes(self) -> int | None:
        """Memory that the device has, free or not; None for a CPU."""
        return None

    def limit(self, nbytes: int | None) -> None:
        """Limits what this process may allocate on the device; None removes the limit."""

    def settle(self) -> None:
        """Waits until everything that was issued on any stream is over."""

    def give_back_freed(self) -> None:
        """Returns freed memory that the allocator keeps to the device."""


class StreamEvent(Protocol):
    """An event of a driver: a point in a stream, which can be recorded again somewhere else."""

    cuda_event: int  # its address in the driver

    def record(self, stream: Any) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds up to another event."""


class EventMarker:
    """A marker that returns its event to the unused ones when nothing references the marker any more. So no event is recorded
    again while a thread may still begin to wait for it. A stream that already waits does so for the point recorded before."""

    __slots__ = ("_unused", "event")

    def __init__(self, event: StreamEvent, unused: deque[StreamEvent]) -> None:
        self.event = event
        self._unused = unused

    def __del__(self) -> None:
        self._unused.append(self.event)

    def query(self) -> bool:
        is_over = bool(self.event.query())
        if is_over and HearOfEnds.callback_list:  # torch's stream sanitizer, which torch tells of waits, but not of this
            HearOfEnds.fire_callbacks(self.event.cuda_event)
        return is_over

    def synchronize(self) -> None:
        self.event.synchronize()


class Accelerator(Device, ABC):
    """A device with memory and streams of its own: all that it does with them but for what its driver is asked."""

    accelerator = True
    captures = True
    chains = False
    steps_before_capture = 2  # libraries initialise in the first, and rows that leave soon are not worth a capture

    def __init__(self) -> None:
        super().__init__()
        # to make an event is expensive, and threads that make them wait for each other
        self._unused: dict[tuple[bool, bool], deque[StreamEvent]] = {
            (timed, blocking): deque() for timed in (False, True) for blocking in (False, True)
        }

    # -- what the driver is asked ----------------------------------------------------------------------------------------

    @abstractmethod
    def _new_event(self, timed: bool, blocking: bool) -> StreamEvent: ...

    @abstractmethod
    def _current_stream(self) -> Any:
        """The stream to which the calling thread issues its work."""

    @abstractmethod
    def _page_locked(self, like: Tensor) -> Tensor:
        """New page-locked memory of the host, of this shape and type. When it is dropped, it is kept until the streams that
        copy from or to it have done so."""

    # -- what follows from that ------------------------------------------------------------------------------------------

    def mark(self, timed: bool = False, blocking: bool = False) -> Marker | None:
        unused = self._unused[timed, blocking]
        try:
            event = unused.pop()
        except IndexError:  # all are in use
            event = self._new_event(timed, blocking)
        event.record(self._current_stream())
        return EventMarker(event, unused)

    def wait(self, marker: Marker | None) -> None:
        if isinstance(marker, EventMarker):
            self._current_stream().wait_event(marker.event)

    def seconds_between(self, start: Marker, end: Marker) -> float:
        assert isinstance(start, EventMarker) and isinstance(end, EventMarker)
        return float(start.event.elapsed_time(end.event)) / 1000

    def upload(self, values: Tensor, device: torch.device) -> Tensor:
        return self._page_locked(values).copy_(values).to(device, non_blocking=True)

    def read_back(self, values: Tensor) -> Tensor:
        read = self._page_locked(values).copy_(values, non_blocking=True)
        there = self.mark(blocking=True)
        assert there is not None
        there.synchronize()  # torch's own wait would keep a core busy
        return read

    def memory(self, host: HostTier) -> DeviceTier:
        return DeviceTier(self.torch_device)


class CudaDevice(Accelerator):
    kind = "cuda"

    def __init__(self, index: int | None = None) -> None:
        if not torch.cuda.is_available():
            asked = "cuda" if index is None else f"cuda:{index}"
            raise ValueError(f"device={asked!r} was asked for, but torch finds no CUDA device; take device={Device.kind!r}")
        super().__init__()
        _let_pools_share()
        try:
            torch.cuda.init()
        except RuntimeError as error:
            if "forked" not in str(error):
                raise
            raise ValueError(f"{FORKED}, nor its GPU; {SPAWN}") from error
        count = torch.cuda.device_count()
        if index is not None and index >= count:
            raise ValueError(f"device='cuda:{index}' was asked for, but torch finds {count} of them; they count from 0")
        self.torch_device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        torch.cuda.set_device(self.torch_device)  # for work that this thread issues outside of lanes
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()  # those that are still referenced
        self._graph_memory: Any = None  # the working memory of all graphs: they are replayed one after the other
        self._locks = CudaPageLocks(torch.cuda.cudart(), torch.zeros(1, device=self.torch_device).cos)
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def warm_up(self, lane: str) -> None:
        with self.stream(lane):  # libraries keep working memory for each stream that they are used on
            one = torch.ones(64, 64, device=self.torch_device, dtype=torch.float16)
            torch.addmm(one[0], one, one @ one).cpu()

    def stream(self, lane: str) -> AbstractContextManager[object]:
        stream = self._streams.get(lane)
        if stream is None:
            stream = self._streams[lane] = torch.cuda.Stream(self.torch_device)
        return torch.cuda.stream(stream)

    def _new_event(self, timed: bool, blocking: bool) -> StreamEvent:
        event: StreamEvent = torch.cuda.Event(enable_timing=timed, blocking=blocking)
        return event

    def _current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.torch_device)

    def _page_locked(self, like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        if not self._graphs:  # torch refuses a pool after its last graph was freed, and cannot free it during a capture
            self.give_back_freed()
            self._graph_memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            graph.capture_begin(pool=self._graph_memory, capture_error_mode="thread_local")  # other threads go on
            work()
            graph.capture_end()
        except BaseException:
            self._give_up(graph)
            raise
        self._graphs.add(graph)
        return graph.replay

    def _give_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """Ends a capture that has failed. Where CUDA refuses even that, torch before 2.12 goes on to take memory for the graph,
        and fails when any is to be given back. Errors of this would hide the one of the capture."""
        with suppress(RuntimeError):
            graph.capture_end()
        with suppress(RuntimeError, AttributeError):  # it has ended, or this torch calls it otherwise
            torch._C._cuda_endAllocateToPool(self.torch_device.index, self._graph_memory)

    def names_of(self, count: int) -> list[str]:
        there = torch.cuda.device_count()
        if count > there:
            raise ValueError(f"{count} devices were asked for, and there are {there}; ask for no more than that")
        return [f"cuda:{index}" for index in range(count)]

    def page_lock(self, address: int, nbytes: int) -> None:
        with torch.cuda.device(self.torch_device):  # in any thread: a first call for another device would initialise that one
            self._locks.lock(address, nbytes)

    def page_unlock(self, address: int) -> None:
        with torch.cuda.device(self.torch_device):
            self._locks.unlock(address)

    def over_link(self, region: Tensor) -> Tensor:
        with torch.cuda.device(self.torch_device):
            seen = torch.as_tensor(_OverLink(region), device=self.torch_device)
        if addresses_of((seen,)) != addresses_of((region,)):  # a copy, or memory that has another address there
            what = "this GPU does not read page-locked CPU memory at the address that the host has for it"
            raise ValueError(f"kv_recall cannot bring what is chosen: {what}; take attend_on={HOST!r}")
        return seen

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.torch_device)

    def restart_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def free_bytes(self) -> int | None:
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def whole_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.torch_device)[1]

    def limit(self, nbytes: int | None) -> None:
        fraction = 1.0 if nbytes is None else min(1.0, nbytes / self.whole_bytes())
        torch.cuda.set_per_process_memory_fraction(fraction, self.torch_device)

    def settle(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def give_back_freed(self) -> None:
        with torch.cuda.device(self.torch_device):
            torch.cuda.empty_cache()


class _OverLink:
    """Bytes of host memory, in the form in which torch takes memory that kernels may use from others."""

    def __init__(self, region: Tensor) -> None:
        self._region = region  # which stays for as long as the tensor that is made of this
        place = (*addresses_of((region,)), False)
        self.__cuda_array_interface__ = {"shape": (region.nbytes,), "typestr": "|u1", "data": place, "version": 2}


def _let_pools_share() -> None:
    """Makes torch keep memory in segments that grow and shrink, unless the user has set how it keeps memory. Otherwise free
    memory of one stream cannot be used by others, but counts against a budget. Torch reads this at its first allocation; of
    its two names, this one is known to all releases."""
    if sys.platform == "linux" and not any(name in os.environ for name in ALLOCATOR_SETTINGS):
        os.environ[ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"


class DeviceTier:
    """The accelerator's own memory."""

    def __init__(self, device: torch.device) -> None:
        self.meter = Meter()
        self._device = device

    def alloc(self, nbytes: int) -> Tensor:
        try:
            region = torch.zeros(max(nbytes, 1), dtype=torch.uint8, device=self._device)
        except torch.cuda.OutOfMemoryError as error:
            raise MemoryError(f"GPU memory: {nbytes / 1e9:.2f} GB could not be allocated; lower the GPU share") from error
        self.meter.add(region.nbytes)
        return region

    def free(self, region: Tensor) -> None:
        self.meter.remove(region.nbytes)


def open_device(name: str = "auto") -> Device:
    """Opens a device by name; "auto" means the GPU if there is one."""
    kind, _, index = name.partition(":")
    if kind == "auto":
        kind = CudaDevice.kind if torch.cuda.is_available() else Device.kind
    if kind == Device.kind:
        return Device()
    if kind == CudaDevice.kind and (not index or index.isdigit()):
        return CudaDevice(int(index) if index else None)
    raise ValueError(f"device={name!r} is unknown; known are auto, cpu, cuda and cuda:N")
