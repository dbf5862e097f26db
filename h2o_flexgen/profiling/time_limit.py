"""Budget: the seconds that a profile may take in all, divided among what is left to do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

Now = Callable[[], float]  # the seconds that a clock shows
NOW: Now = time.perf_counter


@dataclass
class Stopwatch:
    """A clock that can be stopped."""

    now: Now = NOW
    left_out: float = 0.0

    def __call__(self) -> float:
        return self.now() - self.left_out

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """What is done here takes no time."""
        begun = self.now()
        try:
            yield
        finally:
            self.left_out += self.now() - begun


@dataclass(frozen=True)
class TimeLimit:
    seconds: float
    now: Now = NOW
    _begun: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_begun", self.now())

    @property
    def left(self) -> float:
        return max(0.0, self.seconds - (self.now() - self._begun))

    def share(self, weight: float, of: float) -> float:
        """The seconds for something of this weight, if all that is left to do has the weight `of`."""
        return self.left * weight / of
