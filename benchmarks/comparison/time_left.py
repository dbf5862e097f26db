"""The time of a call: what would not be over before its end is not begun."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

START_SECONDS = 20.0  # of a process, until it has imported what it needs and opened a GPU
MADE_PER_S = 1.5e9  # bytes of weights; this and the next are guesses on the safe side
MOVED_PER_S, MOVED_SLOWLY_PER_S = 20e9, 4e9  # to a GPU, page-locked or not
PASSES_BESIDE = 4  # one to warm up, the prompts, a step that is not timed, and the last one


class NoTimeLeft(Exception):
    """A run was not begun, or was ended, because the call is over; the message says so in a line."""


@dataclass(frozen=True)
class Deadline:
    seconds: float | None = None  # None: there is no end
    now: Callable[[], float] = time.monotonic
    began: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        return inf if self.seconds is None else self.seconds - (self.now() - self.began)

    def require(self, needed: float) -> None:
        if self.left < needed:
            raise NoTimeLeft(f"{max(0.0, self.left):.0f} s were left, and it takes about {needed:.0f}")

    def was_short(self, left: float) -> bool:
        """Whether so much time was less than half of the call: what was stopped then may be over in another call."""
        return self.seconds is not None and left < self.seconds / 2


def expected_seconds(weight_bytes: float, steps: int, is_slow: bool) -> float:
    """Of a run of a system that has not been run yet, with weights of so many bytes."""
    rate = MOVED_SLOWLY_PER_S if is_slow else MOVED_PER_S
    return START_SECONDS + weight_bytes / MADE_PER_S + (steps + PASSES_BESIDE) * weight_bytes / rate
