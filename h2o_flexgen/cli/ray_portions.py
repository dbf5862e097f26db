"""How a job is cut into portions for workers. At the end of a portion few rows run, so there are few portions: each is a share
of the work that is left. So the first ones are large, and the last ones let all workers end together."""

from __future__ import annotations

from collections.abc import Sequence

SHARE = 2  # a portion is one of so many parts of what a worker would still have to do
MOST_PORTION = 4096  # requests: their lines are held in memory and sent at once


def cut(places: Sequence[int], work: Sequence[int], workers: int, least: int) -> list[Sequence[int]]:
    """Portions of places, in order. `work` has the tokens of each place. A portion has `least` tokens, unless a worker would
    have nothing to do then. One worker gets all."""
    left, portions, start = sum(work), list[Sequence[int]](), 0
    least = min(least, -(-left // workers))
    while start < len(places):
        enough = left if workers == 1 else max(least, left // (SHARE * workers))
        end, load = start, 0
        while end < len(places) and end - start < MOST_PORTION and (load < enough or end == start):
            load += work[end]
            end += 1
        portions.append(places[start:end])
        start, left = end, left - load
    return portions


def cut_evenly(places: Sequence[int], count: int) -> list[Sequence[int]]:
    """Portions of so many places each, but for the last."""
    return [places[start : start + count] for start in range(0, len(places), count)]
