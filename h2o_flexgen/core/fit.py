"""The largest number that still fits."""

from __future__ import annotations

from collections.abc import Callable


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number of rows (or of anything that needs memory) that fits; 0 if not even one does. The number is doubled
    until it does not fit, then bisected."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
