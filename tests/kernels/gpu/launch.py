"""Launch: a call of a kernel as a run makes it, and what its machine code must keep to on every GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

CAPABILITIES = 75, 80, 90, 100  # T4; A100; H100; B200
OLDEST = "oldest"  # instead of one of them: for each launch the oldest that makes it
SHARED_BYTES = 64 << 10  # per block on the smallest of them
MOST_BEHIND = 65535  # programs in each dimension of a grid but the first
LOADS = re.compile(r"\bld\.global\S*?(?:\.v(\d))?\.[bufs](\d+)\s")
COPIES = re.compile(r"\bcp\.async\.c[ag]\.shared\.global\S*\s+\[[^\]]*\],\s*\[[^\]]*\],\s*(0x[0-9a-f]+|\d+)")


@dataclass(frozen=True)
class Launch:
    """The function is called with tensors of the device "meta", which have sizes and no data: it may compute nothing with them
    that needs data. What it launches is compiled with just the arguments, types and hints that a run would have."""

    name: str
    call: Callable[[], object]
    registers: int = 128  # most per thread
    loads: Mapping[str, int] = field(default_factory=dict)  # by kernel: the bytes that its widest loads have at least
    narrowest: Mapping[str, int] = field(default_factory=dict)  # by kernel: no load has fewer bytes
    since: int = CAPABILITIES[0]  # GPUs from this capability on; older ones never launch it
    is_rare: bool = False  # another launch has the same kernels, and takes more of a GPU: not compiled for the oldest one alone
    kernels: int | None = None  # that the call launches; None: that is held nowhere


@dataclass(frozen=True)
class Compiled:
    """What the machine code of one kernel takes on one GPU."""

    kernel: str
    capability: int
    registers: int  # per thread
    spilled: int  # bytes per thread
    shared: int  # bytes per block
    loads: Mapping[int, int]  # from global memory: how many instructions there are, by their bytes

    @classmethod
    def of(cls, kernel: str, capability: int, usage: str, shared: int, ptx: str) -> Compiled:
        """Reads what `cuobjdump -res-usage` says, where what is spilled counts as stack, and the instructions of PTX."""
        registers, stack, local = (int(re.findall(rf"\b{name}:(\d+)", usage)[-1]) for name in ("REG", "STACK", "LOCAL"))
        loads: dict[int, int] = {}
        for width in loaded(ptx):
            loads[width] = loads.get(width, 0) + 1
        return cls(kernel, capability, registers, stack + local, shared, dict(sorted(loads.items())))

    def __str__(self) -> str:
        loads = ", ".join(f"{count} x {width} bytes" for width, count in self.loads.items()) or "none"
        taken = f"{self.registers} registers, {self.spilled} bytes spilled, {self.shared} bytes shared"
        return f"{self.kernel} on sm_{self.capability}: {taken}, loads {loads}"

    def violations(self, limits: Launch) -> Iterator[str]:
        if self.registers > limits.registers:
            yield f"more than {limits.registers} registers"
        if self.spilled:
            yield "spills"
        if self.shared > SHARED_BYTES:
            yield f"more than {SHARED_BYTES} bytes shared"
        wide, narrow = limits.loads.get(self.kernel, 0), limits.narrowest.get(self.kernel, 0)
        if max(self.loads, default=0) < wide:
            yield f"no loads of {wide} bytes"
        if min(self.loads, default=narrow) < narrow:
            yield f"loads of less than {narrow} bytes"


def loaded(ptx: str) -> Iterator[int]:
    """The bytes of each instruction that loads from global memory."""
    for vector, bits in LOADS.findall(ptx):
        yield int(vector or 1) * int(bits) // 8
    yield from (int(width, 0) for width in COPIES.findall(ptx))
