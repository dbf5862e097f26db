"""Graphs: decode COMPUTEs of a block, captured once and replayed as one launch each; on a CPU, as one call of the library.

A graph works on the addresses and numbers that it was captured with. So what changes from step to step (tokens, and the
numbers of a step) is written into fixed tensors, and hidden states go through a fixed tensor. A graph is valid for one
layer and batch with its present rows, and for one buffer through which the layer's weights come, its KV and states. When
rows leave, or begin to evict tokens, new graphs are made.

On a CPU, layers of which nothing moves are chained: when the first of them is due, the whole chain of a batch is one call.
The other COMPUTEs of the chain then have happened.

Layers that do the same work on memory of their own are `LikeLayers`. The first two of a kind are recorded. If the second
recording is the first one with the second layer's memory, those of all other layers of the kind are made in the same way,
in a fraction of the time. Otherwise each layer is recorded. So nothing is taken on trust: memory of a layer that its
likeness does not name would show in the second recording.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from h2o_flexgen.core.prefix_groups import SharedPrefix
from h2o_flexgen.engine.executor import Past
from h2o_flexgen.engine.rows import BatchRows, RowsPart
from h2o_flexgen.kernels.recording import CannotBeRecorded, Program
from h2o_flexgen.kv.step import KVStep
from h2o_flexgen.memory.device import Device
from h2o_flexgen.planning.plan import ON, Plan
from h2o_flexgen.planning.working_space import GUESSED_AT_ONCE
from h2o_flexgen.schedule.ops import Task, Visit


class Likeness(NamedTuple):
    """What a layer does, and on which memory. Layers of one kind do the same afterwards, too: no program tells of that."""

    kind: Hashable
    memory: Sequence[Tensor]
    place: str  # in the model, for reports

    @property
    def key(self) -> Hashable:
        return self.kind, tuple((each.dtype, each.shape, each.stride()) for each in self.memory)


@dataclass
class _First:
    """The first recording of a kind."""

    program: Program
    memory: Sequence[Tensor]
    as_recorded: Program | None  # kernels write to what calls are told, where memory counts rows; None: a second one has come
    others_are_like_it: bool = False


class LikeLayers:
    def __init__(self) -> None:
        self._known: dict[Hashable, _First] = {}

    def made(self, likeness: Likeness) -> Program | None:
        """The recording for a layer, if it is known without being made."""
        first = self._known.get(likeness.key)
        if first is None or not first.others_are_like_it:
            return None
        return first.program.moved([*zip(first.memory, likeness.memory)], likeness.place.encode())

    def add(self, likeness: Likeness, program: Program) -> None:
        """Learns from a recording that was made, and not replayed yet."""
        first = self._known.get(likeness.key)
        if first is None:
            self._known[likeness.key] = _First(program, likeness.memory, program.copied())
        elif first.as_recorded is not None:
            first.others_are_like_it = first.as_recorded.does_as(program, [*zip(first.memory, likeness.memory)])
            first.as_recorded = None


Afterwards = Callable[[Visit], None]  # what Python does once a visit is computed
# Computes a layer on the rows of a part, and adds to the list what is to be done after this and after each replay.
Compute = Callable[[RowsPart, "Tensor | None", list[Afterwards]], Tensor]
Replay = Callable[[], None]


class LayerWork(NamedTuple):
    """What is done for a layer and batch."""

    compute: Compute
    likeness: Callable[[], Likeness]  # asked for where the work is recorded


BY_ADAPTERS = "rows have adapters"  # why layers are computed without graphs
WORTH_STEPS = 3  # that rows stay together: to capture a layer takes about twice as long as to compute it
Where = Callable[[Collection[int]], tuple[int, ...]]  # the places of prefixes


class GraphPlace(NamedTuple):
    """The layer of a graph, and the buffers in which its weights, its KV and its states lay when it was captured."""

    layer: int
    weights: int = 0
    kv: int = 0
    states: int = 0


Ahead: TypeAlias = "tuple[tuple[int, int], ...]"  # for calls of attention beside the step's own: a row, and its tokens


class Kind(NamedTuple):
    """What graphs of a batch depend on besides addresses."""

    generation: int  # how often rows have left
    rows: int
    evicts: tuple[bool, ...]  # at each level of KV heads
    stores_singly: tuple[bool, ...]
    shared: tuple[SharedPrefix | None, ...]  # what each row shares with others
    prefixes: tuple[int, ...]  # where that lies
    adapters: tuple[int, ...]  # of each row
    ahead: Ahead  # of tokens that are guessed

    @classmethod
    def of(cls, rows: BatchRows, where: Where) -> Kind:
        part = rows.parts[0]
        now, slots = part.now, [level.slots for level in part.levels]
        evicts, stores = tuple(own.evicts for own in slots), tuple(own.stores_singly for own in slots)
        shared = now.prefixes, where(rows.prefixes) if now.prefixes else ()
        ahead = tuple((one.rows.start, one.levels[0].rows) for one in part.ahead)
        return cls(rows.generation, rows.size, evicts, stores, *shared, part.adapters, ahead)

    def is_like(self, other: Kind) -> bool:
        """Whether other rows have the same work, if none shares a prefix."""
        return (self.evicts, self.stores_singly) == (other.evicts, other.stores_singly) and not (self.shared or other.shared)


class Graph(NamedTuple):
    replay: Replay
    afterwards: Sequence[Afterwards]


class Chain(NamedTuple):
    """Consecutive layers of a batch as one launch."""

    layers: range
    replay: Replay
    moments: Tensor  # (layers + 1,), int64: when each began and the last one ended, in nanoseconds


@dataclass
class _Batch:
    """The tensors that stay, and the graphs that work on them."""

    kind: Kind
    source: RowsPart  # the part from which they have their present tokens and numbers
    part: RowsPart
    hidden: dict[torch.Size, Tensor] = field(default_factory=dict)
    ends: dict[int, Tensor] = field(default_factory=dict)  # layer -> where its hidden states stay
    eager: Counter[int] = field(default_factory=Counter)  # layer -> times that it was computed without a graph
    met: set[GraphPlace] = field(default_factory=set)  # where it was: what is kept for its memory is there
    graphs: dict[GraphPlace, Graph] = field(default_factory=dict)
    chains: dict[int, Chain] = field(default_factory=dict)  # by their first layer
    past: dict[int, Past] = field(default_factory=dict)  # layers of this step that a chain has computed
    refused: dict[int, str] = field(default_factory=dict)  # layer -> why it is computed without a graph
    like: LikeLayers = field(default_factory=LikeLayers)
    ready: set[int] = field(default_factory=set)  # layers that may be captured before they were computed without a graph

    @classmethod
    def of(cls, kind: Kind, part: RowsPart, before: _Batch | None) -> _Batch:
        """`before`: the batch with the rows that it had before, or with the same ones and no guesses."""
        ahead = tuple(one._replace(levels=_staying(one.levels)) for one in part.ahead)
        batch = cls(kind, part, replace(part, levels=_staying(part.levels), tokens=part.tokens.clone(), ahead=ahead))
        if batch.part.adapted is not None:
            batch.part.adapted.make_ready()
        if before is not None and before.kind.is_like(kind):
            batch._make_ready(before)
        return batch

    def _make_ready(self, before: _Batch) -> None:
        """Makes the tensors that stay, as they were made for other rows of this batch, so that layers are captured at once."""
        for levels in (self.part.levels, *(one.levels for one in self.part.ahead)):
            for own, known in zip(levels, before.part.levels, strict=True):
                own.make_as_in(known)
        _ = self.part.positions  # where tokens are ahead, torch joins them
        shapes = {shape: torch.Size((len(self.part.tokens), *shape[1:])) for shape in before.hidden}
        self.hidden = {own: before.hidden[shape].new_empty(own) for shape, own in shapes.items()}
        self.ends = {layer: self.hidden[shapes[end.shape]] for layer, end in before.ends.items()}
        self.eager, self.ready = Counter(before.eager), set(before.ends)

    def follow(self, part: RowsPart) -> None:
        """Takes the tokens and numbers of another step."""
        if part is not self.source:
            self.part.tokens.copy_(part.tokens)
            for own, now in zip(_steps_of(self.part), _steps_of(part), strict=True):
                own.follow(now)
            if part.ahead:
                self.part.positions.copy_(part.positions)
            self.source = part

    def put(self, hidden: Tensor) -> Tensor:
        """Copies hidden states into the fixed tensor of their shape."""
        if hidden.shape not in self.hidden:
            self.hidden[hidden.shape] = torch.empty_like(hidden)
        there = self.hidden[hidden.shape]
        if there is not hidden:
            there.copy_(hidden)
        return there


def _staying(levels: Sequence[KVStep]) -> tuple[KVStep, ...]:
    return tuple(replace(now, table=now.table.clone()) for now in levels)


def _steps_of(part: RowsPart) -> list[KVStep]:
    return [*part.levels, *(now for one in part.ahead for now in one.levels)]


class StepGraphs:
    def __init__(self, device: Device, is_asked: bool, rests: Callable[[int, int], bool], where: Where) -> None:
        """`is_asked`: a layer that cannot be captured is an error; otherwise it is computed without graphs. `rests`: whether
        nothing moves for a layer and a batch."""
        self._device = device
        self._is_asked = is_asked
        self._rests = rests
        self._where = where
        self._batches: dict[int, _Batch] = {}  # the present ones
        self._known: dict[tuple[int, Ahead], _Batch] = {}
        self.replayed = 0  # COMPUTEs
        self.given_up: str | None = None  # why nothing is captured any more
        self.refused: dict[int, str] = {}  # layer -> why it was computed without a graph
        self.met_adapters = False  # steps had rows with adapters, and were computed without graphs

    @classmethod
    def of(cls, plan: Plan, device: Device, rests: Callable[[int, int], bool], where: Where) -> StepGraphs | None:
        """None where graphs are not possible, or where the plan excludes them."""
        device.empty_room()  # prompts come first in a block, and are promised what steps of an earlier one had
        may = plan.may_capture(device.graph_bytes) if device.accelerator else plan.may_record
        return cls(device, plan.graphs == ON, rests, where) if device.captures and may else None

    def take(self, rows: BatchRows) -> bool:
        """Whether the next COMPUTE of these rows may be a graph: a decode step of all of them, with a token of each; or of one
        row on a CPU, with guesses of a usual number. On an accelerator no row may have an adapter."""
        (part, *others) = rows.parts
        if others or part.now.is_prefill or self.given_up is not None:
            return False
        if part.ahead and (self._device.accelerator or not _is_usual(part)):
            return False
        is_beside = bool(part.adapters) and self._device.accelerator
        self.met_adapters |= is_beside
        return not is_beside

    def unrecorded(self, titles: Sequence[str]) -> dict[str, str]:
        """Why layers were computed without graphs, by their titles. What keeps a layer from all of them counts for more than
        adapters, which keep it from some steps."""
        beside = dict.fromkeys(titles[1:-1], BY_ADAPTERS) if self.met_adapters else {}
        return beside | {titles[layer]: why for layer, why in self.refused.items()}

    def is_past(self, task: Task) -> bool:
        """Whether a chain has computed it."""
        batch = self._batches.get(task.batch)
        return batch is not None and task.layer in batch.past

    def past(self, task: Task) -> Past | None:
        """When it was computed, if a chain has done so. Asked once."""
        batch = self._batches.get(task.batch)
        return batch.past.pop(task.layer, None) if batch is not None and batch.past else None

    def compute(self, place: GraphPlace, visit: Visit, rows: BatchRows, hidden: Tensor | None, work: LayerWork) -> Tensor:
        """Computes a layer on a batch, by its graph if there is one, and the layers that are chained behind it. `hidden`: what
        the layer before left."""
        batch, layer = self._batch(visit.batch, rows), place.layer
        batch.follow(rows.parts[0])
        if hidden is not None:
            hidden = batch.put(hidden)
        is_known = place in batch.graphs or layer in batch.refused
        is_worth_it = batch.eager[layer] >= self._device.steps_before_capture and rows.steps_together >= WORTH_STEPS
        is_worth_it &= place in batch.met or not self._device.accelerator
        if is_worth_it and not is_known:
            self._capture(batch, place, hidden, work)
        if place not in batch.graphs:
            afterwards = list[Afterwards]()
            batch.ends[layer] = batch.put(work.compute(batch.part, hidden, afterwards))
            batch.eager[layer] += 1
            batch.met.add(place)
            _do(afterwards, visit)
            return batch.ends[layer]
        return self._replay(batch, place, visit)

    def _batch(self, number: int, rows: BatchRows) -> _Batch:
        kind = Kind.of(rows, self._where)
        known = self._known.get((number, kind.ahead))
        if known is None or known.kind != kind:
            if known is not None and known.graphs:
                self._device.settle()  # before graphs go, none of them may be under way
            before = known or self._known.get((number, ()))
            known = _Batch.of(kind, rows.parts[0], None if self._device.accelerator else before)
            self._known[number, kind.ahead] = known
        self._batches[number] = known
        return known

    def _capture(self, batch: _Batch, place: GraphPlace, hidden: Tensor | None, work: LayerWork) -> None:
        try:
            batch.graphs[place] = self._captured(batch, hidden, work)
        except RuntimeError as error:
            if self._is_asked and place.layer not in batch.ready:
                raise ValueError(f"a layer cannot be captured ({error}); leave graphs={ON!r} out") from error
            reason = str(error).partition("\n")[0]
            if place.layer in batch.ready:  # something was not made ready: the layer is computed once, which makes it
                batch.ready.discard(place.layer)
                batch.eager[place.layer] = 0
            elif isinstance(error, CannotBeRecorded):
                self.refused[place.layer] = batch.refused[place.layer] = reason
            else:
                self.given_up = reason

    def _captured(self, batch: _Batch, hidden: Tensor | None, work: LayerWork) -> Graph:
        likeness = None if self._device.accelerator or batch.part.adapters else work.likeness()
        if likeness is not None and (made := batch.like.made(likeness)) is not None:
            return Graph(made, ())
        afterwards = list[Afterwards]()

        def once() -> None:
            batch.put(work.compute(batch.part, hidden, afterwards))

        graph = Graph(self._device.capture(once), afterwards)
        if likeness is not None and isinstance(graph.replay, Program) and not afterwards:
            batch.like.add(likeness, graph.replay)
        return graph

    def _replay(self, batch: _Batch, place: GraphPlace, visit: Visit) -> Tensor:
        chain = self._chain(batch, place, visit.batch)
        if chain is None:
            batch.graphs[place].replay()
            _do(batch.graphs[place].afterwards, visit)
            self.replayed += 1
            return batch.ends[place.layer]
        chain.replay()
        moments = [moment / 1e9 for moment in chain.moments.tolist()]
        for layer, *times in zip(chain.layers, moments, moments[1:]):
            batch.past[layer] = Past(*times)
            _do(batch.graphs[GraphPlace(layer)].afterwards, visit._replace(layer=layer))
        self.replayed += len(chain.layers)
        return batch.ends[chain.layers[-1]]

    # -- chains ------------------------------------------------------------------------------------------------------------

    def _chain(self, batch: _Batch, place: GraphPlace, number: int) -> Chain | None:
        """The chain that begins with a layer, once all its layers are captured; None if it is the only one."""
        first = place.layer
        if first not in batch.chains and self._device.chains and self._rests(first, number):
            layers = self._chained(batch, first, number)
            if len(layers) > 1 and all(GraphPlace(layer) in batch.graphs for layer in layers):
                moments = torch.zeros(len(layers) + 1, dtype=torch.long)
                replays = [batch.graphs[GraphPlace(layer)].replay for layer in layers]
                batch.chains[first] = Chain(layers, self._device.chained(replays, moments), moments)
        return batch.chains.get(first)

    def _chained(self, batch: _Batch, first: int, number: int) -> range:
        """The layers from the first one on of which nothing moves, up to one that is computed without a graph."""
        last = first
        while self._rests(last + 1, number) and last + 1 not in batch.refused:
            last += 1
        return range(first, last + 1)


def _is_usual(part: RowsPart) -> bool:
    """Whether tokens are ahead of one row, in a number for which it is worth to keep graphs, and nothing is taken back."""
    return part.now.rows == 1 and len(part.tokens) - 1 in GUESSED_AT_ONCE and all(one.of_one for one in part.ahead)


def _do(afterwards: Sequence[Afterwards], visit: Visit) -> None:
    for work in afterwards:
        work(visit)
