"""Every kernel compiles for every GPU without spilling, loads widely and fits: held by compilers, with no GPU at hand.

A default run compiles a few kernels for the oldest GPU that launches them; compiling all launches for each GPU is marked slow.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest

from h2o_flexgen.kernels.gpu import functions
from tests.kernels.gpu.launch import CAPABILITIES, OLDEST, Compiled, Launch

ROOT = Path(__file__).parents[3]
LAUNCHES = sorted(file.stem for file in Path(__file__).with_name("launches").glob("[!_]*.py"))
MODULES = {name: f"tests.kernels.gpu.launches.{name}" for name in LAUNCHES}
SOME = ("norms",)  # of the files that compile in few seconds
BAD = {
    "narrow": ["no loads of 16 bytes", "loads of less than 2 bytes"],
    "spilling": ["more than 40 registers", "spills"],
    "sharing": ["more than 65536 bytes shared"],
    "twice": ["2 launches and not 1"],
}


def compiled(cache: Path, gpu: str, *modules: str) -> subprocess.CompletedProcess[str]:
    surroundings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    surroundings["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-m", "tests.kernels.gpu.compiling", gpu, *modules]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=surroundings, check=False)


@pytest.fixture(scope="module")
def for_the_oldest(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, Sequence[str]]]:
    """What a process says of each launch, and which limits it breaks: at last of those that break them."""
    run = compiled(
        tmp_path_factory.mktemp("compiled"), OLDEST, *map(MODULES.__getitem__, SOME), "tests.kernels.gpu.bad_launches"
    )
    assert run.returncode == 1, run.stderr[-4000:]
    return [(line, line.split("; BROKEN: ")[1:]) for line in run.stdout.splitlines()]


def test_kernels_keep_to_their_limits_on_the_oldest_gpu(for_the_oldest: list[tuple[str, Sequence[str]]]) -> None:
    launches = [one for one in for_the_oldest if one[0].partition(":")[0] not in BAD]
    assert len(launches) > len(SOME) and [line for line, broken in launches if broken] == []


def test_what_breaks_its_limits_is_seen(for_the_oldest: list[tuple[str, Sequence[str]]]) -> None:
    found = [(line.partition(":")[0], broken) for line, broken in for_the_oldest if broken]
    assert dict(found) == BAD and len(found) == len(BAD)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [*map(str, CAPABILITIES)])
def test_kernels_keep_to_their_limits_on_every_gpu(gpu: str, tmp_path: Path) -> None:
    run = compiled(tmp_path, gpu, *MODULES.values())
    assert run.returncode == 0, "".join(line for line in run.stdout.splitlines(True) if "BROKEN" in line) + run.stderr[-4000:]


def test_every_kernel_has_a_launch_that_is_not_rare() -> None:
    compiled, all_of_them = set[str](), set[str]()
    for module in MODULES.values():
        for launch in import_module(module).LAUNCHES:
            all_of_them |= launch.loads.keys()
            compiled |= set() if launch.is_rare else launch.loads.keys()
    assert compiled == all_of_them


def test_every_file_of_kernels_has_launches() -> None:
    with_kernels = sorted({function.__module__.rpartition(".")[2] for function in functions.KERNELS})
    called = {name: (Path(__file__).with_name("launches") / f"{name}.py").read_text(encoding="utf-8") for name in LAUNCHES}
    assert [name for name in with_kernels if f"kernels.gpu.{name} import" not in "".join(called.values())] == []


PTX = """
    @%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
    ld.global.b8 %rs1, [%rd2];
    @%p2 ld.global.L1::evict_first.v2.b64 { %rd5, %rd6 }, [ %rd3 + 0 ];
    ld.global.nc.u16 %rs2, [%rd4];
    cp.async.cg.shared.global [ %r7 + 0 ], [ %rd8 + 0 ], 0x10, %r9;
    st.global.v4.b32 [ %rd1 + 0 ], { %r1, %r2, %r3, %r4 };
"""
USAGE = "Function k:\n REG:40 STACK:16 SHARED:0 LOCAL:8 CONSTANT[0]:388 TEXTURE:0"


def test_loads_and_usage_are_read() -> None:
    found = Compiled.of("k", 75, USAGE, 100_000, PTX)
    assert (found.registers, found.spilled, found.loads) == (40, 24, {1: 1, 2: 1, 16: 3})
    limits = Launch("k", lambda: None, registers=32, loads={"k": 32}, narrowest={"k": 2})
    assert len(list(found.violations(limits))) == 5
