"""Blocks of memory, each with the accesses that later ones must be ordered behind.

An access is a range of bytes, read or written by an actor at a moment of its clock. Two of them conflict if they overlap and
one of them writes; the later one must then know that the earlier one is over.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.clocked.clock import Clock


class Moment(NamedTuple):
    """A moment of an actor, and what it does there."""

    actor: str
    time: int
    doing: str
    task: str

    def __str__(self) -> str:
        return f"{self.doing} of {self.task} on {self.actor}" if self.task else f"{self.doing} on {self.actor}"


class Range(NamedTuple):
    start: int
    end: int
    actor: str

    def overlaps(self, start: int, end: int) -> bool:
        return self.start < end and start < self.end

    def lies_in(self, start: int, end: int) -> bool:
        return start <= self.start and self.end <= end


class Block:
    """Memory that is had and given back as a whole."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._reads: dict[Range, Moment] = {}
        self._writes: dict[Range, Moment] = {}

    def access(self, start: int, end: int, writes: bool, now: Moment, clock: Clock) -> list[str]:
        """Notes an access, and finds what it races with."""
        found = list[str]()
        for earlier, verb in ((self._writes, "wrote"), (self._reads, "read")) if writes else ((self._writes, "wrote"),):
            for place, moment in earlier.items():
                if place.overlaps(start, end) and not clock.knows(moment.actor, moment.time):
                    found.append(self._told(now, writes, moment, verb))
        for kind in (self._reads, self._writes) if writes else (self._reads,):
            if kind:
                self._forget(kind, start, end, clock)
        (self._writes if writes else self._reads)[Range(start, end, now.actor)] = now
        return found

    def _told(self, now: Moment, writes: bool, moment: Moment, verb: str) -> str:
        return f"{now} ({'writes' if writes else 'reads'}) is not ordered behind {moment} ({verb}) in {self.name}"

    def _forget(self, kind: dict[Range, Moment], start: int, end: int, clock: Clock) -> None:
        """What is ordered behind this access is ordered behind those that it covers and is behind."""
        covered = [
            place for place, moment in kind.items() if place.lies_in(start, end) and clock.knows(moment.actor, moment.time)
        ]
        for place in covered:
            del kind[place]

    def unknown_to(self, *clocks: Clock) -> list[Moment]:
        """Accesses that may still be under way for all that these clocks know together."""
        moments = (*self._reads.values(), *self._writes.values())
        return [moment for moment in moments if not any(clock.knows(moment.actor, moment.time) for clock in clocks)]
