"""The library of C kernels: built when the package is installed, if there is a C compiler, once for each kind of processor.

It holds no Python: functions are called with pointers and sizes.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor

from h2o_flexgen.kernels.sizes import DTYPES, shared
from h2o_flexgen.kernels.table import LIBRARIES, TORCH, Processor

SWITCH = "H2O_FLEXGEN_KERNELS"  # "torch" turns the library off; the name of a variant selects that one
KINDS: Mapping[torch.dtype, int] = {getattr(torch, name): kind for kind, name in enumerate(DTYPES)}  # the numbering of C
NO_KIND = -1  # for bytes that are only moved
RUNS: Mapping[str, Sequence[str]] = {"AVX512": LIBRARIES, "AVX2": LIBRARIES[1:]}


def native_library() -> ctypes.CDLL:
    """The loaded library. Only kernels that were chosen for it ask for it."""
    native = _loaded()[1]
    assert native is not None
    return native


def processor(device: str) -> Processor:
    """A kind of device, and the library that is loaded here; none where none was built or none can be loaded."""
    return Processor(device, _loaded()[0])


def in_use() -> str:
    """The name of the loaded library, for reports."""
    name = _loaded()[0]
    return TORCH if name == TORCH else f"C ({name})"


def variants() -> list[str]:
    """The libraries that were built and that run on this processor, the best first."""
    return list(_files())


@cache
def _loaded() -> tuple[str, ctypes.CDLL | None]:
    files, asked = _files(), os.environ.get(SWITCH)
    if asked and asked not in (TORCH, *files):
        raise ValueError(f"{SWITCH} is {asked!r}; known here: {', '.join((TORCH, *files))}")
    for name, file in files.items():
        if asked in (None, "", name) and (native := _load(file)) is not None:
            return name, native
    return TORCH, None


def _load(file: Path) -> ctypes.CDLL | None:
    """Loads a library, unless the file is missing or was built from older sources."""
    try:
        native = ctypes.CDLL(str(file))
        return native if native.kernels_version() == shared().kernels_version else None
    except (OSError, AttributeError):
        return None


def _files() -> dict[str, Path]:
    """The files that may be loaded. What torch says of the processor decides: the library must not need more than torch has
    found."""
    fitting = RUNS.get(torch.backends.cpu.get_cpu_capability(), LIBRARIES[2:])
    folder = Path(__file__).parent
    places = ((variant, folder / f"_{variant}{suffix}") for variant in fitting for suffix in EXTENSION_SUFFIXES)
    return {variant: file for variant, file in places if file.is_file()}


def pointer(tensor: Tensor) -> ctypes.c_void_p:
    assert tensor.device.type == "cpu" and tensor.is_contiguous()
    return ctypes.c_void_p(tensor.data_ptr())


class Places(ctypes.Structure):
    """The addresses of the values of heads, (rows, heads, slots or tokens, width). Values of one slot are contiguous; strides
    are in bytes."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_long) for name in ("row", "head", "slot")),
        ("kind", ctypes.c_int),
    )

    @classmethod
    def of(cls, tensor: Tensor, kind: int = NO_KIND) -> Places:
        assert tensor.device.type == "cpu" and tensor.stride(3) == 1
        return cls(tensor.data_ptr(), *(stride * tensor.itemsize for stride in tensor.stride()[:3]), kind)
