"""The system's counts for this process."""

from __future__ import annotations

import os
from pathlib import Path


def bytes_read() -> int:
    """Bytes that this process has read from disks, not from the page cache; 0 if the system does not count them."""
    return _counted("read_bytes")


def bytes_written() -> int:
    """Bytes that it has had written to disks, alike."""
    return _counted("write_bytes")


def _counted(what: str) -> int:
    counts = Path("/proc/self/io")
    if not counts.exists():
        return 0
    lines = (line.partition(":") for line in counts.read_text(encoding="ascii").splitlines())
    return next((int(value) for name, _, value in lines if name == what), 0)


def disk_seconds(file: Path) -> float | None:
    """Seconds, from some time on, in which the disk of a file had anything to do; None if the system does not count them. As
    all its users are counted, it tells how busy the disk was beside a run."""
    device, counts = os.stat(file).st_dev, Path("/proc/diskstats")
    if not counts.exists():
        return None
    numbers = [str(os.major(device)), str(os.minor(device))]
    lines = (line.split() for line in counts.read_text(encoding="ascii").splitlines())
    return next((int(line[12]) / 1e3 for line in lines if line[:2] == numbers), None)
