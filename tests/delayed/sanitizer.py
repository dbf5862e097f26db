"""torch's stream sanitizer in every thread: by itself it sees only what the thread launches that has entered it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class InThread(TorchDispatchMode):
    """Hands what a thread launches to the one sanitizer of the process, one operation at a time."""

    def __init__(self, sanitizer: Any, lock: threading.Lock) -> None:
        super().__init__()
        self._sanitizer, self._lock = sanitizer, lock

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self._lock:
            return self._sanitizer.__torch_dispatch__(func, types, args, kwargs or {})


class LaneSanitizer:
    def __init__(self, sanitizer: Any) -> None:
        self._sanitizer, self._lock = sanitizer, threading.Lock()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with InThread(self._sanitizer, self._lock):
            yield


def of_torch() -> LaneSanitizer:
    """torch makes its own when the module is imported, and from then on notes every event."""
    from torch.cuda._sanitizer import cuda_sanitizer

    return LaneSanitizer(cuda_sanitizer.dispatch)
