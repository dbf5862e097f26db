"""Package metadata. The folder configs/ travels with the package as h2o_flexgen.configs.

The kernels in C are optional: where they cannot be compiled, the package does their work in torch.
"""

from __future__ import annotations

import platform
from pathlib import Path

from setuptools import Extension, find_packages, setup

KERNELS = Path("h2o_flexgen/kernels")
PROCESSORS = {"baseline": []}  # one library for each; the one that fits is chosen when it is loaded
if platform.machine().lower() in ("x86_64", "amd64"):
    AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mbmi2"]  # by name: compilers that know levels of x86-64 are younger than these
    PROCESSORS |= {"avx2": AVX2, "avx512": [*AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "cd", "dq", "vl"))]}


CHECKS = ["pytest", "pytest-xdist", "hypothesis", "ruff", "mypy", "types-PyYAML", "types-psutil", "types-tqdm"]
EVAL = ["lm_eval>=0.4.13,<0.5", "rouge-score"]


def kernels(processor, flags):
    return Extension(
        f"h2o_flexgen.kernels._{processor}",
        sources=[str(file) for file in sorted(KERNELS.glob("*.c"))],
        depends=[str(file) for file in sorted(KERNELS.glob("*.h"))],
        extra_compile_args=["-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", *flags],
        extra_link_args=["-fopenmp"],
        optional=True,
    )


setup(
    name="h2o_flexgen",
    version="0.1.0",
    description="Large language models in little memory: weights, KV cache and activations on GPU, CPU memory and disk",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=[*find_packages(include=["h2o_flexgen", "h2o_flexgen.*"]), "h2o_flexgen.configs"],
    package_dir={"h2o_flexgen.configs": "configs"},
    package_data={
        "h2o_flexgen.configs": ["models/*.json", "machines/*.yaml", "plans/*.yaml"],
        "h2o_flexgen.demo": ["*.txt", "*/*.json", "*/*.safetensors"],
        "h2o_flexgen.kernels": ["*.c", "*.h"],
    },
    ext_modules=[kernels(processor, flags) for processor, flags in PROCESSORS.items()],
    install_requires=[
        "torch>=2.6,<2.14",
        "transformers>=4.51,<6",
        "safetensors",
        "numpy",
        "tqdm",
        "pulp>=2.8,<4",  # 4.x comes without a solver
        "psutil",
        "pyyaml",
    ],
    entry_points={"lm_eval.models": ["h2o_flexgen = h2o_flexgen.lm_eval_model:LmEvalModel"]},
    extras_require={
        "test": [*CHECKS, *EVAL, "accelerate"],  # which the harness's own model imports: ours is held against it
        "eval": EVAL,
        "plot": ["matplotlib"],
        "bench": ["accelerate", "airllm", "matplotlib"],  # not deepspeed: to be built, it wants torch to be there already
    },
)
