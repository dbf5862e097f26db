"""Numbers as people write them: ASCII digits, a sign, a decimal point and an exponent.

Python also reads underscores between digits and the digits of every other script; in what a person types these are mistakes.
"""

from __future__ import annotations

import re

WHOLE = re.compile(r"[+-]?[0-9]+")
DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
MOST_DIGITS = 1000  # Python itself refuses to read a few thousand


def whole_number(text: str) -> int:
    """Reads a whole number; raises a ValueError for anything else."""
    if not WHOLE.fullmatch(text.strip()) or len(text) > MOST_DIGITS:
        raise ValueError("not a whole number")
    return int(text)


def decimal_number(text: str) -> float:
    """Reads a decimal number; raises a ValueError for anything else, `nan` and `inf` included."""
    if not DECIMAL.fullmatch(text.strip()):
        raise ValueError("not a number")
    return float(text)
