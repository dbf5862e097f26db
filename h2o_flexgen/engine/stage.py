"""Stage: what an LLM is at, for whoever shows how far it is."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from pathlib import Path

from h2o_flexgen.core.units import format_bytes


class Stage(str, Enum):
    CONVERTING = "converting weights"  # of .bin files, once
    PACKING = "packing weights"  # into fewer bits, once
    WRITING = "writing random weights"  # those that are to be read from disk
    MENDING = "making a damaged copy of weights again"  # told once, before it is converted or packed again
    LOADING = "loading weights"
    GENERATING = "generating"

    def __str__(self) -> str:
        return self.value


OnStage = Callable[[Stage, int, int], None]  # bytes done and bytes in all: both 0 where they are not counted


def how_far(done_bytes: int, total_bytes: int) -> str:
    return f"{format_bytes(done_bytes)} of {format_bytes(total_bytes)}" if total_bytes else ""


def damaged_copy(place: Path) -> str:
    """A line for people, which should stay: MENDING is soon followed by other stages."""
    return f"a copy of the weights in {place} was damaged: it is made again from the checkpoint"
