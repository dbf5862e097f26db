"""Shortage: memory has run out. Recognises the errors that mean it, and stops a block when host memory is so nearly exhausted
that the system might kill the process."""

from __future__ import annotations

import errno
import time
from dataclasses import dataclass

import psutil
import torch

from h2o_flexgen.memory.host import available_bytes
from h2o_flexgen.memory.threads import ADVICE, CANNOT_START

# More than decode allocates between two checks, and less than is left by a plan that fills its memory: a plan that just fits
# must not be stopped.
FLOOR_BYTES = 32 << 20
SECONDS_BETWEEN_LOOKS = 0.2  # a check takes a quarter of a millisecond

ON_HOST = ("can't allocate memory", "not enough memory")  # in torch's RuntimeErrors
ON_DEVICE = ("out of memory", "ALLOC_FAILED")  # from the driver, and from libraries that need working memory


@dataclass(frozen=True)
class Shortage:
    tier: str  # host or device
    reason: str  # one line


def shortage_of(error: BaseException | None) -> Shortage | None:
    """The lack of memory behind an error; None if it is of another kind."""
    if error is None:
        return None
    text = str(error)
    of_device = isinstance(error, torch.OutOfMemoryError) or isinstance(error.__cause__, torch.OutOfMemoryError)
    if of_device or (isinstance(error, RuntimeError) and any(words in text for words in ON_DEVICE)):
        return Shortage("device", _line(error))
    of_system = isinstance(error, OSError) and error.errno in (errno.ENOMEM, errno.EAGAIN)
    if isinstance(error, RuntimeError) and CANNOT_START in text:
        return Shortage("host", ADVICE)
    of_torch = isinstance(error, RuntimeError) and any(words in text for words in ON_HOST)
    return Shortage("host", _line(error)) if isinstance(error, MemoryError) or of_system or of_torch else None


def _line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


class HostGuard:
    """Checks from time to time, while a block runs, that host memory is not nearly exhausted.

    Only memory that is available without swapping counts, within every control group: without it, the system swaps or kills
    processes. Page cache counts as free. The process's own size is not compared with its budget: it includes more than the run,
    and a budget that is exceeded a little does no harm while there is memory. A block is only stopped if it holds at least as
    much as should be left: if other processes took the memory, a smaller block would not free enough."""

    def __init__(self, spare_bytes: int = 0) -> None:
        """`spare_bytes` were left by earlier blocks, for this one to use."""
        self._process = psutil.Process()
        self._before = self._process.memory_info().rss - spare_bytes
        self._next_look = 0.0

    def look(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + SECONDS_BETWEEN_LOOKS
        left = available_bytes()
        if left < FLOOR_BYTES and self._process.memory_info().rss - self._before >= FLOOR_BYTES:
            raise MemoryError(f"host memory: only {left / 1e6:.0f} MB are left before the system swaps or kills processes")
