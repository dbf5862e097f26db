"""The pipeline: several devices, each with the layers of a range. The batches of a block form as many groups as there are
devices. While one device computes its layers on a group, the next computes the layers after them on the group before.

In *rounds* every device has one group, or none: device d does in round r what device 0 has done in round r - d. A group's next
step begins when its last device has picked the tokens. On each device the batches of a group use a layer's weights one after
the other, as in a block of one device.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import lcm, prod

from h2o_flexgen.schedule.ops import Data, Task, Visit
from h2o_flexgen.schedule.schedule import Issuer, Schedule


@dataclass(frozen=True)
class Pipeline(Schedule):
    name = "pipeline"

    # -- groups and ranges -------------------------------------------------------------------------------------------

    @cached_property
    def groups(self) -> tuple[range, ...]:
        """The batches of each group, about as many in one as in the other."""
        count = min(self.traffic.batches, self.traffic.lanes.devices)
        return tuple(_even_ranges(self.traffic.batches, count))

    @cached_property
    def ranges(self) -> tuple[range, ...]:
        """The layers of each device."""
        lanes = self.traffic.lanes
        layers = range(self.traffic.layers)
        return tuple(
            range(min(own), max(own) + 1)
            for own in ([layer for layer in layers if lanes.device(layer) == device] for device in range(lanes.devices))
        )

    @cached_property
    def _group_of(self) -> tuple[int, ...]:
        return tuple(number for number, group in enumerate(self.groups) for _ in group)

    @property
    def _rounds_of_step(self) -> int:
        """Rounds between the same group's steps: no group begins one before its last device is done with the one before."""
        return max(len(self.groups), len(self.ranges))

    @property
    def _rounds(self) -> int:
        return (self.traffic.steps - 1) * self._rounds_of_step + len(self.groups) + len(self.ranges) - 1

    # -- numbering ---------------------------------------------------------------------------------------------------

    def _turns(self, number: int) -> Iterator[tuple[int, int, int]]:
        """The turns of a round: devices, each with the step and the group."""
        for device in range(len(self.ranges)):
            step, group = divmod(number - device, self._rounds_of_step)
            if 0 <= step < self.traffic.steps and group < len(self.groups):
                yield device, step, group

    def _visits(self, device: int, step: int, group: int) -> Iterator[Visit]:
        for layer in self.ranges[device]:
            for batch in self.groups[group]:
                yield Visit(step, layer, batch)

    def visit(self, number: int) -> Visit:
        turn = bisect_right(range(self._rounds), number, key=self._visits_before) - 1
        rest = number - self._visits_before(turn)
        for device, step, group in self._turns(turn):
            layers, batches = self.ranges[device], self.groups[group]
            if rest < len(layers) * len(batches):
                layer, batch = divmod(rest, len(batches))
                return Visit(step, layers.start + layer, batches.start + batch)
            rest -= len(layers) * len(batches)
        raise IndexError(number)

    def number(self, step: int, layer: int, batch: int) -> int:
        device, group = self.traffic.lanes.device(layer), self._group_of[batch]
        turn = step * self._rounds_of_step + group + device
        batches, layers = self.groups[group], self.ranges[device]
        own = (layer - layers.start) * len(batches) + batch - batches.start
        return self._visits_before(turn, device) + own

    def _visits_before(self, turn: int, device: int = 0) -> int:
        """Visits in the rounds before this one, and in this one those of the devices before."""
        return sum(self._done(one, turn + (one < device)) for one in range(len(self.ranges)))

    def _done(self, device: int, turn: int) -> int:
        """Visits of a device in the rounds before this one."""
        step, group = divmod(max(0, turn - device), self._rounds_of_step)
        batches = self.groups[group].start if group < len(self.groups) else self.traffic.batches
        return min(step * self.traffic.batches + batches, self.traffic.steps * self.traffic.batches) * len(self.ranges[device])

    def own_number(self, visit: Visit) -> int:
        layers, group = self.ranges[self.traffic.lanes.device(visit.layer)], self._group_of[visit.batch]
        before = (visit.step * self.traffic.batches + self.groups[group].start) * len(layers)
        return before + (visit.layer - layers.start) * len(self.groups[group]) + visit.batch - self.groups[group].start

    def own_period(self, device: int) -> int:
        return len(self.ranges[device]) * self.traffic.batches

    def _own_visit(self, device: int, number: int) -> Visit | None:
        """The visit of this number among those of a device; None after the last."""
        layers = self.ranges[device]
        step, rest = divmod(number, len(layers) * self.traffic.batches)
        if step >= self.traffic.steps:
            return None
        group = self.groups[self._group_of[rest // len(layers)]]
        layer, place = divmod(rest - group.start * len(layers), len(group))
        return Visit(step, layers.start + layer, group.start + place)

    def ways(self, *moved: Data, batches: int = 1) -> int:
        """The most there can be on a device: they have different numbers of layers. From step to step, all buffers of a batch
        go on by the same numbers."""

        def on_device(device: int) -> int:
            users = (self._users.get((data, device)) for data in moved)
            buffers = [self.buffers_of(data) if own is None else own.buffers for data, own in zip(moved, users)]
            return min(batches * lcm(*buffers), prod(buffers))

        return max(map(on_device, range(len(self.ranges))))

    def weight_number(self, step: int, layer: int, batch: int) -> int:
        layers = self.ranges[self.traffic.lanes.device(layer)]
        return (step * len(self.groups) + self._group_of[batch]) * len(layers) + layer - layers.start

    def weight_batch(self, batch: int) -> int:
        return self.groups[self._group_of[batch]].start

    @property
    def buffers(self) -> int:
        """One more than for weights if transfers overlap: one result is still being stored while the next is fetched."""
        return self.traffic.buffers + 1 if self.traffic.buffers > 1 else 1

    @property
    def ahead(self) -> int:
        """A round of the last device: the others have begun the next one when it begins its own."""
        return len(self.ranges[-1]) * max(map(len, self.groups)) if self.traffic.buffers > 1 else 0

    # -- tasks -------------------------------------------------------------------------------------------------------

    def tasks(self) -> Iterator[Task]:
        issue = Issuer(self)
        for device in range(len(self.ranges)):
            for ahead in range(self.traffic.buffers - 1):
                yield from self._weights(issue, device, ahead)
            yield from self._kv(issue, device, *range(self.rows_ahead(device)))
        for number in range(self._rounds):
            for turn in self._turns(number):
                yield from self._turn(issue, *turn)

    def _turn(self, issue: Issuer, device: int, step: int, group: int) -> Iterator[Task]:
        """The tasks of a device in a round. Its hidden states come from devices that have their tasks already:
        nothing is fetched for the next round."""
        visits = [self.number(*visit) for visit in self._visits(device, step, group)]
        ahead = min(self.traffic.buffers, len(self.groups[group])) - 1
        yield from issue.fetched(Data.HIDDEN, *visits[:ahead])
        for place, number in enumerate(visits):
            visit = self.visit(number)
            if self.begins_pass(visit.batch):
                yield from self._weights(issue, device, self.weight_number(*visit) + self.traffic.buffers - 1)
            yield from self._kv(issue, device, self.own_number(visit) + self.rows_ahead(device))
            yield from issue.fetched(Data.HIDDEN, *visits[place + ahead : place + ahead + 1])
            yield from issue.computed(number)
            yield from issue.stored(number)

    def rows_ahead(self, device: int = 0) -> int:
        """Any further, a fetch of KV or of a state would overtake its own store."""
        return min(self.traffic.buffers, self.own_period(device)) - 1

    def _weights(self, issue: Issuer, device: int, number: int) -> Iterator[Task]:
        """Fetches a layer for a group; `number` counts what the device does with its weights."""
        layers = self.ranges[device]
        passes, layer = divmod(number, len(layers))
        step, group = divmod(passes, len(self.groups))
        if step < self.traffic.steps:
            first = self.groups[group].start
            yield from issue.fetched(Data.WEIGHTS, self.number(step, layers.start + layer, first))

    def _kv(self, issue: Issuer, device: int, *numbers: int) -> Iterator[Task]:
        for number in numbers:
            visit = self._own_visit(device, number)
            if visit is not None:
                yield from issue.of_rows(self.number(*visit))


def _even_ranges(number: int, count: int) -> Iterator[range]:
    for place in range(count):
        yield range(place * number // count, (place + 1) * number // count)
