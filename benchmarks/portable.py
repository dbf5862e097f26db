"""A command as others can type it: of a path of this machine the name remains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def portable(words: Sequence[str]) -> list[str]:
    return [Path(word).name if Path(word).is_absolute() else word for word in words]
