"""Lanes by device: the worker of a task where several devices compute, each the layers of a range.

Each device has a lane of every kind that works with it; the disk is one, and so are the lanes that read and write it. With one
device a lane has the name of its kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from h2o_flexgen.schedule.ops import COMPUTE_LANE, LANES, PASS, READ, WRITE, Key, Task


@dataclass(frozen=True)
class Lanes:
    device_of: tuple[int, ...] = ()  # the device of every layer; none: there is only one device

    @property
    def devices(self) -> int:
        return self.device_of[-1] + 1 if self.device_of else 1

    def device(self, layer: int) -> int:
        return self.device_of[layer] if self.device_of else 0

    def of(self, task: Task | Key) -> str:
        op = task.op
        return op.lane if not self.device_of or op.uses_disk else _named(op.lane, self.device_of[task.layer])

    @property
    def of_head(self) -> str:
        """The lane that computes the last layer, and so the tokens."""
        return _named(COMPUTE_LANE, self.devices - 1) if self.device_of else COMPUTE_LANE

    @cached_property
    def there(self) -> Mapping[str, tuple[str, int]]:
        """The kind and the device of every lane, by its name."""
        if not self.device_of:
            return {kind: (kind, 0) for kind in LANES if kind != PASS}
        shared = {kind: (kind, 0) for kind in (READ, WRITE)}
        own = {_named(kind, device): (kind, device) for device in range(self.devices) for kind in LANES if kind not in shared}
        return {**shared, **own}


def kind_of(lane: str) -> str:
    return lane.partition(" ")[0]


def longest_by_kind(seconds: Mapping[str, float]) -> dict[str, float]:
    """The seconds of the busiest lane of each kind."""
    longest: dict[str, float] = {}
    for lane, own in seconds.items():
        longest[kind_of(lane)] = max(own, longest.get(kind_of(lane), 0.0))
    return longest


def sum_by_kind(counts: Mapping[str, int]) -> dict[str, int]:
    """What the lanes of each kind have together."""
    total: dict[str, int] = {}
    for lane, own in counts.items():
        total[kind_of(lane)] = total.get(kind_of(lane), 0) + own
    return total


def place_of(lane: str) -> tuple[int, str]:
    """The place of a lane among others: kind by kind, in the order in which data passes through them."""
    kind = kind_of(lane)
    return LANES.index(kind) if kind in LANES else len(LANES), lane


def _named(kind: str, device: int) -> str:
    return f"{kind} {device}"
