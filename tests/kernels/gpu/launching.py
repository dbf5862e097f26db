"""Launches through a driver that is pretended, which notes what CUDA's would be told: a program of its own.

    python -m tests.kernels.gpu.launching FOLDER CALL [more names of calls]

It must not interpret (no TRITON_INTERPRET). The last line is a JSON document of what was seen.
"""

from __future__ import annotations

import ctypes
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from benchmarks.launches import Made, empty, subjects
from benchmarks.pretended_driver import PretendedDriver, pretend_a_gpu
from h2o_flexgen.kernels.gpu import launching
from h2o_flexgen.kernels.gpu.launching import Launcher
from h2o_flexgen.kernels.gpu.norms import rms_norm

SIZES = {"fp32": 4, "i32": 4, "i64": 8}  # of parameters; addresses have 8 bytes
SIZES_OF_LAUNCH, STREAM = (0, 28), (32, 8)  # where a config has those of grid, block and shared memory, and the stream


@dataclass(frozen=True)
class Seen:
    """A call of a kernel's function."""

    name: str
    launches: list[str]
    through_the_door: int  # of them, in a later call
    tensors: int  # made by a call
    parameters: int  # that the driver is told of, in all launches
    as_the_door: bool  # the driver is told the same by a launcher as by Triton's own door
    mistake_is_seen: bool  # another number gives other bytes


class Told:
    """What the driver is told of a launch: sizes, and the bytes of all parameters."""

    def __init__(self, driver: PretendedDriver) -> None:
        self._sizes: list[int] = []
        self._last: list[Any] = []
        driver.listen(self._note)

    def _note(self, config: int, function: int, parameters: int) -> None:
        places = (ctypes.c_void_p * len(self._sizes)).from_address(parameters)
        given = [ctypes.string_at(place, size) for place, size in zip(places, self._sizes)]
        launch = [ctypes.string_at(config + start, count) for start, count in (SIZES_OF_LAUNCH, STREAM)]
        self._last = [*launch, function, *given]

    def of(self, launch: Callable[[], object], signature: list[str]) -> list[Any]:
        self._sizes = [8 if one[0] == "*" else SIZES[one] for one in signature if one != "constexpr"]
        launch()
        self._sizes = []  # of what is launched next nothing is known
        return self._last


@contextmanager
def doors() -> Iterator[list[str]]:
    """The kernels that are launched through Triton's own door."""
    run, names = JITFunction.run, list[str]()

    def noted(kernel: JITFunction, *args: Any, **kwargs: Any) -> Any:
        names.append(kernel.__name__)
        return run(kernel, *args, **kwargs)

    noted.__wrapped__ = run  # type: ignore[attr-defined]  # whose source is asked for
    with patch.object(JITFunction, "run", noted):
        yield names


@contextmanager
def compared(told: Told) -> Iterator[list[tuple[str, int, bool, bool]]]:
    """Each launch three times with the same tensors: through the door, by its launcher, and by one with a mistake in it."""
    found, launch = list[tuple[str, int, bool, bool]](), Launcher.__call__

    def each(launcher: Launcher, *tensors: Tensor) -> None:
        signature = [*launcher.through_the_door(tensors).src.signature.values()]
        by_door = told.of(lambda: launcher.through_the_door(tensors), signature)
        alike = told.of(lambda: launch(launcher, *tensors), signature) == by_door
        others = [one + 1 if isinstance(one, int) and not isinstance(one, bool) else one for one in launcher._behind]
        with patch.object(launcher, "_behind", others):
            mistake = told.of(lambda: launch(launcher, *tensors), signature) != by_door
        found.append((launcher.kernel.__name__, len(by_door) - 3, alike, mistake))

    with patch.object(Launcher, "__call__", each):
        yield found


def calls(driver: PretendedDriver, names: Collection[str]) -> Iterator[Seen]:
    told = Told(driver)
    for name, call in (one for one in subjects() if one[0] in names):
        call()
        with doors() as through, Made() as made:
            call()
        with compared(told) as found:
            call()
        kernels, parameters, alike, mistakes = zip(*found, strict=True)
        yield Seen(name, [*kernels], len(through), made.tensors, sum(parameters), all(alike), all(mistakes))


def by_the_door() -> Iterator[tuple[str, Counter[str]]]:
    """Launches that take the door: of tensors that do not begin where the compiler was told, and with another Triton."""
    x = empty(4 * 64 + 1)
    aligned, elsewhere, weight = x[:-1].view(4, 64), x[1:].view(4, 64), empty(64)
    for name, own in (("aligned", aligned), ("elsewhere", elsewhere)):
        rms_norm(own, weight, 1e-6)
        with doors() as through:
            rms_norm(own, weight, 1e-6)
        yield name, Counter(through)
    launching.why_not.cache_clear()
    with patch.object(launching, "CALLED", "kernel.run(something=else)"):
        rms_norm(aligned, weight, 1e-5)
        with doors() as through:
            rms_norm(aligned, weight, 1e-5)
        yield launching.why_not() or "", Counter(through)


def main(folder: Path, *names: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with torch.inference_mode():
        driver = pretend_a_gpu(folder)
        document = {"calls": [asdict(one) for one in calls(driver, names)], "doors": dict(by_the_door())}
    print(json.dumps(document))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
