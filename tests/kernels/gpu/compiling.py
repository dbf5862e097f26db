"""Compiles launches for a GPU that is not here, and says what their machine code takes: a program of its own.

    python -m tests.kernels.gpu.compiling 75 tests.kernels.gpu.launches.decode_attention [more files of launches]
    python -m tests.kernels.gpu.compiling oldest tests.kernels.gpu.launches.prompts

It must not interpret (no TRITON_INTERPRET). It prints what each kernel takes and ends with 1 where one breaks its limits.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partialmethod
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.kernels.gpu.launch import MOST_BEHIND, OLDEST, Compiled, Launch

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class AbsentGPU:
    """A driver of a GPU that can be compiled for."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # what was compiled for one device is kept for it

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiled_instead_of_launched(capability: int) -> Iterator[list[Any]]:
    """A context in which launches compile what they would launch, and collect it."""
    found: list[Any] = []
    run = JITFunction.run

    def collect(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        assert max(grid[1:], default=0) <= MOST_BEHIND, f"no GPU launches {kernel.__name__} over {grid}"
        found.append(run(kernel, *args, grid=grid, warmup=True, **options))

    driver.set_active(AbsentGPU(capability))
    with patch.object(JITFunction, "run", partialmethod(collect)):
        yield found


def compiled(launch: Launch, capability: int) -> list[Compiled]:
    with compiled_instead_of_launched(capability) as found:
        launch.call()
    return [measured(kernel, capability) for kernel in found]


def measured(kernel: Any, capability: int) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return Compiled.of(kernel.metadata.name, capability, usage, kernel.metadata.shared, kernel.asm["ptx"])


def report(launches: Sequence[Launch], gpu: str) -> int:
    """Prints what every launch takes; gives the number of limits that were broken."""
    broken = 0
    for launch in launches:
        capability = launch.since if gpu == OLDEST else int(gpu)
        if launch.since <= capability and not (launch.is_rare and gpu == OLDEST):
            kernels = compiled(launch, capability)
            assert kernels, f"{launch.name} launches nothing"
            for place, one in enumerate(kernels):
                violations = list(one.violations(launch))
                if place == 0 and len(kernels) != (launch.kernels or len(kernels)):
                    violations.append(f"{len(kernels)} launches and not {launch.kernels}")
                broken += len(violations)
                print(f"{launch.name}: {one}", *(f"BROKEN: {violation}" for violation in violations), sep="; ")
    return broken


if __name__ == "__main__":
    gpu, *modules = sys.argv[1:]
    sys.exit(min(1, sum(report(import_module(module).LAUNCHES, gpu) for module in modules)))
