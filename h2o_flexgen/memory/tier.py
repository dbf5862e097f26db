"""The part that all tiers share: a meter of the bytes that each holds. Every kind of memory is a file beside this one, with
`alloc`, `free` and a meter. How data is moved to a tier and from it is defined by its store, because each kind of data has a
layout of its own.
"""

from __future__ import annotations


class Meter:
    """Counts what a tier holds and the most that it ever held."""

    def __init__(self) -> None:
        self.used_bytes = 0
        self.peak_bytes = 0

    def add(self, nbytes: int) -> None:
        self.used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def remove(self, nbytes: int) -> None:
        self.used_bytes -= nbytes

    def restart_peak(self) -> None:
        self.peak_bytes = self.used_bytes
