"""The parts of a step on a device other than the one that picked their tokens."""

from __future__ import annotations

from dataclasses import replace

from h2o_flexgen.engine.rows import RowsPart
from h2o_flexgen.memory.device import Device


class PartsThere:
    """Serves one device. The data of a step are copied to it once for all its layers."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._known: dict[tuple[int, int | None], tuple[RowsPart, RowsPart]] = {}  # batch and first row -> a part, and it there

    def of(self, batch: int, part: RowsPart) -> RowsPart:
        known = self._known.get((batch, part.rows.start))
        if known is None or known[0] is not part:
            target = self._device.torch_device
            levels = tuple(now.on(target, self._device.upload) for now in part.levels)
            known = part, replace(part, levels=levels, tokens=part.tokens.to(target, non_blocking=True))
            self._known[batch, part.rows.start] = known
        return known[1]
