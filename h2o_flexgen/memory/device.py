"""The device that computes: an accelerator with memory, streams and events of its own, or the CPU, whose memory is the
host's.

Everything that differs between the two stands here, so that the engine has one code path: on a CPU every marker is already
passed and every stream is the calling thread.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from h2o_flexgen.memory.host import HostTier
from h2o_flexgen.memory.tier import Meter

Marker = torch.cuda.Event  # a point in a lane's stream of work


class Device:
    """The CPU: work is over when the call returns."""

    accelerator = False
    kind = "cpu"

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    def stream(self, lane: str) -> AbstractContextManager[object]:
        """Work issued inside goes to this lane's stream."""
        return nullcontext()

    def mark(self) -> Marker | None:
        """The point that the current stream has reached; None when all of it is done already."""
        return None

    def wait(self, marker: Marker | None) -> None:
        """Makes what is issued next on the current stream wait for the marker; the calling thread does not wait."""

    def seconds_between(self, start: Marker, end: Marker) -> float:
        raise AssertionError("a CPU has no markers to measure between")

    def keep(self, tensor: Tensor) -> None:
        """The current stream still uses this tensor: its memory may not be given to others before that is over."""

    def memory(self, host: HostTier) -> HostTier | DeviceTier:
        return host

    def peak_bytes(self) -> int:
        return 0

    def restart_peak(self) -> None:
        """From now on the peak is of what comes."""

    def free_bytes(self) -> int | None:
        return None

    def limit(self, nbytes: int) -> None:
        """Holds what this process may allocate on the device below a budget."""

    def settle(self) -> None:
        """Waits until everything that was issued on any stream is over."""


class CudaDevice(Device):
    accelerator = True
    kind = "cuda"

    def __init__(self, index: int | None = None) -> None:
        if not torch.cuda.is_available():
            raise ValueError("device 'cuda' was asked for, but torch finds no CUDA device; use --device cpu")
        super().__init__()
        self.torch_device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self._streams: dict[str, torch.cuda.Stream] = {}
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def stream(self, lane: str) -> AbstractContextManager[object]:
        stream = self._streams.get(lane)
        if stream is None:
            stream = self._streams[lane] = torch.cuda.Stream(self.torch_device)
        return torch.cuda.stream(stream)

    def mark(self) -> Marker | None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.torch_device))
        return event

    def wait(self, marker: Marker | None) -> None:
        if marker is not None:
            torch.cuda.current_stream(self.torch_device).wait_event(marker)

    def seconds_between(self, start: Marker, end: Marker) -> float:
        return float(start.elapsed_time(end)) / 1000

    def keep(self, tensor: Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(self.torch_device))

    def memory(self, host: HostTier) -> DeviceTier:
        return DeviceTier(self.torch_device)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.torch_device)

    def restart_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def free_bytes(self) -> int | None:
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def limit(self, nbytes: int) -> None:
        total = torch.cuda.mem_get_info(self.torch_device)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total), self.torch_device)

    def settle(self) -> None:
        torch.cuda.synchronize(self.torch_device)


class DeviceTier:
    """The accelerator's own memory. Copies go to the current stream and do not wait when the host side is page-locked."""

    def __init__(self, device: torch.device) -> None:
        self.meter: Meter[Tensor] = Meter()
        self._device = device

    def alloc(self, nbytes: int) -> Tensor:
        try:
            region = torch.zeros(max(nbytes, 1), dtype=torch.uint8, device=self._device)
        except torch.cuda.OutOfMemoryError as error:
            raise MemoryError(f"device memory: {nbytes / 1e9:.2f} GB could not be had; lower the GPU share") from error
        self.meter.add(region.nbytes)
        return region

    def free(self, region: Tensor) -> None:
        self.meter.remove(region.nbytes)

    def read_into(self, region: Tensor, start: int, out: Tensor) -> None:
        out.view(-1).view(torch.uint8).copy_(region[start : start + out.nbytes], non_blocking=True)

    def write_from(self, region: Tensor, start: int, source: Tensor) -> None:
        region[start : start + source.nbytes].copy_(source.view(-1).view(torch.uint8), non_blocking=True)


def open_device(name: str = "auto") -> Device:
    """ "auto" takes the GPU when there is one."""
    kind, _, index = name.partition(":")
    if kind == "auto":
        kind = CudaDevice.kind if torch.cuda.is_available() else Device.kind
    if kind == Device.kind:
        return Device()
    if kind == CudaDevice.kind:
        return CudaDevice(int(index) if index else None)
    raise ValueError(f"unknown device {name!r}; known are auto, cpu, cuda and cuda:N")
