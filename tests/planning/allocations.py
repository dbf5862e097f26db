"""Measures the bytes that code allocates in passing: the most that its tensors take at one time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class _Watch(TorchDispatchMode):
    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.seen = {tensor.untyped_storage()._cdata for tensor in known}
        self.alive_bytes = 0
        self.peak_bytes = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and saying so at every call takes longer than what is done in it."""
        return False

    def __torch_dispatch__(self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self._count(out.untyped_storage())
        elif isinstance(out, (tuple, list)):  # no operation nests its outcomes
            for made in out:
                if isinstance(made, Tensor):
                    self._count(made.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self.seen:
            return
        self.seen.add(storage._cdata)
        self.alive_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes)
        weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())

    def _gone(self, key: int, nbytes: int) -> None:
        self.seen.discard(key)
        self.alive_bytes -= nbytes


def peak_allocated(run: Callable[[], object], known: Iterable[Tensor]) -> int:
    """The peak of allocated bytes. `known` are the tensors that exist already; memory inside kernels is not seen."""
    watch = _Watch(known)
    with torch.inference_mode(), watch:
        run()
    return watch.peak_bytes
