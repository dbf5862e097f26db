"""Sizes in bytes as people read and write them, and seconds. Printed sizes are decimal, as disks and links are sold: 1 GB is
10^9 bytes."""

from __future__ import annotations

from h2o_flexgen.core.allowed_values import Allowed, decimal_number
from h2o_flexgen.core.hints import shown

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
LEAST_BARE = 10_000  # a number below that was typed without its unit: no memory is as small
MOST_BYTES = 2**63  # more than files and memory can have
LONG_SECONDS = 999.5  # from here on three digits would be written with an exponent
ROUNDS_UP = 0.999995  # from here on a number with two decimals shows as 1


def parse_bytes(size: int | str) -> int:
    """Reads a size such as 16000000000, "16GB" or "14.9GiB"."""
    nbytes = size if isinstance(size, int) and not isinstance(size, bool) else _read(size)
    if not 0 < nbytes < MOST_BYTES:
        wrong = "must be above 0" if nbytes <= 0 else "is more than files and memory can have"
        raise ValueError(f"size {shown(size)} {wrong}; write it like 16GB or 8GiB")
    return int(nbytes)


def _read(size: object) -> float:
    if isinstance(size, str):
        text = size.strip().lower()
        digits = text.rstrip("abcdefghijklmnopqrstuvwxyz ")
        unit = UNITS.get(text[len(digits) :].strip())
        try:
            if unit is not None:
                return decimal_number(digits) * unit
        except ValueError:
            pass
    raise ValueError(f"size {shown(size)} is not understood; write it like 16GB or 8GiB")


def format_bytes(nbytes: float) -> str:
    for unit, size in SHOWN.items():
        if nbytes >= ROUNDS_UP * size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """Seconds with three digits; where these are more, with all before the point."""
    return f"{seconds:.3g} s" if seconds < LONG_SECONDS else f"{seconds:.0f} s"


class MemorySize(Allowed):
    """A size in bytes, kept as it was typed, since messages and printed flags repeat it."""

    def value(self, name: str, given: object, note: str = "") -> int | str:
        size: int | str = given  # type: ignore[assignment]
        nbytes, has_unit = parse_bytes(size), isinstance(size, str) and size.strip()[-1].isalpha()
        if nbytes < LEAST_BARE and not has_unit:
            like = f"{size}".strip()
            raise ValueError(f"size {shown(size)} would be {counted(nbytes, 'byte')}; write its unit, like '{like}GB'")
        return size

    def typed(self, word: str) -> str:
        return str(self.value("", word))


SIZE = MemorySize()


def counted(number: int, what: str) -> str:
    """A number of things: `1 row`, `2 rows`, `2 batches`."""
    return f"{number} {what}{'' if number == 1 else 'es' if what.endswith('ch') else 's'}"
