"""torch's stream sanitizer, in every thread and without what makes it cry wolf.

By itself it sees only what the thread launches that has entered it; its hooks run in any thread, without a lock; empty tensors
count as each other's memory if Python gives them one number; and what is made in the likeness of a tensor counts as a read of
it. Here alarms are collected, and nothing is raised or printed. What torch does not see, kernels of others, is declared. So are
parts of memory that are used at the same time.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.cuda import _gpu_trace as traced
from torch.utils._python_dispatch import TorchDispatchMode

REGISTRIES = {
    "event_creation": traced.EventCreationCallbacks,
    "event_deletion": traced.EventDeletionCallbacks,
    "event_record": traced.EventRecordCallbacks,
    "event_wait": traced.EventWaitCallbacks,
    "event_synchronization": traced.EventSynchronizationCallbacks,
    "memory_allocation": traced.MemoryAllocationCallbacks,
    "memory_deallocation": traced.MemoryDeallocationCallbacks,
    "stream_creation": traced.StreamCreationCallbacks,
    "stream_synchronization": traced.StreamSynchronizationCallbacks,
    "device_synchronization": traced.DeviceSynchronizationCallbacks,
}


def _unheard() -> Any:
    """torch's module, which makes a sanitizer of its own when it is imported: that one hears of nothing."""
    with ExitStack() as stack:
        for registry in REGISTRIES.values():
            stack.enter_context(patch.object(registry, "callback_list", []))
        from torch.cuda import _sanitizer
    return _sanitizer


of_torch = _unheard()


class Place(NamedTuple):
    """Where a device of a test has things."""

    stream: Callable[[], Any]  # the current one
    seen: Callable[[Tensor], Tensor | None]  # a tensor on the device, as torch has it; None for others
    whole: bool  # accesses are of all the memory that a tensor lies in, not of where it begins
    held_first: Callable[[], AbstractContextManager[object]] = nullcontext  # a lock that the device holds while it calls


def on_a_gpu(whole: bool) -> Place:
    """Buffers are used by one visit at a time, so that nothing is lost if accesses are of the whole, and parts that begin
    elsewhere are seen; parts that are used at the same time are told. The sanitizer itself knows where tensors begin, and no
    more."""
    return Place(lambda: torch.cuda.current_stream().cuda_stream, lambda tensor: tensor if tensor.is_cuda else None, whole)


