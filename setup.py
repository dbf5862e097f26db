"""What pyproject.toml cannot say: the kernels in C, and that the folder configs/ is the package h2o_flexgen.configs.

The kernels are optional: where they cannot be compiled, the package does their work in torch.
"""

from __future__ import annotations

import os
import platform
from copy import copy
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

KERNELS = Path("h2o_flexgen/kernels")
PROCESSORS = {"baseline": []}  # one library for each; the one that fits is chosen when it is loaded
if platform.machine().lower() in ("x86_64", "amd64"):
    AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mbmi2"]  # by name: compilers that know levels of x86-64 are younger than these
    AVX512 = [*AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "cd", "dq", "vl"))]
    VNNI = [*AVX512, "-mavx512vnni"]
    PROCESSORS |= {"avx2": AVX2, "avxvnni": [*AVX2, "-mavxvnni"], "avx512": AVX512, "avx512vnni": VNNI}
    PROCESSORS |= {"avx512bf16": [*VNNI, "-mavx512bf16"]}
BUILD = "H2O_FLEXGEN_BUILD"  # names of some of them: no others are built
OPTIMISED = [] if "-O" in os.environ.get("CFLAGS", "") else ["-O3"]  # whoever asks for a level in CFLAGS gets that one


def asked():
    names = os.environ.get(BUILD, "").split() or [*PROCESSORS]
    if unknown := [name for name in names if name not in PROCESSORS]:
        raise SystemExit(f"{BUILD} names {', '.join(unknown)}; allowed are {', '.join(PROCESSORS)}, with blanks between them")
    return names


class BuildBeside(build_ext):
    """Builds libraries beside each other. They have the same sources, so each has a folder of its own for what is compiled."""

    def finalize_options(self):
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def build_extension(self, ext):
        own = copy(self)
        own.build_temp = os.path.join(self.build_temp, ext.name)
        build_ext.build_extension(own, ext)


def kernels(processor, flags):
    return Extension(
        f"h2o_flexgen.kernels._{processor}",
        sources=[str(file) for file in sorted(KERNELS.glob("*.c"))],
        depends=[str(file) for file in sorted(KERNELS.glob("*.h"))],
        extra_compile_args=[*OPTIMISED, "-fopenmp-simd", "-pthread", "-fno-math-errno", "-fno-trapping-math", *flags],
        extra_link_args=["-pthread"],
        optional=True,
    )


setup(
    packages=[*find_packages(include=["h2o_flexgen", "h2o_flexgen.*"]), "h2o_flexgen.configs"],
    ext_modules=[kernels(processor, PROCESSORS[processor]) for processor in asked()],
    cmdclass={"build_ext": BuildBeside},
)
