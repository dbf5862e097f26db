"""What the processor could compute if nothing had to be read: the loops of peaks.c, compiled when they are needed.

Which loops count follows from the library of kernels that is loaded, so a smaller instruction set can be looked at alone.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.backends.cpu import get_cpu_capability

from h2o_flexgen.formats.kernel_table import CPU, TORCH
from h2o_flexgen.kernels.native import BF16, processor

SOURCE = Path(__file__).with_suffix(".c")
ROUNDS = 1_000_000  # some milliseconds


@dataclass(frozen=True)
class Loops:
    """The names of functions in peaks.c."""

    fp32: str
    integer: str
    bf16: str | None = None  # where the processor has such instructions
    integer_of_4_bits: str | None = None  # where codes of 4 bits may be summed in fewer instructions


PAIRS, TILES = "dpbf16_512", "tiles_of_bf16"  # older compilers know no tiles
LOOPS: Mapping[str, Loops] = {
    "baseline": Loops("multiply_add_128", "madd_128"),
    "avx2": Loops("fma_256", "maddubs_256", integer_of_4_bits="maddubs_256_of_4_bits"),
    "avxvnni": Loops("fma_256", "dpbusd_256"),
    "avx512": Loops("fma_512", "maddubs_512", PAIRS, "maddubs_512_of_4_bits"),
    "avx512vnni": Loops("fma_512", "dpbusd_512", PAIRS),
    "avx512bf16": Loops("fma_512", "dpbusd_512", PAIRS),
    "avx512amx": Loops("fma_512", "dpbusd_512", TILES),
}
WITHOUT_LIBRARY = {"AVX512": "avx512", "AVX2": "avx2"}  # by what torch has found


@dataclass(frozen=True)
class Peaks:
    """Operations per second of all threads; a product and its sum are two."""

    fp32: float
    integer: float
    bf16: float | None
    integer_of_4_bits: float | None

    @property
    def exact(self) -> float:
        return max(self.fp32, self.bf16 or 0.0)

    @classmethod
    def measured(cls, threads: int | None = None, seconds: float = 0.3) -> Peaks | None:
        """None where peaks.c cannot be compiled: without a C compiler, or on another kind of processor."""
        with tempfile.TemporaryDirectory() as folder:
            library = _compiled(Path(folder))
        if library is None:
            return None
        here, is_new = processor(CPU), hasattr(library, TILES)
        loops = LOOPS[here.build if here.build != TORCH else WITHOUT_LIBRARY.get(get_cpu_capability(), "baseline")]
        of_each = {
            "fp32": loops.fp32,
            "integer": loops.integer,
            "bf16": None if BF16 not in here.instructions else loops.bf16 if is_new or loops.bf16 != TILES else PAIRS,
            "integer_of_4_bits": loops.integer_of_4_bits,
        }
        count = threads or torch.get_num_threads()
        rates = {kind: name and _rate(library, name, count, seconds) for kind, name in of_each.items()}
        return cls(**rates)  # type: ignore[arg-type]


def _compiled(folder: Path) -> ctypes.CDLL | None:
    compiler, file = shutil.which("cc") or shutil.which("gcc"), folder / "peaks.so"
    if compiler is None:
        return None
    command = [compiler, "-O2", "-shared", "-fPIC", str(SOURCE), "-o", str(file)]
    if subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:
        return None
    return ctypes.CDLL(str(file))


def _rate(library: ctypes.CDLL, name: str, threads: int, seconds: float) -> float:
    """Operations per second of so many threads at their best. Python waits outside its lock while they count."""
    loop = library[name]
    loop.argtypes, loop.restype = [ctypes.c_long], ctypes.c_long
    work, best, end = threads * ROUNDS * loop(0), float("inf"), time.perf_counter() + seconds
    with ThreadPoolExecutor(threads) as pool:
        while best == float("inf") or time.perf_counter() < end:
            start = time.perf_counter()
            list(pool.map(loop, [ROUNDS] * threads))
            best = min(best, time.perf_counter() - start)
    return work / best
