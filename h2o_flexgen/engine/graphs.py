"""Graphs: decode COMPUTEs of a block that keeps its data on the device, captured once and replayed as one launch each.

A graph works on the addresses and numbers that it was captured with. So what changes from step to step (tokens, and the numbers
of a step) is written into fixed tensors, and hidden states go through a fixed tensor. A graph is valid for one layer and batch
with its present rows, and for one buffer through which the layer's weights come. When rows leave, or begin to evict tokens, new
graphs are made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.engine.rows import BatchRows, RowsPart
from h2o_flexgen.memory.device import Device
from h2o_flexgen.planning.plan import ON, Plan

Compute = Callable[[RowsPart, "Tensor | None"], Tensor]  # computes a layer on the rows of a part
EAGER = 2  # steps before a capture: libraries initialise in the first, and rows that leave soon are not worth a capture


class GraphPlace(NamedTuple):
    """The layer of a graph, and the buffer in which its weights lay when it was captured."""

    layer: int
    buffer: int  # of those through which weights come


class Kind(NamedTuple):
    """What graphs of a batch depend on besides addresses."""

    generation: int  # how often rows have left
    rows: int
    evicts: tuple[bool, ...]  # at each level of KV heads
    stores_singly: tuple[bool, ...]

    @classmethod
    def of(cls, rows: BatchRows) -> Kind:
        slots = [now.slots for now in rows.parts[0].levels]
        return cls(rows.generation, rows.size, tuple(own.evicts for own in slots), tuple(own.stores_singly for own in slots))


@dataclass
class _Batch:
    """The tensors that stay, and the graphs that work on them."""

    kind: Kind
    source: RowsPart  # the part from which they have their present tokens and numbers
    part: RowsPart
    hidden: dict[torch.Size, Tensor] = field(default_factory=dict)
    ends: dict[int, Tensor] = field(default_factory=dict)  # layer -> where its hidden states stay
    eager: Counter[int] = field(default_factory=Counter)  # layer -> times that it was computed without a graph
    graphs: dict[GraphPlace, Callable[[], None]] = field(default_factory=dict)  # what replays a layer

    @classmethod
    def of(cls, kind: Kind, part: RowsPart) -> _Batch:
        levels = tuple(replace(now, table=now.table.clone()) for now in part.levels)
        return cls(kind, part, replace(part, levels=levels, tokens=part.tokens.clone()))

    def follow(self, part: RowsPart) -> None:
        """Takes the tokens and numbers of another step."""
        if part is not self.source:
            self.part.tokens.copy_(part.tokens)
            for own, now in zip(self.part.levels, part.levels, strict=True):
                own.follow(now)
            self.source = part

    def put(self, hidden: Tensor) -> Tensor:
        """Copies hidden states into the fixed tensor of their shape."""
        if hidden.shape not in self.hidden:
            self.hidden[hidden.shape] = torch.empty_like(hidden)
        there = self.hidden[hidden.shape]
        there.copy_(hidden)
        return there


class StepGraphs:
    def __init__(self, device: Device, is_asked: bool) -> None:
        """`is_asked`: a layer that cannot be captured is an error; otherwise it is computed without graphs."""
        self._device = device
        self._is_asked = is_asked
        self._batches: dict[int, _Batch] = {}
        self.replayed = 0  # COMPUTEs
        self.given_up: str | None = None  # why nothing is captured any more

    @classmethod
    def of(cls, plan: Plan, device: Device) -> StepGraphs | None:
        """None where graphs are not possible, or where the plan excludes them."""
        return cls(device, plan.graphs == ON) if device.captures and plan.may_capture else None

    def take(self, rows: BatchRows) -> bool:
        """Whether the next COMPUTE of these rows may be a graph: a decode step of all of them, without shared prefixes."""
        (part, *others) = rows.parts
        return not others and not part.now.is_prefill and not part.now.prefixes and self.given_up is None

    def compute(self, place: GraphPlace, number: int, rows: BatchRows, hidden: Tensor | None, compute: Compute) -> Tensor:
        """Computes a layer on the batch of this number, by its graph if there is one. `hidden`: what the layer before left."""
        batch, layer = self._batch(number, rows), place.layer
        batch.follow(rows.parts[0])
        if hidden is not None:
            hidden = self._staying(batch, hidden)
        if place not in batch.graphs and batch.eager[layer] >= EAGER:
            self._capture(batch, place, hidden, compute)
        if place in batch.graphs:
            batch.graphs[place]()
            self.replayed += 1
        else:
            batch.ends[layer] = batch.put(compute(batch.part, hidden))
            batch.eager[layer] += 1
        return batch.ends[layer]

    def _batch(self, number: int, rows: BatchRows) -> _Batch:
        kind, known = Kind.of(rows), self._batches.get(number)
        if known is None or known.kind != kind:
            if known is not None and known.graphs:
                self._device.settle()  # before graphs go, none of them may be under way
            self._batches[number] = _Batch.of(kind, rows.parts[0])
        return self._batches[number]

    def _staying(self, batch: _Batch, hidden: Tensor) -> Tensor:
        return hidden if hidden is batch.hidden.get(hidden.shape) else batch.put(hidden)

    def _capture(self, batch: _Batch, place: GraphPlace, hidden: Tensor | None, compute: Compute) -> None:
        def work() -> None:
            batch.put(compute(batch.part, hidden))

        try:
            batch.graphs[place] = self._device.capture(work)
        except RuntimeError as error:
            if self._is_asked:
                raise ValueError(f"a layer cannot be captured ({error}); leave out graphs {ON!r}") from error
            self.given_up = str(error).partition("\n")[0]
