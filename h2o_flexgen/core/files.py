"""Writes a text file so that either all of it is there or none."""

from __future__ import annotations

import os
from pathlib import Path


def write_text(path: str | Path, text: str) -> None:
    """Writes the text to a neighbour that then takes the file's name, so neither a reader nor a crash meets half of it. A link
    stays a link, and a device or a pipe is written to, not replaced."""
    path = Path(path)
    if path.exists() and not path.is_file():  # the path is not resolved: a link to an open pipe leads to no path
        path.write_text(text, encoding="utf-8")
        return
    path = Path(os.path.realpath(path))
    neighbour = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        neighbour.write_text(text, encoding="utf-8")
        os.replace(neighbour, path)
    finally:
        neighbour.unlink(missing_ok=True)
