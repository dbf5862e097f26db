"""The library of kernels: built when the package is installed, where a C compiler is, for several kinds of processor.

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

SWITCH = "H2O_FLEXGEN_KERNELS"  # "torch" does without the library; the name of a variant takes that one
TORCH = "torch"
RUNS: Mapping[str, Sequence[str]] = {"AVX512": ("avx512", "avx2", "baseline"), "AVX2": ("avx2", "baseline")}


@cache
def library() -> ctypes.CDLL | None:
    file = _files().get(_chosen())
    return None if file is None else ctypes.CDLL(str(file))


def in_use() -> str:
    """For reports."""
    chosen = _chosen()
    return TORCH if chosen == TORCH else f"C ({chosen})"


def variants() -> list[str]:
    """That were built and that this processor runs, the best first."""
    return list(_files())


def _chosen() -> str:
    known = [*variants(), TORCH]
    asked = os.environ.get(SWITCH) or known[0]
    if asked not in known:
        raise ValueError(f"{SWITCH} is {asked!r}; known here: {', '.join(known[::-1])}")
    return asked


def _files() -> dict[str, Path]:
    """What torch says of the processor decides: the library must not need more than torch has found."""
    fitting = RUNS.get(torch.backends.cpu.get_cpu_capability(), ("baseline",))
    folder = Path(__file__).parent
    places = ((variant, folder / f"_{variant}{suffix}") for variant in fitting for suffix in EXTENSION_SUFFIXES)
    return {variant: file for variant, file in places if file.is_file()}


def pointer(tensor: Tensor) -> ctypes.c_void_p:
    assert tensor.device.type == "cpu" and tensor.is_contiguous()
    return ctypes.c_void_p(tensor.data_ptr())
