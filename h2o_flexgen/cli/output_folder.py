"""The folder that a command puts several files in: made, and seen to be writable, before the work and not behind it."""

from __future__ import annotations

import os
from pathlib import Path


def open_output(folder: str | None) -> Path | None:
    if folder is None:
        return None
    path = Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
        reason = None if os.access(path, os.W_OK | os.X_OK) else "nothing may be written there"
    except OSError as error:
        reason = error.strerror
    if reason is not None:
        raise ValueError(f"--output {folder} cannot be written ({reason}); give another folder")
    return path
