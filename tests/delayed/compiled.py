"""Compiles what the contract launches on a GPU, on a machine without one: a GPU that is lent for minutes need not wait for it.

    TRITON_CACHE_DIR=/tmp/kernels python -m tests.delayed.compiled --capability 90

Every plan runs on a driver that is pretended. Nothing is computed, so new memory is filled with zeros, and tokens mean nothing.
The folder goes along, to the same place on the other machine, with TRITON_CACHE_DIR set to it there as well. It serves the same
version of Triton; of its files those that end with .cubin, .json and .so are enough.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.pretended_driver import pretend_a_gpu
from h2o_flexgen.formats.kernel_table import CUDA, HALVES, TRITON, Processor
from h2o_flexgen.kernels import operations
from h2o_flexgen.sampling import sampler
from h2o_flexgen.session import loaded_model
from tests.delayed import plans, trying
from tests.delayed.plans import Planned
from tests.delayed.sanitizer import StreamSanitizer
from tests.delayed.trying import Bench
from tests.delayed.ways import BAD, OK, A, Way
from tests.helpers.pretended import PretendedDevice

CACHE = "TRITON_CACHE_DIR"
MAKE_MEMORY = (torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")


class Compiling:
    """A stand whose kernels are compiled and launched nowhere."""

    device = "cpu"
    lanes: tuple[str, ...] = ()

    def plans(self) -> Sequence[Planned]:
        return [replace(planned, has_graphs=False) for planned in plans.on_a_gpu()]  # a graph has the same kernels

    def kernels(self) -> AbstractContextManager[object]:
        return nullcontext()

    @contextmanager
    def opened(self, way: Way, seed: int) -> Iterator[StreamSanitizer | None]:
        with patch.object(loaded_model, "open_device", lambda name: PretendedDevice()):
            yield None

    def works(self) -> bool:
        return True


@contextmanager
def as_a_gpu(folder: Path, capability: int) -> Iterator[None]:
    """A context in which kernels in Triton are chosen and compiled, and nothing is said of what they leave undone."""
    pretend_a_gpu(folder, capability)
    there = Processor(CUDA, TRITON, HALVES)
    with ExitStack() as stack:
        for owner, name in MAKE_MEMORY:
            stack.enter_context(patch.object(owner, name, _with_zeros(getattr(owner, name))))
        stack.enter_context(patch.object(operations, "processor", lambda _: there))
        stack.enter_context(patch.object(sampler, "_refuse_broken"))
        stack.enter_context(patch.object(trying, "recorded_logits", lambda: nullcontext({})))
        yield


def _with_zeros(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(make)
    def made(*given: Any, **named: Any) -> Tensor:
        return make(*given, **named).zero_()

    return made


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.delayed.compiled", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--capability", type=int, default=90, help="of the GPU (default: %(default)s, a Hopper)")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="take every Nth plan alone")
    options = parser.parse_args(arguments)
    if CACHE not in os.environ:
        parser.error(f"set {CACHE} to the folder that goes along")
    found, stand = Counter[str](), Compiling()
    with tempfile.TemporaryDirectory() as place, as_a_gpu(Path(place), options.capability):
        bench = Bench.of(stand, Path(place) / "checkpoints", Path(place) / "references")
        for number, planned in list(enumerate(stand.plans()))[:: options.every]:
            result = bench.tried(number, planned, A)
            found[result.verdict] += 1
            if result.verdict not in (OK, BAD):  # what is not computed is not right
                print(f"plan {number}: {result.error} {result.words}", flush=True)
    folders = sum(one.is_dir() for one in Path(os.environ[CACHE]).iterdir())
    print(f"{folders} kernels and launchers for {found.total()} plans are in {os.environ[CACHE]}")
    return 0 if found.keys() <= {OK, BAD} else 1


if __name__ == "__main__":
    sys.exit(main())