class StreamSanitizer:
    def __init__(self, place: Place, as_torch_has_it: bool = False) -> None:
        """`as_torch_has_it`: empty tensors and likenesses count as accesses."""
        self.alarms: Counter[str] = Counter()  # by the pair of accesses
        self._place, self._as_torch_has_it = place, as_torch_has_it
        self._handler = of_torch.EventHandler()
        self._parts: dict[int, tuple[int, ...]] = {}  # where parts begin, behind the first one of a memory
        self._lock = threading.RLock()
        self._own = threading.local()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """A context in which it hears of streams, events and memory."""
        with ExitStack() as stack:
            for name, registry in REGISTRIES.items():
                stack.enter_context(patch.object(registry, "callback_list", [partial(self._hear, name)]))
            stack.enter_context(patch.object(of_torch, "traceback", _Lines))
            yield

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """A context in which it sees what this thread launches."""
        with _InThread(self):
            yield

    @property
    def launches(self) -> int:
        """The accesses that it has judged."""
        return int(self._handler.seq_num)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Takes locks in one order: memory that is given back, at whatever line, asks for that of the device."""
        with self._place.held_first(), self._lock:
            yield

    def _hear(self, what: str, *given: int) -> None:
        with self._locked():
            getattr(self._handler, f"_handle_{what}")(*given)
            if what == "memory_deallocation":
                for start in self._parts.pop(given[0], ()):
                    self._handler.tensors_accessed.accesses.pop(start, None)

    # -- parts of memory -------------------------------------------------------------------------------------------------

    def part(self, region: Tensor) -> None:
        """Tells that the bytes from here on are used while what lies before them is."""
        if not self._place.whole or (seen := self._place.seen(region)) is None:
            return
        with self._locked():
            memory, start, known = _memory(seen), seen.data_ptr(), self._handler.tensors_accessed.accesses
            before, *_ = self.cells(region)
            if start == before:
                return
            if before in known:  # what was done to all of it was done to this
                known[start] = replace(known[before], reads=[*known[before].reads])
            self._parts[memory] = tuple(sorted((*self._parts.get(memory, ()), start)))  # another one: threads read it

    def cells(self, tensor: Tensor) -> Sequence[int]:
        """The parts of memory that a tensor lies in, by where they begin; none if it is not on the device."""
        if (seen := self._place.seen(tensor)) is None:
            return ()
        if not self._place.whole:
            return (seen.data_ptr(),)
        memory = _memory(seen)
        if not (starts := self._parts.get(memory)):
            return (memory,)
        first = seen.data_ptr()
        last = sum((size - 1) * stride for size, stride in zip(seen.shape, seen.stride())) * seen.itemsize
        begun = bisect_right(starts, first)
        return (starts[begun - 1] if begun else memory, *starts[begun : bisect_right(starts, first + last)])

    # -- launches --------------------------------------------------------------------------------------------------------

    def dispatched(self, func: Any, args: Any, kwargs: Any) -> Any:
        schema, arguments = func._schema, _Arguments(self.cells, counts_empty=self._as_torch_has_it)
        named = schema.name if self._as_torch_has_it else schema.name.partition("::")[2]
        is_likeness = bool(of_torch.FACTORY_FUNCTION_REGEX.match(named))
        arguments.parse_inputs(schema, args, kwargs, is_factory=is_likeness)
        outcome = func(*args, **kwargs)
        arguments.parse_outputs(schema, outcome, is_factory=is_likeness)
        self._launched(schema.name.partition("::")[2], arguments)
        return outcome

    def declare(self, name: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        """Tells of a launch that torch does not see."""
        arguments = _Arguments(self.cells)
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                arguments._handle_argument(tensor, is_write, metadata_only=False)
        self._launched(name, arguments)

    def _launched(self, name: str, arguments: Any) -> None:
        launch = Launch(name, frozenset(arguments.dataptrs_read), frozenset(arguments.dataptrs_written))
        if (captured := getattr(self._own, "captured", None)) is not None:
            captured.append(launch)
        elif launch.reads or launch.writes:
            self._judge(launch)

    def _judge(self, launch: Launch) -> None:
        aliases: dict[int, list[str]] = {address: [] for address in (*launch.reads, *launch.writes)}
        with self._locked():
            found = self._handler._handle_kernel_launch(
                self._place.stream(), set(launch.reads - launch.writes), set(launch.writes), set(), launch.name, aliases
            )
        for error in found:
            self.alarms[f"{_told(error.current_access)} is not behind {_told(error.previous_access)}"] += 1

    # -- graphs ----------------------------------------------------------------------------------------------------------

    def captured(self, work: Callable[[], None]) -> tuple[Callable[[], None], list[Launch]]:
        """Work that is captured, not done, and the launches that it consists of once it was captured."""
        launches = list[Launch]()

        def noted() -> None:
            self._own.captured = launches
            try:
                work()
            finally:
                self._own.captured = None

        return noted, launches

    def replayed(self, launches: Iterable[Launch]) -> None:
        for launch in launches:
            self._judge(launch)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Launch(NamedTuple):
    name: str
    reads: frozenset[int]
    writes: frozenset[int]


class _InThread(TorchDispatchMode):
    def __init__(self, sanitizer: StreamSanitizer) -> None:
        super().__init__()
        self._sanitizer = sanitizer

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.record_stream.default:
            return func(*args, **(kwargs or {}))
        return self._sanitizer.dispatched(func, args, kwargs or {})


class _Arguments(of_torch.ArgumentHandler):  # type: ignore[misc, name-defined]
    """The accesses of a launch, as torch's schema of a function says."""

    def __init__(self, cells: Callable[[Tensor], Sequence[int]], counts_empty: bool = False) -> None:
        super().__init__()
        self._cells, self._counts_empty = cells, counts_empty

    def _handle_argument(
        self, value: Any, is_write: bool, metadata_only: bool, name: str | None = None, is_output: bool = False
    ) -> None:
        if not isinstance(value, Tensor) or not (cells := self._cells(value)):
            return
        if not value.numel():
            if not self._counts_empty:
                return
            cells = [place or id(value) for place in cells]
        if is_write:
            self.dataptrs_written.update(cells)
        elif not metadata_only:
            self.dataptrs_read.update(cells)


class _Line(NamedTuple):
    place: str  # the file
    lineno: int | None


class _Lines:
    """What the sanitizer asks Python's traceback for, and no more than is told: it takes half of the time otherwise, as each
    file of a stack is looked for on the disk."""

    @staticmethod
    def walk_stack(frame: FrameType | None) -> FrameType | None:
        return frame

    class StackSummary:
        @staticmethod
        def extract(frame: FrameType | None, lookup_lines: bool = False) -> list[_Line]:
            found, frame = list[_Line](), frame or sys._getframe(1)
            while frame is not None:
                if place := _place_of(frame.f_code.co_filename):
                    found.append(_Line(place, frame.f_lineno))
                frame = frame.f_back
            return found


def _told(access: Any) -> str:
    """What an access does, and the line that asks for it."""
    line = next(reversed(access.stack_trace), None)
    verb = "writing" if access.type is of_torch.AccessType.WRITE else "reading"
    return f"{access.operator} {verb} at {f'{line.place}:{line.lineno}' if line else 'a test'}"


@lru_cache(None)
def _place_of(file: str) -> str:
    """A file of the package, or the one that spoils buffers; of all others nothing."""
    if file.endswith("/delayed/spoilt.py"):
        return "spoilt.py"
    return file.rpartition("/h2o_flexgen/")[2] if "/h2o_flexgen/" in file and "/tests/" not in file else ""
