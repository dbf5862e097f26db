"""The block schedule: while a layer's batches compute, the weights of a later layer arrive slice by slice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from h2o_flexgen.schedule.ops import Data, Op, Task
from h2o_flexgen.schedule.schedule import BlockOrder, Issuer


@dataclass(frozen=True)
class Zigzag(BlockOrder):
    name = "zigzag"
    cuts_layers = True

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

    def tasks(self) -> Iterator[Task]:
        batches, issue = self.traffic.batches, Issuer(self)
        if self.traffic.is_still:
            yield from issue.computes()
            return
        rows_ahead = self.rows_ahead()
        hidden_ahead = min(self.traffic.buffers, batches) - 1
        every = tuple(range(batches))

        for ahead in range(self.read_ahead):
            yield from issue.sliced(Op.READ_W, ahead * batches, every)
            if ahead < self.load_ahead:
                yield from issue.sliced(Op.LOAD_W, ahead * batches, every)
        yield from issue.of_rows(*range(rows_ahead))
        for number in range(self.traffic.visits):
            batch = number % batches
            first = number - batch
            # with one buffer nothing is fetched beside a compute: all slices come before the layer starts
            slices = (batch,) if self.load_ahead else every if batch == 0 else ()
            yield from issue.sliced(Op.READ_W, first + self.read_ahead * batches, slices)
            yield from issue.sliced(Op.LOAD_W, first + self.load_ahead * batches, slices)
            yield from issue.of_rows(number + rows_ahead)
            yield from issue.fetched(Data.HIDDEN, number + hidden_ahead)
            yield from issue.chosen(number)
            if self._chooses_ahead(number + 1):
                yield from issue.chosen(number + 1)
            yield from issue.computed(number)
            yield from issue.stored(number)

    def _chooses_ahead(self, number: int) -> bool:
        """Whether a visit chooses what is fetched of its KV before the COMPUTE of the visit before, so that both go on at once.
        The first batch of a layer does not wait for weights meanwhile."""
        if not self.load_ahead or self.traffic.batches == 1 or number >= self.traffic.visits:
            return False
        visit = self.visit(number)
        return visit.batch > 0 or not self.traffic.moves_weights(visit.layer)
