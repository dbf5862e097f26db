"""Check: what a range of a file is compared with, for those who know what was written to it. Models make checks, memory calls
them; neither knows the other."""

from __future__ import annotations

from typing import Protocol


class Check(Protocol):
    """A check of bytes as they are stored: whole stretches of a tensor, or up to its end (models/sums.py)."""

    def __call__(self, offset: int, data: memoryview) -> None:
        """Raises an error where the bytes from this place of the file on are not those that were written."""

    def unreadable(self, error: OSError) -> Exception:
        """The error to raise where they cannot be read."""
