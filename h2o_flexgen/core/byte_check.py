"""Check: compares a range of a file with what was written to it. Models make checks and memory calls them; neither depends on
the other."""

from __future__ import annotations

from typing import Protocol


class Check(Protocol):
    """A check of stored bytes: of whole stretches of a tensor, or up to its end (checkpoints/sums.py)."""

    def __call__(self, offset: int, data: memoryview) -> None:
        """Raises an error if these bytes, which begin at this place of the file, differ from those that were written."""

    def unreadable(self, error: OSError) -> Exception:
        """The error to raise when the bytes cannot be read."""
