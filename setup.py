"""Package metadata. The folder configs/ travels with the package as h2o_flexgen.configs."""

from pathlib import Path

from setuptools import find_packages, setup

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
    package_data={"h2o_flexgen.configs": ["models/*.json", "machines/*.yaml", "plans/*.yaml"]},
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
    extras_require={"test": ["pytest", "hypothesis", "ruff", "mypy", "types-PyYAML", "types-psutil", "types-tqdm"]},
)
