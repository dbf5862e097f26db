"""The tiers that data may live on, and Site: where a plan is run. A site is made once by the code that opens devices, and all
planning for these devices reads it."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import NamedTuple

from h2o_flexgen.formats.kernel_table import CPU, Processor, choose
from h2o_flexgen.formats.table import PLAIN

DEVICE, HOST, DISK = "device", "host", "disk"
TIERS = (DEVICE, HOST, DISK)  # the fastest first; without an accelerator, the device's share lies on the host
TIER_NAMES = {DEVICE: "GPU", HOST: "CPU", DISK: "disk"}  # as people read them
ON_CPU, ON_ACCELERATOR = "bfloat16", "float16"  # the usual types


class AdapterRoom(NamedTuple):
    """What the adapters of rows take where they are computed with."""

    beside: tuple[tuple[str, int], ...] = ()  # the tensors that they change, each with the bytes of all that is added to it
    working: int = 0  # bytes that are held while what one of them adds is made
    number: int = 0  # of adapters

    def of(self, tensors: Container[str]) -> int:
        """Bytes that they take on a device that has these tensors."""
        own = self.held(tensors)
        return own + self.working if own else 0

    def held(self, tensors: Container[str]) -> int:
        """Bytes of their matrices beside these tensors."""
        return sum(nbytes for name, nbytes in self.beside if name in tensors)


NO_ADAPTERS = AdapterRoom()


def on_tier(tier: str) -> str:
    """The place in words: `in CPU memory`."""
    return f"on {TIER_NAMES[tier]}" if tier == DISK else f"in {TIER_NAMES[tier]} memory"


@dataclass(frozen=True)
class Site:
    accelerator: bool = False  # has memory of its own, so that all has to be loaded and stored
    writes_weights: bool = False  # the disk share of the weights is not there yet but written for the run
    processor: Processor = field(default_factory=Processor)
    threads: int = 1  # of the CPU
    graph_bytes: int | None = None  # that an accelerator takes for a graph; None: it is not known whether graphs hold there
    writes_prefixes: bool = False  # a thread writes prefixes that rows share to a folder
    adapters: AdapterRoom = NO_ADAPTERS  # what those of rows take, on the tier that computes

    def usual_dtype(self, stored: str | None = None) -> str:
        """The default type to compute in: bf16 on CPUs, some of which have instructions for products of it;
        on an accelerator the checkpoint's type of 16 bits if it has such instructions, else fp16, for which all have them."""
        if not self.accelerator:
            return ON_CPU
        return stored if stored is not None and stored in self.processor.instructions else ON_ACCELERATOR

    def reads(self, op: str, format: str, dtype: str, rows: float = 1, width: int = 1) -> bool:
        """Whether something does this with the bytes as they are."""
        return choose(op, format, dtype, self.processor.runs, rows, width) is not None

    def has_kernel(self, op: str, dtype: str, format: str = PLAIN, width: int = 1) -> bool:
        """Whether a kernel does this with values in this format, and not functions of torch, which widen them in memory."""
        kernel = choose(op, format, dtype, self.processor.runs, width=width)
        return kernel is not None and bool(kernel.libraries)

    def threads_of(self, op: str, dtype: str, format: str = PLAIN) -> int:
        """Threads of the kernel in C that does this with values in this format; 0 where torch or a GPU does."""
        return self.threads if self.processor.device == CPU and self.has_kernel(op, dtype, format) else 0
