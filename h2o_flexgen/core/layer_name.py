"""The name of a layer, for people. Schedules know layers by their numbers alone; code that shows tasks may be given names."""

from __future__ import annotations

from typing import NamedTuple


class LayerName(NamedTuple):
    title: str  # "experts 8-15 of block 3"
    block: int | None = None  # the decoder block it belongs to
    is_of_experts: bool = False  # a slice of the experts of a block: there are many, and they are drawn in their own way
