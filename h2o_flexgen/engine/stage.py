"""Stage: what an LLM is doing, for code that shows progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path

from h2o_flexgen.core.units import format_bytes


class Stage(str, Enum):
    CONVERTING = "converting weights"  # .bin files, once
    PACKING = "packing weights"  # into fewer bits, once
    WRITING = "writing random weights"  # those that are to be read from disk
    MENDING = "making a damaged copy of weights again"  # reported once, before it is converted or packed again
    RENEWING = "making a copy of weights of an older layout again"  # reported once, before they are packed again
    LOADING = "loading weights"
    GENERATING = "generating"

    def __str__(self) -> str:
        return self.value


OnStage = Callable[[Stage, int, int], None]  # bytes done and bytes in all: both 0 where they are not counted


class Stages:
    """Reports the stages to the listener of the present call, or else to the permanent listener."""

    def __init__(self, always: OnStage | None) -> None:
        self.always = self._now = always

    @property
    def is_heard(self) -> bool:
        return self._now is not None

    @contextmanager
    def heard_by(self, on_stage: OnStage | None) -> Iterator[None]:
        self._now = on_stage or self.always
        try:
            yield
        finally:
            self._now = self.always

    def __call__(self, stage: Stage, done_bytes: int = 0, total_bytes: int = 0) -> None:
        if self._now is not None:
            self._now(stage, done_bytes, total_bytes)

    def of(self, stage: Stage, behind_it: Stage | None = None) -> Callable[[int, int], None]:
        """A function that reports how far a stage is, and the stage that follows when it is over."""

        def tell(done_bytes: int, total_bytes: int) -> None:
            self(stage, done_bytes, total_bytes)
            if behind_it is not None and done_bytes == total_bytes:
                self(behind_it)

        return tell


def how_far(done_bytes: int, total_bytes: int) -> str:
    return f"{format_bytes(done_bytes)} of {format_bytes(total_bytes)}" if total_bytes else ""


MADE_AGAIN = {Stage.MENDING: "was damaged", Stage.RENEWING: "had an older layout"}  # why copies are made again


def made_again(stage: Stage, place: Path) -> str:
    """A line for people that should stay on the screen, since other stages soon follow."""
    return f"a copy of the weights in {place} {MADE_AGAIN[stage]}: it is made again from the checkpoint"
