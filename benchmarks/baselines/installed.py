"""Finds what a system needs on this machine (packages, their versions, a GPU) without importing any of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from ctypes.util import find_library
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from benchmarks.baselines.request import Request


def missing_package(*modules: str, how: str = "") -> str | None:
    """The first module that cannot be imported, and how to get it; None if all can."""
    for module in modules:
        if find_spec(module) is None:
            return f"{module} is not installed: {how or f'pip install {module}'}"
    return None


def missing_gpu(request: Request) -> str | None:
    if request.device == "cuda" and find_library("cuda") is None and not _torch_finds_a_gpu():
        return "there is no CUDA driver here: ask for the device cpu"
    return None


def _torch_finds_a_gpu() -> bool:
    """Some machines have the driver where only its own loader looks. This imports torch, which is not done without need."""
    import torch

    return torch.cuda.is_available()


def versions_of(packages: Iterable[str]) -> Mapping[str, str]:
    return {package: found for package in packages if (found := _version_of(package)) is not None}


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
