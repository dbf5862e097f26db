"""The kernels that this machine has. Those in C are a library that is built when the package is installed, if there is a C
compiler, once for each kind of processor; it holds no Python, and is called with addresses of structs. Those for GPUs are
Triton's to compile, if it is installed: builds of torch for CUDA bring it.

Kernels in C share a team of threads (team.c), which is started when it is first wanted.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import cache, partial
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from h2o_flexgen.formats.kernel_sizes import DTYPES, shared
from h2o_flexgen.formats.kernel_table import BASELINE, CPU, CUDA, LIBRARIES, PAIRS, TORCH, TRITON, VNNI, WIDE, Processor
from h2o_flexgen.kernels.raw_memory import address_of

SWITCH = "H2O_FLEXGEN_KERNELS"  # "torch" turns all kernels off; the name of a library in C selects that one
KINDS: Mapping[torch.dtype, int] = {getattr(torch, name): kind for kind, name in enumerate(DTYPES)}  # the numbering of C
FP16, BF16, X86 = "float16", "bfloat16", ("x86_64", "amd64")
WITH_BF16 = (8, 0)  # compute capability of the first GPUs with instructions for bfloat16
NO_KIND = -1  # for bytes that are only moved
RUNS: Mapping[str, Sequence[str]] = {"AVX512": LIBRARIES, "AVX2": [name for name in LIBRARIES if name not in WIDE]}
SLOW_PAIRS = "GenuineIntel"  # its products of pairs have half the rate of float32: that library comes behind the one without
VALUES_OF_A_THREAD = 1 << 15  # some ten microseconds of work


def native_library() -> ctypes.CDLL:
    """The loaded library. Its kernels are called by `run`, which only those ask that were chosen for it."""
    native = _loaded()[1]
    assert native is not None
    return native


def processor(device: str) -> Processor:
    """A kind of device, and the kernels for it; none where none were built or none can be loaded."""
    return _cpu(_loaded()[0]) if device == CPU else _accelerator(device)


@cache
def _cpu(build: str) -> Processor:
    return Processor(CPU, build, _instructions(build))


@cache
def _accelerator(device: str) -> Processor:
    build = next(iter(variants(device)), TORCH) if os.environ.get(SWITCH) != TORCH else TORCH
    return Processor(device, build, _instructions_of_gpus() if device == CUDA else ())


@cache
def _has_triton() -> bool:
    return find_spec(TRITON) is not None


@cache
def _instructions_of_gpus() -> tuple[str, ...]:
    """What all GPUs of this machine multiply with instructions of their own. Others go value by value, ten times as slow."""
    if not torch.cuda.is_available():
        return ()
    least = min(torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count()))
    return (FP16, BF16) if least >= WITH_BF16 else (FP16,)


@cache
def _instructions(build: str) -> tuple[str, ...]:
    """What torch multiplies with instructions of its own. Without them it goes value by value, ten times as slow as float32.
    For the library of an older processor, these are the instructions of that processor."""
    if platform.machine().lower() not in X86:
        return (BF16,) if torch.ops.mkldnn._is_mkldnn_bf16_supported() else ()
    is_wide = torch.backends.cpu.get_cpu_capability() == "AVX512" and build in (TORCH, *WIDE)
    return (BF16,) if is_wide and torch.cpu._is_avx512_bf16_supported() else ()


def in_use(device: str = CPU) -> str:
    """The name of what computes on a kind of device, for reports."""
    return processor(device).kernels


def variants(device: str = CPU) -> list[str]:
    """The libraries that there are for a kind of device and that run here, the best first."""
    if device != CPU:
        return [TRITON] if device == CUDA and _has_triton() else []
    return list(_usable())


def unbuilt() -> str | None:
    """The library that suits this processor best, if this installation does not have it and has others."""
    usable = _usable()
    if not usable:
        return None
    native = next(iter(usable.values()))
    best = next(variant for variant in _fitting() if variant in usable or native.runs_here(variant.encode()))
    return None if best in usable else best


@cache
def _loaded() -> tuple[str, ctypes.CDLL | None]:
    usable, asked = _usable(), os.environ.get(SWITCH)
    if asked and asked not in (TORCH, *usable):
        raise ValueError(f"{SWITCH} is {asked!r}, which {_why_not(asked)}; known here: {', '.join((TORCH, *usable))}")
    if asked == TORCH or not usable:
        return TORCH, None
    name = asked or next(iter(usable))
    return name, usable[name]


def _why_not(asked: str) -> str:
    if asked not in LIBRARIES:
        return "is no library of kernels"
    return "was not built or needs instructions that this processor lacks"


def _usable() -> dict[str, ctypes.CDLL]:
    """The libraries that were built and that run here, best first: none may need more of the processor than torch has found."""
    loaded = {variant: _load(variant) for variant in _fitting()}
    return {variant: native for variant, native in loaded.items() if native is not None}


def _fitting() -> Sequence[str]:
    fitting = RUNS.get(torch.backends.cpu.get_cpu_capability(), [BASELINE])
    if PAIRS in fitting and SLOW_PAIRS in processor_facts("vendor_id"):
        others = [name for name in fitting if name != PAIRS]
        others.insert(others.index(VNNI) + 1, PAIRS)
        return others
    return fitting


def processor_facts(name: str) -> list[str]:
    """What the system says of each core under this name; nothing where it says nothing at all."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    return [value.strip() for key, _, value in (line.partition(":") for line in lines) if key.strip() == name]


