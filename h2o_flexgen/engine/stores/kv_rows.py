"""KVRows: the KV of one (layer, batch) in host memory where a device attends the slots that decode steps choose.

Rows lie one behind the other there, each token by token, and so they do in the buffers of the device. So a row's tokens are one
range. They keep their places at home for as long as they live, also when they move up in the buffers: what has its slots
elsewhere is found by its place, and no row is stored again when another one leaves.

KV on disk has its home there (`kv_pages`). What is read of it for a visit lies in a buffer of the host in this same way.

Slots cross the link one by one. Kernels of the device read those that a step has chosen where they lie, in page-locked memory,
and put each into its slot of a buffer. They write those that a step has changed. So the host waits for no number of a slot.
What else is in a buffer belongs to earlier visits: nothing but chosen slots may be read of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from h2o_flexgen.core.buffer_layout import KVLayout
from h2o_flexgen.engine.rows import RowRange
from h2o_flexgen.kernels.evict import Missing, RowsOfBoth
from h2o_flexgen.kernels.operations import bring_slots
from h2o_flexgen.kv.key_index import ChosenSlots
from h2o_flexgen.kv.slots import Coding, image_by_row
from h2o_flexgen.memory.device import Device


class RowPlaces:
    """The places of rows at home: each keeps its own for as long as it lives."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self.begin()

    def begin(self) -> None:
        """Begins with other rows, or with one that lives on."""
        self.now = [*range(self._rows)]

    def keep_rows(self, kept: Sequence[int]) -> None:
        """Row `kept[dst]` becomes row `dst`. The places of rows that have left are free for others."""
        moved = [self.now[source] for source in kept]
        self.now = [*moved, *(place for place in self.now if place not in set(moved))]


class PlacesOnDevice:
    """Places of the rows of a batch on a device, where rows have moved up. One layer after the other has the same ones."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._last: tuple[list[int], Tensor] | None = None

    def of(self, places: list[int]) -> Tensor | None:
        """The numbers of these places; None where each row is at its own. It is called in the stream that computes."""
        if places == sorted(places):
            return None
        if self._last is None or self._last[0] != places:
            self._last = [*places], self._device.upload(torch.tensor(places), self._device.torch_device)
        return self._last[1]


class KVRows:
    def __init__(self, home: Tensor, layout: KVLayout, coding: Coding, device: Device, on_device: PlacesOnDevice) -> None:
        self._home = home
        self._layout, self._coding = layout, coding
        self._image = self.image(device.over_link(home))
        self._places, self._on_device = RowPlaces(layout.rows), on_device
        self._numbers: Tensor | None = None  # of the places, on the device

    def image(self, region: Tensor) -> Tensor:
        """(sets, rows, kv_heads, slots, width) over the bytes of a region, at home or in a buffer."""
        return image_by_row(region, self._layout.shape, self._coding)

    def begin(self) -> None:
        """Begins with other rows, or with one that lives on."""
        self._places.begin()
        self._numbers = None

    def keep_rows(self, kept: Sequence[int]) -> None:
        """Row `kept[dst]` becomes row `dst`."""
        self._places.keep_rows(kept)
        self._numbers = self._on_device.of(self._places.now)

    def load(self, buffer: Tensor, counts: Sequence[int], held: int) -> int:
        """Home -> device: all that rows hold, of which a text goes on, and zeros behind those that hold less than others."""
        for row, count in enumerate(counts):
            here, there = (self._bytes_of(RowRange(place, 0, held)) for place in (row, self._places.now[row]))
            buffer[here].copy_(self._home[there], non_blocking=True)
            if count < held:
                buffer[self._bytes_of(RowRange(row, count, held))] = 0  # masked, but 0 times a NaN is still NaN
        return len(counts) * held * self._layout.row_bytes

    def bring(self, buffer: Tensor, choice: ChosenSlots) -> int:
        """Home -> device: the slots that a decode step has chosen, but for its own newest ones, which are there already."""
        now, slots = choice.now, choice.slots
        if now is None or slots is None:
            return 0
        missing = Missing(now.attended, now.counts)
        bring_slots(self._image, self.image(buffer), slots, RowsOfBoth(source=self._numbers), missing)
        return sum(attended - 1 for attended in now.slots.attended) * self._layout.row_bytes

    def store(self, buffer: Tensor, ranges: Sequence[RowRange], changed: Tensor | None) -> int:
        """Device -> home: the slot of each head that a decode step has changed, (rows, kv_heads) of the first rows, and the
        prompts of the others."""
        stepped = 0 if changed is None else len(changed)
        if changed is not None:
            bring_slots(self.image(buffer), self._image, changed[..., None], RowsOfBoth(target=self._numbers))
        prompts = [one for one in ranges if one.row >= stepped]
        for row, first, end in prompts:
            here, there = (self._bytes_of(RowRange(place, first, end)) for place in (row, self._places.now[row]))
            self._home[there].copy_(buffer[here], non_blocking=True)
        return (stepped + sum(end - first for _, first, end in prompts)) * self._layout.row_bytes

    def _bytes_of(self, tokens: RowRange) -> slice:
        start = tokens.row * self._layout.slots
        return slice((start + tokens.first) * self._layout.row_bytes, (start + tokens.end) * self._layout.row_bytes)
