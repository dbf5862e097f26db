"""The block schedule: while a layer's batches compute, the weights of a later layer arrive slice by slice.

Where the KV of a layer is chosen elsewhere, a batch also passes the layers behind it of which nothing moves, before the next
batch comes. So the first batches can choose in the next such layer, while the KV of the last ones is fetched for this one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from h2o_flexgen.schedule.ops import Data, Op, Task, Visit
from h2o_flexgen.schedule.schedule import BlockOrder, Issuer


@dataclass(frozen=True)
class Zigzag(BlockOrder):
    name = "zigzag"
    cuts_layers = True

    # -- the order of visits -----------------------------------------------------------------------------------------

    def visit(self, number: int) -> Visit:
        step, place = divmod(number, self.own_period(0))
        layers = self._passed_together[place // self.traffic.batches]
        batch, layer = divmod(place - layers.start * self.traffic.batches, len(layers))
        return Visit(step, layers.start + layer, batch)

    def number(self, step: int, layer: int, batch: int) -> int:
        layers = self._passed_together[layer]
        return (step * self.traffic.layers + layers.start) * self.traffic.batches + batch * len(layers) + layer - layers.start

    def begins_layer(self, layer: int, batch: int) -> bool:
        return len(self._passed_together[layer]) > 1 or super().begins_layer(layer, batch)

    @cached_property
    def _passed_together(self) -> tuple[range, ...]:
        """The layers that a batch passes before the next batch does, for each of them."""
        found: list[range] = []
        for layer in range(self.traffic.layers):
            if found and self._leads(found[-1].start) and self._rests(layer):
                found[-1] = range(found[-1].start, layer + 1)
            else:
                found.append(range(layer, layer + 1))
        return tuple(layers for layers in found for _ in layers)

    def _leads(self, layer: int) -> bool:
        """Whether steps choose what is fetched of a layer's KV, and neither its weights move nor hidden states."""
        traffic, batches = self.traffic, range(self.traffic.batches)
        chooses = any(traffic.brings_chosen(layer, batch) for batch in batches)
        shares = traffic.moves_weights(layer) or any(map(traffic.moves_hidden, batches))
        return chooses and not shares and self.load_ahead > 0

    def _rests(self, layer: int) -> bool:
        return all(self.traffic.rests(layer, batch) for batch in range(self.traffic.batches))

    # -- how far ahead -----------------------------------------------------------------------------------------------

    @property
    def buffers(self) -> int:
        """One more than for weights if transfers overlap: one result is still being stored while the next is fetched."""
        return self.traffic.buffers + 1 if self.traffic.buffers > 1 else 1

    @property
    def ahead(self) -> int:
        """A whole layer; otherwise a short fetch after a long compute would be issued too late to keep its lane busy."""
        return 0 if self.traffic.is_still else self.load_ahead * self.traffic.batches

    @property
    def load_ahead(self) -> int:
        """Layers between the one that is loaded and the one that is computed."""
        return self.traffic.buffers - 1

    @property
    def read_ahead(self) -> int:
        """One layer more with an accelerator: the disk runs ahead of the link, so that no load waits for its read."""
        return self.load_ahead + (1 if self.traffic.accelerator and self.load_ahead else 0)

    def rows_ahead(self, device: int = 0) -> int:
        """Any further, a fetch of KV or of a state would overtake its own store."""
        return min(self.traffic.buffers, self.traffic.layers * self.traffic.batches) - 1

    @property
    def hidden_ahead(self) -> int:
        """Visits between the one for which hidden states are fetched and the one that is computed."""
        return min(self.traffic.buffers, self.traffic.batches) - 1

    @property
    def chosen_at_once(self) -> int:
        return min(self.traffic.buffers, self.traffic.batches) if self.traffic.reads_chosen else 1

    # -- tasks -------------------------------------------------------------------------------------------------------

    def tasks(self) -> Iterator[Task]:
        batches, issue = self.traffic.batches, Issuer(self)
        if self.traffic.is_still:
            yield from issue.computes()
            return
        rows_ahead, hidden_ahead = self.rows_ahead(), self.hidden_ahead
        every = tuple(range(batches))
        waiting: deque[int] = deque()  # visits that may choose: their batches have left the layer before

        for ahead in range(self.read_ahead):
            yield from issue.sliced(Op.READ_W, self._first_in(ahead), every)
            if ahead < self.load_ahead:
                yield from issue.sliced(Op.LOAD_W, self._first_in(ahead), every)
        yield from issue.of_rows(*range(rows_ahead))
        for number in range(self.traffic.visits):
            layer, batch = divmod(number, batches)  # of all steps, if batches pass one by one
            # with one buffer nothing is fetched beside a compute: all slices come before the layer starts
            slices = (batch,) if self.load_ahead else every if batch == 0 else ()
            yield from issue.sliced(Op.READ_W, self._first_in(layer + self.read_ahead), slices)
            yield from issue.sliced(Op.LOAD_W, self._first_in(layer + self.load_ahead), slices)
            yield from issue.of_rows(number + rows_ahead)
            yield from issue.fetched(Data.HIDDEN, number + hidden_ahead)
            while waiting and (waiting[0] <= number or self._chooses_before(waiting[0], number)):
                yield from issue.chosen(waiting.popleft())
            yield from issue.computed(number)
            yield from issue.stored(number)
            waiting.extend(self._choosing_next(number))

    def _first_in(self, layer: int) -> int:
        """The first visit in a layer, counted over all steps."""
        return self.number(*divmod(layer, self.traffic.layers), 0)

    def _choosing_next(self, number: int) -> Iterator[int]:
        """The visit for which a batch goes on after this one, if it chooses what is fetched of its KV."""
        step, layer, batch = self.visit(number)
        following = Visit(*divmod(step * self.traffic.layers + layer + 1, self.traffic.layers), batch)
        if following.step < self.traffic.steps and self.traffic.chooses(following):
            yield self.number(*following)

    def _chooses_before(self, later: int, number: int) -> bool:
        """Whether a later visit chooses what is fetched of its KV before this one is computed, so that both go on at once. All
        else that it needs is fetched by then, and whatever had its buffer was computed before the visit that ends last: that
        one is still being stored."""
        (step, layer, batch), traffic, users = self.visit(later), self.traffic, self.users_of(Data.KV)
        if not self.load_ahead or users is None:
            return False
        waits = (
            (step * traffic.layers + layer >= number // traffic.batches + self.load_ahead and traffic.moves_weights(layer))
            or (later > number + self.rows_ahead() and traffic.moves_state(layer, batch))
            or (later > number + self.hidden_ahead and traffic.moves_hidden(batch))
        )
        return not waits and users.before(later) - users.buffers < users.before(number - 1)
