"""Checks of GPUs that were kept: where graphs were found to hold on a kind of GPU, plans have them by default.

A check holds for the same GPU and driver, the same libraries and the same code, and is made by scripts/gpu_check.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterable, Mapping
from functools import cache
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import h2o_flexgen
from h2o_flexgen.core.files import write_text
from h2o_flexgen.planning.machine import kept_folder

MISSING = "none"
KEPT = "gpu_checks"  # the folder of all that are kept
PACKAGE = Path(h2o_flexgen.__file__).parent
ROOMS = ("core", "engine", "formats", "kernels", "kv", "memory", "models", "policies", "sampling", "schedule")  # make a step
PYTHON = (".py",)  # how files of it end, Triton's kernels too; those in C are in no graph of a GPU
DRIVER = Path("/proc/driver/nvidia/version")
CODE = "code"
# there is none, a damaged one, or no such device: a torch without CUDA asserts that it has it
NOT_KEPT = OSError, ValueError, KeyError, TypeError, RuntimeError, AssertionError


def kept_graph_bytes(device: torch.device | str) -> int | None:
    """The bytes that the GPU takes for a graph, as its check has measured them; None where no kept check was passed."""
    try:
        if not _checks_of(gpu_name(device)):  # most often: what takes some ms is then not done
            return None
        return int(json.loads(check_file(device).read_text(encoding="utf-8"))["graph_bytes"])
    except NOT_KEPT:
        return None


def outlived_check(device: torch.device | str) -> str | None:
    """Why the latest kept check of this GPU does not count any more; None where there is none, or it counts."""
    try:
        kept = max((json.loads(file.read_text(encoding="utf-8")) for file in _checks_of(gpu_name(device))), key=_when)
        own = what_is_checked(device)
        changed = [part for part, now in own.items() if kept[part] != now]
        told = ["other code" if part == CODE else f"{part} {kept[part]}, and not {own[part]}" for part in changed]
        return f"the check of this GPU of {kept['checked']} was made with {'; '.join(told)}" if told else None
    except NOT_KEPT:
        return None


def keep_check(device: torch.device | str, plans: int, graph_bytes: int) -> Path:
    """Keeps that so many plans were found to hold with graphs, and what a graph takes, in place of the checks of other code."""
    file, own = check_file(device), what_is_checked(device)
    found = {"plans": plans, "graph_bytes": graph_bytes, "checked": time.strftime("%Y-%m-%d %H:%M"), **own}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps(found, indent=1) + "\n")
    for other in _checks_of(own["gpu"]):
        if other != file and _is_of_these_libraries(other, own):
            other.unlink(missing_ok=True)
    return file


def _is_of_these_libraries(file: Path, own: Mapping[str, str]) -> bool:
    """Whether a kept check differs in nothing but the code. With other libraries it is another environment's; a damaged one is
    of no use to any."""
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        return all(kept[part] == now for part, now in own.items() if part != CODE)
    except NOT_KEPT:
        return True


def take_checks(places: Iterable[Path], folder: Path) -> None:
    """Copies the checks that are kept in these folders to another one. Each is found for what it holds for, and no other."""
    for place in places:
        for file in place.glob("*.json"):
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, folder / file.name)


def forget_check(device: torch.device | str) -> None:
    """Forgets the checks of this GPU that were kept, of older code too: a later one was not passed."""
    for file in _checks_of(gpu_name(device)):
        file.unlink(missing_ok=True)


def check_file(device: torch.device | str) -> Path:
    parts = what_is_checked(device)
    return kept_folder(KEPT) / f"{_in_names(parts['gpu'])}-{digest_of((), parts)}.json"


def what_is_checked(device: torch.device | str) -> Mapping[str, str]:
    """All that a check depends on."""
    return {
        "gpu": gpu_name(device),
        "driver": _driver(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        CODE: code_of_steps(),
    }


def gpu_name(device: torch.device | str) -> str:
    there = torch.device(device)
    name_of = getattr(torch.get_device_module(there), "get_device_name", None)
    return there.type if name_of is None else str(name_of(there))


@cache
def code_of_steps() -> str:
    """A digest of the code that a decode step is made of. It says the same of a checkout and of what is installed from it."""
    return digest_of(written_in((PACKAGE / room for room in ROOMS), PYTHON))


def written_in(places: Iterable[Path], endings: Iterable[str]) -> list[Path]:
    """The files of these folders, and those that are named themselves, in an order that does not depend on the machine."""
    there = (file for place in places for file in (place, *place.rglob("*")))
    return sorted(file for file in there if file.suffix in endings)


def digest_of(files: Iterable[Path], *parts: object) -> str:
    """Stands for what files hold and for values that JSON can write: others have it only if all of that is the same."""
    digest = blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8)
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _checks_of(gpu: str) -> list[Path]:
    return list(kept_folder(KEPT).glob(f"{_in_names(gpu)}-{'[0-9a-f]' * 16}.json"))


def _in_names(gpu: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", gpu.lower()).strip("-")


def _when(kept: Mapping[str, str]) -> str:
    return kept["checked"]


def _driver() -> str:
    """The version of the GPU's driver, where the system tells it."""
    try:
        found = re.search(r"\d+\.\d+[\d.]*", DRIVER.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return MISSING
    return found[0] if found else MISSING


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return MISSING
