"""What pyproject.toml cannot say: the kernels in C, and that the folder configs/ is the package h2o_flexgen.configs.

The kernels are optional: where they cannot be compiled, the package does their work in torch.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shlex
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import partial
from pathlib import Path
from shutil import copyfile

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.modified import newer_group

KERNELS = Path("h2o_flexgen/kernels")
PROCESSORS = {"baseline": []}  # one library for each; the one that fits is chosen when it is loaded
if platform.machine().lower() in ("x86_64", "amd64"):
    AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mbmi2"]  # by name: compilers that know levels of x86-64 are younger than these
    AVX512 = [*AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "cd", "dq", "vl"))]
    VNNI = [*AVX512, "-mavx512vnni"]
    PROCESSORS |= {"avx2": AVX2, "avxvnni": [*AVX2, "-mavxvnni"], "avx512": AVX512, "avx512vnni": VNNI}
    BF16 = [*VNNI, "-mavx512bf16"]
    PROCESSORS |= {"avx512bf16": BF16, "avx512amx": [*BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"]}
INTEL, REQUEST_FOR_TILES = "GenuineIntel", (158, 0x1023, 18)  # arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA
LONGEST = (  # sources of which a compiler takes longest
    *("stored_int8_product.c", "decode_attention.c", "chosen_attention.c", "stored_dots.c", "stored_decode.c"),
    *("int8_product.c", "packed_slots.c", "tile_product.c", "choose_slots.c"),
)
INTRINSICS = "immintrin.h"  # a third of a second of every file, if it is read anew
BUILD = "H2O_FLEXGEN_BUILD"  # names of some of them, or "all"
OPTIMISED = [] if "-O" in os.environ.get("CFLAGS", "") else ["-O3", "-g0"]  # a level in CFLAGS wins


def requested():
    """The libraries that BUILD names; none if it is not set."""
    names = os.environ.get(BUILD, "").split()
    if names == ["all"]:
        return [*PROCESSORS]
    if unknown := [name for name in names if name not in PROCESSORS]:
        allowed = ", ".join(PROCESSORS)
        raise SystemExit(f"{BUILD} names {', '.join(unknown)}; allowed are {allowed}, with blanks between them, or all")
    return names


def for_this_processor():
    """The baseline and the best library that this processor runs; all where the system does not say what the processor has."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return [*PROCESSORS]
    has = {word.replace("_", "") for line in lines if line.startswith("flags") for word in line.split()}
    if "amxtile" in has and not (tiles_are_given() and compiles(PROCESSORS["avx512amx"])):
        has.discard("amxtile")
    fitting = [name for name, flags in PROCESSORS.items() if has.issuperset(flag[2:].replace("-", "") for flag in flags)]
    if any(line.startswith("vendor_id") and INTEL in line for line in lines):
        fitting = [name for name in fitting if name != "avx512bf16"]  # pairs have half the rate of float32 there
    return [fitting[0], *fitting[1:][-1:]]  # PROCESSORS has the best ones last


def tiles_are_given():
    """Whether the system lets a process use tiles of registers (AMX), which a processor may have in vain."""
    try:
        return ctypes.CDLL(None).syscall(*REQUEST_FOR_TILES) == 0
    except (AttributeError, OSError, TypeError):
        return False


REQUESTED = requested()


