"""The clocked device as torch knows it: a backend without kernels of its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.utils import backend_registration

from tests.clocked.checker import current
from tests.clocked.tensor import NAME, ClockedTensor, own_block

IS_POSSIBLE = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")  # since torch 2.10


@cache
def registered() -> torch.library.Library:
    """Tells torch of the device, once. What makes tensors past all modes of a thread, as `torch.tensor` does, comes here."""
    backend_registration._setup_privateuseone_for_python_backend(NAME)
    torch.get_device_module(NAME).__name__ = f"torch.{NAME}"  # transformers asks every device for it, in any later test
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    return library


def _made(inner: Tensor) -> ClockedTensor:
    checker = current()
    with checker.lock:
        return ClockedTensor(inner, own_block(inner, checker))


def _empty_strided(size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype, **_: object) -> ClockedTensor:
    return _made(torch.empty_strided(size, stride, dtype=dtype))


def _empty(size: Sequence[int], *, dtype: torch.dtype, **_: object) -> ClockedTensor:
    return _made(torch.empty(size, dtype=dtype))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """A copy of values of the host that are nowhere else, which the host waits for."""
    assert isinstance(target, ClockedTensor) and not isinstance(source, ClockedTensor)
    checker = current()
    with checker.lock:
        target.inner.copy_(source)
        checker.launched[checker.task, "copy_"] += 1
        checker.access(target.block, target.inner, True, *checker.launch("copy_"))
        checker.wait_for_stream("torch.tensor")
    return target
