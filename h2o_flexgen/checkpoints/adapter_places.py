"""Adapters lie in folders or GGUF files. This says what can be said of their places before any is read. Nothing here imports
torch."""

from __future__ import annotations

import os
from collections.abc import Iterable
from math import isfinite
from pathlib import Path

from h2o_flexgen.checkpoints.gguf_format import is_gguf
from h2o_flexgen.checkpoints.model_places import what_instead
from h2o_flexgen.core.allowed_values import decimal_number
from h2o_flexgen.core.hints import shown


def divided(given: str) -> tuple[Path, float]:
    """The place and the weight of what is given as PATH or as PATH=WEIGHT."""
    path, _, weight = given.rpartition("=")
    if not path or local(given).exists():
        return local(given), 1.0
    try:
        found = decimal_number(weight)
    except ValueError:
        found = float("nan")
    if not isfinite(found):
        raise ValueError(f"adapter {shown(given)} has the weight {shown(weight)}; give PATH, or PATH=WEIGHT with a number")
    return local(path), found


def local(path: str | Path) -> Path:
    return Path(os.path.expanduser(path))  # Path's own raises for an unknown user


def refuse_missing_adapters(places: Iterable[Path]) -> None:
    """Refuses a place where nothing is, and a file that cannot be an adapter."""
    for place in places:
        if not place.exists():
            raise ValueError(f"adapter {place} does not exist; give the folder that PEFT has saved, or a GGUF file")
        if place.is_file() and not is_gguf(place):
            raise ValueError(f"adapter {place} is a file; {what_instead(place)}")
