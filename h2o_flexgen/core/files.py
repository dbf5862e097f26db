"""Writing a text file so that it is either there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_text(path: str | Path, text: str) -> None:
    """The text goes to a neighbour that then takes the file's name: a reader, or a crash, never meets half of it. A link stays
    one, and a device or a pipe is written to, not replaced."""
    path = Path(path)
    if path.exists() and not path.is_file():  # looked at as it is given: what the link to an open pipe says is no path
        path.write_text(text, encoding="utf-8")
        return
    path = Path(os.path.realpath(path))
    neighbour = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        neighbour.write_text(text, encoding="utf-8")
        os.replace(neighbour, path)
    finally:
        neighbour.unlink(missing_ok=True)
