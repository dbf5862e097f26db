"""Triton's way to a GPU on a machine without one: kernels are compiled and handed to a driver that only counts launches.

All that a launch takes of the processor is done as beside a GPU, up to the call of CUDA's driver. Nothing is computed: what
kernels would have written is whatever lay there. A process that has used it has no other GPU.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_suffix(".c")
NAME = "libcuda.so.1"
LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
STREAM = 7  # the address of a stream that is none


class PretendedDriver:
    """What Triton asks of its driver."""

    def __init__(self, folder: Path, capability: int) -> None:
        """`folder`: where the driver is built, once."""
        self._library = _loaded(folder)
        self._launched = ctypes.c_long.in_dll(self._library, "launched")
        from triton.backends.nvidia.driver import CudaLauncher, CudaUtils

        self.utils, self.launcher_cls, self._capability = CudaUtils(), CudaLauncher, capability

    def listen(self, told: Callable[[int, int, int], None]) -> None:
        """Has a function told of each launch: where its config and its parameters are, and which function it is."""
        self._listener = LISTENER(told)
        self._library.listen(self._listener)

    @property
    def launched(self) -> int:
        """Launches so far."""
        return self._launched.value

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return STREAM

    def allocate_default_profile_scratch(self, *given: object) -> None:
        return None


def pretend_a_gpu(folder: Path, capability: int = 90) -> PretendedDriver:
    """From here on Triton launches on a GPU of this capability. It must not be set to interpret."""
    assert not os.environ.get("TRITON_INTERPRET"), "kernels are interpreted, and none is launched"
    driver = PretendedDriver(folder, capability)
    from triton.runtime import driver as drivers

    drivers.set_active(driver)
    return driver


def _loaded(folder: Path) -> ctypes.CDLL:
    file = folder / NAME
    if not file.exists():
        compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
        command = [compiler, "-O2", "-shared", "-fPIC", f"-Wl,-soname,{NAME}", "-o", str(file), str(SOURCE)]
        subprocess.run(command, check=True)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    return ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)  # first of its name: Triton's own parts find it
