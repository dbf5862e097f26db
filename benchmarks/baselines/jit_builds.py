"""A folder of our own for what torch compiles for a peer, with a guard against the locks of builds that were killed.

torch marks a build by a file that is there until the build ends. That of a killed build stays for ever, and the next one waits
for it without a word. Here a lock of the system goes around all builds of the folder, which does end with its process. The
process that holds it knows that no other one builds, and that every mark is of a killed build.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

MARK = "lock"  # as torch names it, in the folder of each build
GUARD = "guard"


def build_folder(versions: Mapping[str, str]) -> Path:
    """A folder in the user's cache for these versions; builds for one version are of no use to another."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    python = f"python-{sys.version_info.major}.{sys.version_info.minor}"
    return cache / "h2o_flexgen" / "baselines" / "_".join([*(f"{name}-{found}" for name, found in versions.items()), python])


@contextmanager
def building_in(folder: Path) -> Iterator[None]:
    """A context in which torch compiles into `folder`, alone."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / GUARD).open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        for mark in folder.rglob(MARK):
            mark.unlink()
        before = os.environ.get("TORCH_EXTENSIONS_DIR")
        os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
        try:
            yield
        finally:
            if before is None:
                del os.environ["TORCH_EXTENSIONS_DIR"]
            else:
                os.environ["TORCH_EXTENSIONS_DIR"] = before
