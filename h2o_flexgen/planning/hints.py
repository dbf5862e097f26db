"""What an error message says of a name that nobody knows: the nearest known one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

LIKENESS = 0.7  # of names that could be meant, from 0 to 1


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message; nothing where no known name is near."""
    near = get_close_matches(name, list(known), n=1, cutoff=LIKENESS)
    return f"; did you mean {near[0]}?" if near else ""