def compiles(flags):
    """Whether the compiler knows these flags: older ones do not know the newest processors."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    return succeeds([*compiler, *flags, "-fsyntax-only", "-x", "c", os.devnull])


def may_fail(name, in_place):
    """Whether a build goes on without a library: one that was not asked for, or whose processor the compiler does not know.
    Where there is no compiler, only a build in place ends."""
    if not compiles([]):
        return not in_place
    return not (in_place or REQUESTED) or not compiles(PROCESSORS[name])


def succeeds(command):
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def compile_beside(pool, compiler, sources, **others):
    """The object files of sources, compiled in turn by the threads of a pool, first those that take longest."""
    ordered = sorted(sources, key=lambda source: [Path(source).name != name for name in LONGEST])
    made = {source: pool.submit(compiler.compile, [source], **others) for source in ordered}
    return [file for source in sources for file in made[source].result()]


def with_header_read(compiler, folder, args):
    """The arguments with which a compiler takes what it has read of a header once, for all files of a library. One that cannot
    do so reads the header itself."""
    header = Path(folder) / "intrinsics.h"
    header.parent.mkdir(parents=True, exist_ok=True)
    header.write_text(f"#include <{INTRINSICS}>\n")
    command, with_it = [*compiler.compiler_so, *args], ["-include", str(header)]
    tries = [["-c", "-x", "c-header", str(header), "-o", f"{header}.gch"], [*with_it, "-fsyntax-only", "-x", "c", os.devnull]]
    return [*args, *with_it] if all(succeeds([*command, *more]) for more in tries) else args


class BuildBeside(build_ext):
    """Builds libraries beside each other: the files of all pass one pool. They have the same sources, so each has a folder for
    what is compiled.

    A checkout is used where it is installed, so it gets what this processor runs. A wheel may go elsewhere, and gets all. Where
    a library cannot be made, the old one goes: it would be used on, and nothing would say that it is old.
    """

    def finalize_options(self):
        super().finalize_options()
        self.jobs, self.parallel = self.parallel or os.cpu_count(), len(PROCESSORS)  # those of each library wait for the pool's
        self.for_checkout, in_place = self.inplace or self.editable_mode, self.inplace and not self.editable_mode
        names = REQUESTED or (for_this_processor() if self.for_checkout else [*PROCESSORS])
        self.extensions = [extension for extension in self.extensions if processor_of(extension) in names]
        for extension in self.extensions:
            extension.optional = may_fail(processor_of(extension), in_place)

    def build_extensions(self):
        with ThreadPoolExecutor(self.jobs) as self.pool:
            super().build_extensions()

    def build_extension(self, ext):
        """A checkout that is installed again, with other extras, keeps the libraries that are younger than their sources."""
        beside, made = KERNELS / Path(self.get_ext_filename(ext.name)).name, Path(self.get_ext_fullpath(ext.name))
        if self.editable_mode and not self.force and not newer_group([*ext.sources, *ext.depends, "setup.py"], str(beside)):
            made.parent.mkdir(parents=True, exist_ok=True)
            copyfile(beside, made)
            return
        own = copy(self)
        own.build_temp = os.path.join(self.build_temp, ext.name)
        own.compiler = copy(self.compiler)
        own.compiler.compile = partial(compile_beside, self.pool, self.compiler)
        is_due = self.force or newer_group([*ext.sources, *ext.depends], str(made))
        if is_due and any(flag.startswith("-mavx") for flag in ext.extra_compile_args):
            ext.extra_compile_args = with_header_read(self.compiler, own.build_temp, ext.extra_compile_args)
        try:
            build_ext.build_extension(own, ext)
        except Exception:
            for old in (made, *([beside] if self.for_checkout else [])):
                old.unlink(missing_ok=True)
            raise


def processor_of(extension):
    return extension.name.rpartition("._")[2]


def kernels(processor, flags):
    return Extension(
        f"h2o_flexgen.kernels._{processor}",
        sources=[str(file) for file in sorted(KERNELS.glob("*.c"))],
        depends=[str(file) for file in sorted(KERNELS.glob("*.h"))],
        extra_compile_args=[*OPTIMISED, "-fopenmp-simd", "-pthread", "-fno-math-errno", "-fno-trapping-math", *flags],
        extra_link_args=["-pthread"],
    )


setup(
    packages=[*find_packages(include=["h2o_flexgen", "h2o_flexgen.*"]), "h2o_flexgen.configs"],
    ext_modules=[kernels(processor, flags) for processor, flags in PROCESSORS.items()],
    cmdclass={"build_ext": BuildBeside},
)
