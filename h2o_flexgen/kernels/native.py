"""The library of C kernels: built when the package is installed, if there is a C compiler, once for each kind of processor.

It holds no Python: functions are called with pointers and sizes.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor

from h2o_flexgen.kernels.sizes import DTYPES, shared
from h2o_flexgen.kernels.table import BASELINE, LIBRARIES, TORCH, WIDE, Processor

SWITCH = "H2O_FLEXGEN_KERNELS"  # "torch" turns the library off; the name of a variant selects that one
KINDS: Mapping[torch.dtype, int] = {getattr(torch, name): kind for kind, name in enumerate(DTYPES)}  # the numbering of C
BF16, X86 = "bfloat16", ("x86_64", "amd64")
NO_KIND = -1  # for bytes that are only moved
RUNS: Mapping[str, Sequence[str]] = {"AVX512": LIBRARIES, "AVX2": [name for name in LIBRARIES if name not in WIDE]}


def native_library() -> ctypes.CDLL:
    """The loaded library. Only kernels that were chosen for it ask for it."""
    native = _loaded()[1]
    assert native is not None
    return native


def processor(device: str) -> Processor:
    """A kind of device, and the library that is loaded here; none where none was built or none can be loaded."""
    return Processor(device, build := _loaded()[0], _instructions(build))


@cache
def _instructions(build: str) -> tuple[str, ...]:
    """What torch multiplies with instructions of its own. Without them it goes value by value, ten times as slow as float32.
    Whoever asks for the library of an older processor gets what that one would have."""
    if platform.machine().lower() not in X86:
        return (BF16,) if torch.ops.mkldnn._is_mkldnn_bf16_supported() else ()
    is_wide = torch.backends.cpu.get_cpu_capability() == "AVX512" and build in (TORCH, *WIDE)
    return (BF16,) if is_wide and torch.cpu._is_avx512_bf16_supported() else ()


def in_use() -> str:
    """The name of the loaded library, for reports."""
    name = _loaded()[0]
    return TORCH if name == TORCH else f"C ({name})"


def variants() -> list[str]:
    """The libraries that were built and that run on this processor, the best first."""
    return list(_usable())


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
    fitting = RUNS.get(torch.backends.cpu.get_cpu_capability(), [BASELINE])
    loaded = {variant: _load(variant) for variant in fitting}
    return {variant: native for variant, native in loaded.items() if native is not None}


def _load(variant: str) -> ctypes.CDLL | None:
    """Loads a library, unless it is missing, was built from older sources or needs instructions that the processor lacks."""
    for suffix in EXTENSION_SUFFIXES:
        with suppress(OSError, AttributeError):
            native = ctypes.CDLL(str(Path(__file__).parent / f"_{variant}{suffix}"))
            if native.kernels_version() == shared().kernels_version and native.runs_here():
                return native
    return None


def pointer(tensor: Tensor) -> ctypes.c_void_p:
    assert tensor.device.type == "cpu" and tensor.is_contiguous()
    return ctypes.c_void_p(tensor.data_ptr())


class Places(ctypes.Structure):
    """The addresses of values (rows, heads, slots or tokens, width), contiguous within a slot; strides are in bytes."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_long) for name in ("row", "head", "slot")),
        ("kind", ctypes.c_int),
    )

    @classmethod
    def of(cls, tensor: Tensor, kind: int = NO_KIND) -> Places:
        assert tensor.device.type == "cpu" and tensor.stride(3) == 1
        return cls(tensor.data_ptr(), *(stride * tensor.itemsize for stride in tensor.stride()[:3]), kind)
