"""Ops, the kinds of tasks; visits, and their tasks; and the lanes that do them. Each op has its facts in one row of a table,
which all other modules read. A *visit* is one COMPUTE: one layer on one batch at one step; its other tasks move data for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, unique
from functools import cache, cached_property
from typing import NamedTuple

from h2o_flexgen.core.model_spec import LayerName
from h2o_flexgen.core.site import DEVICE, DISK, HOST

READ, LOAD, COMPUTE_LANE, PASS = "read", "load", "compute", "pass"
ATTEND_LANE, STORE, WRITE = "attend", "store", "write"
# The tail of one disk read leaves readers idle that the next can use. In all other lanes one task ends before the next begins.
WORKERS: Mapping[str, int] = {READ: 2, LOAD: 1, COMPUTE_LANE: 1, PASS: 1, ATTEND_LANE: 1, STORE: 1, WRITE: 1}
LANES = tuple(WORKERS)  # in the order in which data passes through them
HOME = "home"  # the tier where the placement has put the data


class Data(Enum):
    """The kinds of data, each with its name for people, and its letter and its colour-blind safe colour in timelines."""

    WEIGHTS = "weights", "W", "#e69f00"
    KV = "KV", "K", "#0072b2"
    STATE = "states", "S", "#56b4e9"
    HIDDEN = "activations", "H", "#cc79a7"
    NOTHING = "compute", "", "#009e73"

    def __init__(self, words: str, letter: str, colour: str) -> None:
        self.words = words
        self.letter = letter
        self.colour = colour

    __hash__ = object.__hash__  # tasks are looked up so often that Enum's own, which is written in Python, is felt

    def __str__(self) -> str:
        return self.name.lower()


MOVED: tuple[Data, ...] = tuple(data for data in Data if data is not Data.NOTHING)
OF_ROWS = (Data.KV, Data.STATE)  # what rows have in a layer from step to step


@cache  # schedules ask for it millions of times, and there are few
def ring(data: Data, place: str) -> str:
    """The name of the ring of buffers that this kind of data uses at this place."""
    return f"{data}.{place}"


@unique
class Op(Enum):
    """Its lane, the data that it moves, and the places that the data comes from and goes to."""

    READ_W = READ, Data.WEIGHTS, DISK, HOST
    LOAD_W = LOAD, Data.WEIGHTS, HOST, DEVICE
    CHOOSE = COMPUTE_LANE, Data.KV, HOST, HOST  # which of the slots elsewhere a decode step attends, by its own queries
    READ_KV = READ, Data.KV, DISK, HOST
    LOAD_KV = LOAD, Data.KV, HOST, DEVICE
    READ_S = READ, Data.STATE, DISK, HOST
    LOAD_S = LOAD, Data.STATE, HOST, DEVICE
    LOAD_H = LOAD, Data.HIDDEN, HOME, DEVICE
    COMPUTE = COMPUTE_LANE, Data.NOTHING, DEVICE, DEVICE
    PASS_H = PASS, Data.HIDDEN, DEVICE, DEVICE  # from the device of a layer to that of the next
    ATTEND = ATTEND_LANE, Data.KV, HOST, HOST  # by the host, beside the KV, what the COMPUTE of its visit asks
    STORE_H = STORE, Data.HIDDEN, DEVICE, HOME
    STORE_KV = STORE, Data.KV, DEVICE, HOST
    WRITE_KV = WRITE, Data.KV, HOST, DISK
    STORE_S = STORE, Data.STATE, DEVICE, HOST
    WRITE_S = WRITE, Data.STATE, HOST, DISK

    def __init__(self, lane: str, data: Data, source: str, target: str) -> None:
        self.lane = lane
        self.data = data
        self.places = source, target
        self.chooses = (lane, data) == (COMPUTE_LANE, Data.KV)
        self.fetches = lane in (READ, LOAD) or self.chooses  # before the COMPUTE of its visit
        self.stores = lane in (PASS, STORE, WRITE)  # after it
        self.uses_disk = DISK in self.places
        self.by_host = self.uses_disk or lane == ATTEND_LANE  # the CPU itself works in host memory

    __hash__ = object.__hash__  # as above

    def __str__(self) -> str:
        return self.name

    @property
    def reverse(self) -> Op | None:
        """The op that brings the same data the other way."""
        return next((op for op in Op if op.stores and op.data is self.data and op.places == self.places[::-1]), None)

    def works_in(self, rings: Sequence[str]) -> list[str]:
        """Those of the rings on the way to the computation that it works in: a transfer works at both ends."""
        return [name for name in rings if name in (ring(self.data, self.places[0]), ring(self.data, self.places[1]))]


class Visit(NamedTuple):
    step: int
    layer: int
    batch: int


class Key(NamedTuple):
    """The name of a task. `batch` of weights is the number of a slice, if the schedule cuts layers."""

    op: Op
    step: int
    layer: int
    batch: int

    def __str__(self) -> str:
        return f"{self.op} {self.step}.{self.layer}.{self.batch}"

    def said(self, names: Sequence[LayerName]) -> str:
        """The key, and what its layer is if that has a name."""
        return f"{self} ({names[self.layer].title})" if names else str(self)


class Task(NamedTuple):
    op: Op
    step: int
    layer: int
    batch: int
    needs: tuple[Key, ...] = ()

    @property
    def key(self) -> Key:
        return Key(*self[:4])

    @property
    def visit(self) -> Visit:
        """The visit that the task belongs to."""
        return Visit(self.step, self.layer, self.batch)

    @property
    def lane(self) -> str:
        return self.op.lane

    def is_compute_of(self, layer: int) -> bool:
        return self.op is Op.COMPUTE and self.layer == layer

    def __str__(self) -> str:
        return str(self.key)


@dataclass(frozen=True)
class Lanes:
    """The worker of a task where several devices compute, each the layers of a range. Each device has a lane
    of every kind that works with it; the disk is one, and so are the lanes that read and write it. With one device a lane
    has the name of its kind."""

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
