"""Sizes in bytes as people read and write them. What is printed is decimal, as disks and links are sold: 1 GB is 10^9 bytes."""

from __future__ import annotations

SHOWN = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "kB": 10**3}
UNITS = {
    "": 1,
    "b": 1,
    **{name.lower(): size for name, size in SHOWN.items()},
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
ROUNDS_UP = 0.999995  # from here on two decimals show a 1


def parse_bytes(size: int | str) -> int:
    """16000000000, "16GB" and "14.9GiB" are sizes."""
    if isinstance(size, int):
        return size
    text = size.strip().lower()
    digits = text.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = text[len(digits) :].strip()
    try:
        value = float(digits) * UNITS[unit]
    except (ValueError, KeyError):
        raise ValueError(f"size {size!r} is not understood; write it like 16GB or 8GiB") from None
    if value <= 0:
        raise ValueError(f"size {size!r} must be above 0")
    return int(value)


def format_bytes(nbytes: float) -> str:
    for unit, size in SHOWN.items():
        if nbytes >= ROUNDS_UP * size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} B"
