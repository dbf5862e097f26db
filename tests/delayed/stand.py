"""Where plans are tried: on a GPU, or on pretended devices on which the same ways show the same faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import count
from typing import Any, Protocol
from unittest.mock import patch

import torch
from torch import Tensor

from h2o_flexgen.formats.kernel_table import TORCH
from h2o_flexgen.memory.device import CudaDevice, Device, EventMarker
from h2o_flexgen.session import loaded_model
from tests.clocked.checker import current
from tests.clocked.context import checked
from tests.clocked.device import ClockedDevice
from tests.clocked.tensor import ClockedTensor
from tests.delayed import plans
from tests.delayed.declared import declared, parts_told
from tests.delayed.device import Delays, delayed
from tests.delayed.late import ALSO_LATE, LANES, LateDevice
from tests.delayed.plans import Planned
from tests.delayed.sanitizer import Place, StreamSanitizer, on_a_gpu
from tests.delayed.spoilt import freed_is_spoilt
from tests.delayed.watched import WatchedHandover
from tests.delayed.ways import TOLD, UNTOLD, Way
from tests.kernels.variants import used

Opened = AbstractContextManager["StreamSanitizer | None"]


class Stand(Protocol):
    device: str  # as a case calls it
    lanes: tuple[str, ...]  # that can be late alone

    def plans(self) -> Sequence[Planned]: ...

    def kernels(self) -> AbstractContextManager[object]:
        """A context in which results have the bits that they have in every way."""

    def opened(self, way: Way, seed: int) -> Opened:
        """A context in which the engine opens a device as a way has it; with the sanitizer, if one watches."""

    def works(self) -> bool:
        """Whether a device still does what this process asks of it: after some errors CUDA refuses all else."""


class SeveralInOne(CudaDevice):
    """A GPU that is as many as a pipeline asks for, each with streams of its own."""

    def names_of(self, count: int) -> list[str]:
        return [self.kind] * count


class OnGPU:
    device = CudaDevice.kind
    lanes = ("load", "store", "compute")

    def plans(self) -> Sequence[Planned]:
        return plans.on_a_gpu()

    def kernels(self) -> AbstractContextManager[object]:
        return nullcontext()

    @contextmanager
    def opened(self, way: Way, seed: int) -> Iterator[StreamSanitizer | None]:
        watch = StreamSanitizer(on_a_gpu(whole=way.sanitizer == TOLD), way.sanitizer == UNTOLD) if way.sanitizer else None
        with ExitStack() as stack:
            if watch is not None:
                stack.enter_context(_watched_by(watch, way))
                if way.sanitizer == TOLD:
                    stack.enter_context(declared(watch))
            stack.enter_context(patch.object(loaded_model, "open_device", lambda name: self._device(way, seed, watch)))
            if way.spoils:
                stack.enter_context(freed_is_spoilt())
            yield watch

    def works(self) -> bool:
        try:
            return bool((torch.ones(1, device=self.device) + 1).item() == 2)
        except RuntimeError:
            return False

    def _device(self, way: Way, seed: int, watch: StreamSanitizer | None) -> Device:
        if way.late == "":
            return SeveralInOne()
        late = None if way.late is None else (way.late,)
        device = delayed(SeveralInOne, Delays(seed, torch.cuda._sleep, late), watch or nullcontext)
        if watch is not None:
            device.capture = _captured_by(watch, device.capture)  # type: ignore[method-assign]
        return device


class Pretended:
    """Copies are late on one pretended device, and a sanitizer watches another one: each finds what a GPU would show."""

    device = "pretended"
    lanes = LANES

    def plans(self) -> Sequence[Planned]:
        return plans.for_a_trial()

    def kernels(self) -> AbstractContextManager[object]:
        return used(TORCH)

    @contextmanager
    def opened(self, way: Way, seed: int) -> Iterator[StreamSanitizer | None]:
        with ExitStack() as stack:
            watch, numbers = None, count()
            if way.sanitizer:
                stack.enter_context(checked())
                current().streams_are_quick = True
                watch = StreamSanitizer(_clocked_place(), way.sanitizer == UNTOLD)
                stack.enter_context(_watched_by(watch, way))
            made = partial(_late, way) if watch is None else partial(_clocked, watch)
            stack.enter_context(patch.object(loaded_model, "open_device", lambda name: made(next(numbers))))
            if way.spoils:
                stack.enter_context(freed_is_spoilt())
            yield watch

    def works(self) -> bool:
        return True


def _late(way: Way, number: int) -> Device:
    return LateDevice(() if way.late == "" else (*LANES, *ALSO_LATE) if way.late is None else (way.late,))


def _clocked(watch: StreamSanitizer, number: int) -> Device:
    """`number`: among the devices of a pipeline."""
    device = ClockedDevice(number)
    device.handover = WatchedHandover(device.handover, watch)
    device.capture = _unjudged_by(watch, device.capture)  # type: ignore[method-assign]
    return device


STANDS: dict[str, Callable[[], Stand]] = {"gpu": OnGPU, "pretended": Pretended}


@contextmanager
def _watched_by(watch: StreamSanitizer, way: Way) -> Iterator[None]:
    with ExitStack() as stack:
        if way.sanitizer == UNTOLD:
            stack.enter_context(untold())
        stack.enter_context(parts_told(watch))
        stack.enter_context(watch.listening())
        stack.enter_context(watch())
        yield


@contextmanager
def untold() -> Iterator[None]:
    """Nothing tells the sanitizer what a query has found."""
    with patch.object(EventMarker, "query", lambda marker: bool(marker.event.query())):
        yield


def _clocked_place() -> Place:
    def seen(tensor: Tensor) -> Tensor | None:
        return tensor.inner if isinstance(tensor, ClockedTensor) else None

    return Place(lambda: current().stream, seen, whole=True, held_first=lambda: current().lock)


Capture = Callable[[Callable[[], None]], Callable[[], None]]


def _captured_by(watch: StreamSanitizer, capture: Capture) -> Any:
    """A graph is replayed unseen: its launches are judged as they were captured."""

    def captured(work: Callable[[], None]) -> Callable[[], None]:
        noted, launches = watch.captured(work)
        replay = capture(noted)

        def replayed() -> None:
            replay()
            watch.replayed(launches)

        return replayed

    return captured


def _unjudged_by(watch: StreamSanitizer, capture: Capture) -> Any:
    """Where replays are seen, what happens while work is captured is none of the sanitizer's business."""
    return lambda work: capture(watch.captured(work)[0])
