"""The folders that are used unless somebody names others."""

from __future__ import annotations

import os
from pathlib import Path


def default_offload_folder() -> Path:
    """The folder for offloaded data. It is not the system's folder for temporary files, which is often memory."""
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "h2o_flexgen" / "offload"


def existing_folder(folder: Path) -> Path:
    """The folder, or the nearest one above that is there."""
    whole = folder.absolute()
    return next(place for place in (whole, *whole.parents) if place.exists())
