"""Checks of GPUs that were kept: where graphs were found to hold on a kind of GPU, plans have them by default.

A check holds for the same GPU with the same libraries and the same version of this package, and is made by
scripts/gpu_check.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import h2o_flexgen
from h2o_flexgen.core.files import write_text
from h2o_flexgen.planning.machine import kept_folder

MISSING = "none"
KEPT = "gpu_checks"  # the folder of all that are kept


def kept_graph_bytes(device: torch.device | str) -> int | None:
    """The bytes that the GPU takes for a graph, as its check has measured them; None where no kept check was passed."""
    try:
        kept = json.loads(check_file(device).read_text(encoding="utf-8"))
        return int(kept["graph_bytes"])
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):  # there is none, a damaged one, or no such device
        return None


def keep_check(device: torch.device | str, plans: int, graph_bytes: int) -> Path:
    """Keeps that so many plans were found to hold with graphs, and what a graph takes."""
    file = check_file(device)
    found = {"plans": plans, "graph_bytes": graph_bytes, "checked": time.strftime("%Y-%m-%d %H:%M"), **what_is_checked(device)}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps(found, indent=1) + "\n")
    return file


def take_checks(places: Iterable[Path], folder: Path) -> None:
    """Copies the checks that are kept in these folders to another one. Each is found for what it holds for, and no other."""
    for place in places:
        for file in place.glob("*.json"):
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, folder / file.name)


def forget_check(device: torch.device | str) -> None:
    """Forgets a check that was kept: a later one was not passed."""
    check_file(device).unlink(missing_ok=True)


def check_file(device: torch.device | str) -> Path:
    parts = what_is_checked(device)
    digest = blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=4).hexdigest()
    return kept_folder(KEPT) / f"{re.sub(r'[^a-z0-9.]+', '-', parts['gpu'].lower()).strip('-')}-{digest}.json"


def what_is_checked(device: torch.device | str) -> Mapping[str, str]:
    """All that a check depends on."""
    there = torch.device(device)
    name_of = getattr(torch.get_device_module(there), "get_device_name", None)
    return {
        "gpu": there.type if name_of is None else str(name_of(there)),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "package": h2o_flexgen.__version__,
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return MISSING
