"""A pretended accelerator on a CPU whose lanes are late: what they are asked to copy or to fill waits until something waits for
them."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from h2o_flexgen.memory.device import Accelerator, StreamEvent
from tests.clocked.tensor import facts
from tests.helpers.recorded import repeated

LANES = ("load", "store")  # those whose work is copies
ALSO_LATE = ("pass",)  # where several devices compute


class _Streams:
    """The work that streams have yet to do."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._left: defaultdict[str, list[Callable[[], object]]] = defaultdict(list)

    def put_off(self, stream: str, copy: Callable[[], object]) -> None:
        with self.lock:
            self._left[stream].append(copy)

    def is_late(self, stream: str) -> bool:
        with self.lock:  # not while it catches up
            return bool(self._left[stream])

    def catch_up(self, *streams: str) -> None:
        with self.lock, torch.inference_mode(), _disable_current_modes():  # those of a lane that waits would put it off again
            for stream in streams or tuple(self._left):
                left, self._left[stream] = self._left[stream], []
                for copy in left:
                    copy()


class _Point:
    """An event of a stream: what waits for it makes the stream catch up."""

    def __init__(self, streams: _Streams) -> None:
        self._streams, self.stream = streams, ""

    @property
    def cuda_event(self) -> int:
        return id(self)

    def record(self, stream: _Stream) -> None:
        self.stream = stream.name

    def query(self) -> bool:
        return not self._streams.is_late(self.stream)

    def synchronize(self) -> None:
        self._streams.catch_up(self.stream)

    def elapsed_time(self, end: _Point) -> float:
        return 0.0


class _Stream(NamedTuple):
    name: str

    def wait_event(self, event: _Point) -> None:
        event.synchronize()  # which may be of another device


class _PuttingOff(TorchDispatchMode):
    def __init__(self, stream: str, streams: _Streams) -> None:
        super().__init__()
        self._stream, self._streams = stream, streams

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_copy = func is torch.ops.aten.copy_.default and len(args) > 2 and args[2]
        if is_copy or func is torch.ops.aten.fill_.Scalar:
            self._streams.put_off(self._stream, lambda: func(*args))
            return args[0]
        known = facts(func)
        if known.writes or not known.may_view:
            self._streams.catch_up(self._stream)  # what works with values comes behind what was put off
        return func(*args, **(kwargs or {}))


class LateDevice(Accelerator):
    def __init__(self, late: Collection[str] = (*LANES, *ALSO_LATE)) -> None:
        super().__init__()
        self._late, self._all = late, _Streams()
        self._own = threading.local()

    @contextmanager
    def stream(self, lane: str) -> Iterator[None]:  # type: ignore[override]
        before = getattr(self._own, "stream", "default")
        self._own.stream = lane
        try:
            if lane in self._late:
                with _PuttingOff(lane, self._all):
                    yield
            else:
                yield
        finally:
            self._own.stream = before

    def _new_event(self, timed: bool, blocking: bool) -> StreamEvent:
        return _Point(self._all)

    def _current_stream(self) -> _Stream:
        return _Stream(getattr(self._own, "stream", "default"))

    def _page_locked(self, like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype)

    def settle(self) -> None:
        self._all.catch_up()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return repeated(work)
