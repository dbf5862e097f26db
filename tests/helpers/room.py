"""What the room of recorded programs holds."""

from __future__ import annotations

from h2o_flexgen.kernels.recording import WorkingRoom


def holds(room: WorkingRoom) -> bool:
    """Whether any byte of it is not zero."""
    return any(chunk[:].strip(b"\0") for chunk in room._chunks)
