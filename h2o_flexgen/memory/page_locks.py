"""Host memory that CUDA has page-locked: ranges are registered with its driver, and unregistered again.

The driver keeps a list of its own. It refuses a range that is already in the list, and does not remove a range when its pages
are freed. It also keeps the last error of a thread, and reports it at the next kernel launch, which did not cause it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

PORTABLE = 1  # page-locked for every device of the process, and in every thread
SUCCESS = 0


class Runtime(Protocol):
    """The functions of torch.cuda.cudart() that are used; they return CUDA's status."""

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int: ...

    def cudaHostUnregister(self, pointer: int) -> int: ...


class CudaPageLocks:
    """`launch` launches any kernel. That raises and clears the last error of this thread; torch offers no other way."""

    def __init__(self, runtime: Runtime, launch: Callable[[], object]) -> None:
        self._runtime = runtime
        self._launch = launch
        self._process = os.getpid()

    def lock(self, address: int, nbytes: int) -> None:
        status = int(self._runtime.cudaHostRegister(address, nbytes, PORTABLE))
        if status != SUCCESS:
            self._forget_error()
            raise MemoryError(
                f"page-locking {nbytes / 1e9:.2f} GB of host memory failed (CUDA error {status}); raise the limit on locked "
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
                f"CUDA did not unlock host memory (CUDA error {status}); start a new process if copies fail from here on",
                RuntimeWarning,
                stacklevel=2,
            )

    def _forget_error(self) -> None:
        with suppress(RuntimeError):
            self._launch()