@cache
def _load(variant: str) -> ctypes.CDLL | None:
    """Loads a library, unless it is missing, was built from older sources or needs instructions that the processor lacks."""
    for suffix in EXTENSION_SUFFIXES:
        with suppress(OSError, AttributeError):
            native = ctypes.CDLL(str(Path(__file__).parent / f"_{variant}{suffix}"))
            if native.kernels_version() == shared().kernels_version and native.runs_here(variant.encode()):
                return native
    return None


class CallRecorder(Protocol):
    """Notes calls of kernels instead of making them (kernels/recording.py)."""

    def note(self, name: str, given: ctypes.Structure, threads: int) -> None: ...

    def by_torch(self, work: Callable[..., object], given: Sequence[Tensor | None], out: Tensor) -> None: ...

    def lasting(self, values: Tensor) -> Tensor: ...

    def enter(self, place: str) -> None: ...


RECORDER: ContextVar[CallRecorder | None] = ContextVar("recorder", default=None)  # of what this thread does


def entry_of(name: str) -> int:
    """The address of a kernel."""
    address = ctypes.cast(getattr(native_library(), name), ctypes.c_void_p).value
    assert address is not None
    return address


def run(name: str, given: ctypes.Structure, threads: int) -> None:
    """Calls a kernel of the library: a function of C that takes the address of a struct, and how many threads may work on it.
    Everything that `given` points to must be kept alive by `given`, but for the memory of tensors. If this thread records, its
    recorder notes the call instead."""
    recorder = RECORDER.get()
    if recorder is None:
        getattr(native_library(), name)(ctypes.byref(given), threads)
    else:
        recorder.note(name, given, threads)


def threads_for(values: int) -> int:
    return max(1, min(torch.get_num_threads(), values // VALUES_OF_A_THREAD))


def start_team(threads: int) -> None:
    """Starts the team's threads while there is room for them. Where there is room for fewer, fewer compute."""
    if processor(CPU).build != TORCH:
        native_library().start_team(ctypes.c_int(threads))


def open_read_queue() -> tuple[int, Callable[[], object]]:
    """A queue of the system for reads, and what closes it. It is 0 where there is none."""
    queue = ctypes.c_int64()
    if processor(CPU).build == TORCH or not native_library().open_read_queue(ctypes.byref(queue)):
        return 0, int
    return queue.value, partial(native_library().close_read_queue, ctypes.byref(queue))


def pointer(tensor: Tensor, writes: bool = False) -> int:
    """`writes`: the tensor is not the kernel's own, and is written."""
    assert tensor.is_contiguous()
    return address_of(tensor, writes)


class ValuePlaces(ctypes.Structure):
    """The addresses of values (rows, heads, slots or tokens, width), contiguous within a slot; strides are in bytes."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_long) for name in ("row", "head", "slot")),
        ("kind", ctypes.c_int),
    )

    @classmethod
    def of(cls, tensor: Tensor, kind: int = NO_KIND, writes: bool = False) -> ValuePlaces:
        (row, head, slot, value), size = tensor.stride(), tensor.itemsize
        assert value == 1
        return cls(address_of(tensor, writes), row * size, head * size, slot * size, kind)
