"""The default folders, used unless others are given."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import gettempdir

LONGEST_FOR_SOCKETS = 24  # characters: names of sockets have 107 at most, and Ray adds up to 80


def cache_folder(kind: str) -> Path:
    """The folder in the user's cache for one kind of things."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "h2o_flexgen" / kind


def default_offload_folder() -> Path:
    """The folder for offloaded data. It is not the system's folder for temporary files, which is often memory."""
    return cache_folder("offload")


def existing_folder(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    whole = folder.absolute()
    return next(place for place in (whole, *whole.parents) if place.exists())


def folder_of_sockets() -> Path:
    """The folder for temporary files, unless the names of sockets below it would be longer than the system allows."""
    folder = gettempdir()
    return Path(folder if len(folder) <= LONGEST_FOR_SOCKETS else "/tmp")
