"""Small made-up worlds for the planning tests: random traffic, a model of plain sizes, an executor in slow motion."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from h2o_flexgen.core.model_spec import ATTENTION_VISIT, AttentionHalves, LayerSpec, ModelSpec, TensorSpec
from h2o_flexgen.core.site import DEVICE, DISK, HOST, TIERS
from h2o_flexgen.core.workload import Batch, Block
from h2o_flexgen.schedule.ops import COMPUTE_LANE, Key, Task
from h2o_flexgen.schedule.traffic import Traffic

TIER_MIXES = ([DEVICE], [HOST], [DISK], [HOST, DISK], [DEVICE, HOST, DISK])


def random_moves(random: Random, layers: int = 6, batches: int = 5) -> Traffic:
    count, width = random.randint(1, layers), random.randint(1, batches)
    kv_tiers, hidden_tiers = random.choice(TIER_MIXES), random.choice(TIER_MIXES)
    with_kv = [layer for layer in range(count) if random.random() < 0.7]
    made = Traffic(
        steps=random.randint(1, 4),
        layers=count,
        batches=width,
        buffers=random.randint(1, 4),
        accelerator=random.random() < 0.5,
        weights_on_disk=_some(random, count),
        weights_on_host=_some(random, count),
        kv={(layer, batch): random.choice(kv_tiers) for layer in with_kv for batch in range(width)},
        hidden=tuple(random.choice(hidden_tiers) for _ in range(width)),
        kv_before=random.random() < 0.3,
        kv_after=random.random() < 0.3,
        attends_on_host=random.random() < 0.4,
        rows_join=random.random() < 0.3,
        state={(layer, batch): random.choice(TIERS) for layer in _some(random, count) for batch in range(width)},
    )
    return made if made.accelerator else replace(made, choosing=_some(random, count))


def choosing_moves(random: Random) -> Traffic:
    """Steps choose what is read of the KV of layers, most of them with layers behind them of which nothing moves."""
    count, width = random.randint(2, 9), random.randint(1, 5)
    with_kv = [layer for layer in range(count) if random.random() < 0.5]
    tiers = random.choice([[DISK], [DISK, HOST]])
    return Traffic(
        steps=random.randint(2, 4),
        layers=count,
        batches=width,
        buffers=random.choice([1, 2, 2, 3, 4]),
        weights_on_disk=random.choice([frozenset(), _some(random, count)]),
        kv={(layer, batch): random.choice(tiers) for layer in with_kv for batch in range(width)},
        choosing=frozenset(layer for layer in with_kv if random.random() < 0.8),
        hidden=random.choice([(), tuple(random.choice([HOST, DISK]) for _ in range(width))]),
        state={(layer, batch): random.choice([HOST, DISK]) for layer in _few(random, count) for batch in range(width)},
        accelerator=random.random() < 0.4,
        attends_on_host=random.random() < 0.3,
        kv_before=random.random() < 0.3,
        kv_after=random.random() < 0.3,
        rows_join=random.random() < 0.3,
    )


def _few(random: Random, count: int) -> list[int]:
    return [layer for layer in range(count) if random.random() < 0.15]


def _some(random: Random, count: int) -> frozenset[int]:
    share = random.choice([0.0, 0.5, 1.0])
    return frozenset(index for index in range(count) if random.random() < share)


def streamed(steps: int, layers: int, batches: int, buffers: int, accelerator: bool = False) -> Traffic:
    """Traffic with all weights on disk, and all else where it is computed with."""
    return Traffic(steps, layers, batches, buffers, accelerator, weights_on_disk=frozenset(range(layers)))


def in_halves(spec: ModelSpec) -> ModelSpec:
    """The same with attention that may be left and gone on with, as a layer does that chooses what is read of its KV."""
    halves = AttentionHalves("attention", "before", "behind", spec.width, frozenset({"o"}))
    return replace(spec, layers=tuple(replace(one, halves=halves if one.has_kv else None) for one in spec.layers))


def tiny_spec(blocks: int = 2, width: int = 8, vocab: int = 50, tied: bool = True) -> ModelSpec:
    """An OPT-like model: embedding, attention and mlp apart, a head that is the embedding again if it is tied."""

    def tensor(name: str, *shape: int) -> TensorSpec:
        return TensorSpec(name, shape, itemsize=4, stored_itemsize=2)

    def products(tensors: Sequence[tuple[str, TensorSpec]]) -> tuple[tuple[str, float], ...]:
        return tuple((name, 1.0) for name, one in tensors if len(one.shape) == 2)

    embedding = tensor("embed", vocab, width)
    layers = [LayerSpec(("embed",), (("embed_tokens", embedding),), (), width, token_table="embed_tokens")]
    for index in range(blocks):
        attention = [(part, tensor(f"{index}.{part}", width, width)) for part in ("q", "k", "v", "o")]
        attention.append(("norm", tensor(f"{index}.norm", width)))
        mlp = [("up", tensor(f"{index}.up", 4 * width, width)), ("down", tensor(f"{index}.down", width, 4 * width))]
        visits = (ATTENTION_VISIT,)
        layers += [
            LayerSpec(("attention",), tuple(attention), products(attention), width, index, has_kv=True, visits=visits),
            LayerSpec(("mlp",), tuple(mlp), products(mlp), width, index, passing_width=12 * width),
        ]
    head = (("head", embedding if tied else tensor("head", vocab, width)), ("norm", tensor("final.norm", width)))
    layers.append(LayerSpec(("head",), head, products(head), vocab, logit_matrix="head"))
    return ModelSpec("tiny", "opt", width, 4 * width, 2, 2, width // 2, vocab, 64, "float32", tuple(layers))


def with_experts(share: float, blocks: int = 2, width: int = 8) -> ModelSpec:
    """The same, with matrices in its mlps that each multiply a share of the rows."""
    spec = tiny_spec(blocks, width)
    shared = {layer: tuple((name, share) for name, _ in layer.products) for layer in spec.layers if layer.functions == ("mlp",)}
    return replace(spec, layers=tuple(replace(one, products=shared.get(one, one.products)) for one in spec.layers))


def of_slices(spec: ModelSpec, slices: int) -> ModelSpec:
    """The same, with so many experts for each mlp, each a layer of its own and asked for by an even part of the rows."""
    layers: list[LayerSpec] = []
    for layer in spec.layers:
        layers += [_expert(layer, number, slices) for number in range(slices)] if layer.functions == ("mlp",) else [layer]
    return replace(spec, layers=tuple(layers))


def of_unlike_blocks(blocks: int, single: int, slices: int) -> ModelSpec:
    """A model of which the first blocks have a single mlp, and all others so many experts."""
    spec = tiny_spec(blocks, width=32)
    layers: list[LayerSpec] = []
    for layer in spec.layers:
        has_experts = layer.functions == ("mlp",) and layer.block is not None and layer.block >= single
        layers += [_expert(layer, number, slices) for number in range(slices)] if has_experts else [layer]
    return replace(spec, layers=tuple(layers))


def _expert(mlp: LayerSpec, number: int, slices: int) -> LayerSpec:
    tensors = tuple((name, replace(one, name=f"{one.name}.{number}")) for name, one in mlp.tensors)
    products = tuple((name, 1 / slices) for name, _ in mlp.products)
    experts = tuple((name, number) for name, _ in tensors)
    return replace(mlp, tensors=tensors, products=products, experts=experts, part=f"expert {number}")


def block_of(lengths: Sequence[Sequence[int]], gen_len: int = 3) -> Block:
    """A batch for every list of prompt lengths."""
    starts = [sum(map(len, lengths[:index])) for index in range(len(lengths))]
    rows = [tuple(range(start, start + len(each))) for start, each in zip(starts, lengths)]
    return Block(tuple(Batch(row, tuple(each)) for row, each in zip(rows, lengths)), gen_len)


def last_block_of(context: int, lengths: Sequence[int], gen_len: int = 3) -> Block:
    """A batch of one row for every length, of texts that live on and have grown to where this block ends their context."""
    batches = [Batch((row,), (length,), (context - length - gen_len + 1,), context) for row, length in enumerate(lengths)]
    return Block(tuple(batches), gen_len)


def durations(tasks: Sequence[Task], random: Random) -> Callable[[Task], float]:
    """Seconds of tasks, all different, some much longer than others."""
    seconds = {task.key: random.random() * random.choice([0.1, 1.0, 5.0]) for task in tasks}
    return lambda task: seconds[task.key]


# -- an executor in slow motion ------------------------------------------------------------------------------------------


@dataclass
class _Worker:
    """Takes the first task of its queue, waits for its needs, does it."""

    lane: str
    task: Task | None = None
    end: float | None = None


@dataclass
class SlowMotion:
    """An event by event model of the executor, written without a look at `simulate`: one thread that issues and computes,
    workers that take from the queue of their lane in order."""

    seconds: Callable[[Task], float]
    ahead: int | None
    workers_of: dict[str, int] = field(default_factory=dict)
    intervals: dict[Key, tuple[float, float]] = field(default_factory=dict)
    now: float = 0.0

    def run(self, tasks: Sequence[Task]) -> dict[Key, tuple[float, float]]:
        self.to_issue, self.pending = deque(tasks), deque[Task]()
        self.queues = {lane: deque[Task]() for lane in sorted({task.lane for task in tasks})}
        others = [lane for lane in self.queues if lane != COMPUTE_LANE]
        self.workers = [_Worker(lane) for lane in others for _ in range(self.workers_of.get(lane, 1))]
        self.main = _Worker(COMPUTE_LANE)
        while len(self.intervals) < len(tasks) or any(worker.end is not None for worker in [*self.workers, self.main]):
            while self._act():
                pass
            self._wait()
        return self.intervals

    def _act(self) -> bool:
        """Does whatever takes no time; True if anything did."""
        acted = self._issue()
        for worker in [*self.workers, self.main]:
            if worker.task is None and worker is not self.main and self.queues[worker.lane]:
                worker.task, acted = self.queues[worker.lane].popleft(), True
            if worker.task is not None and worker.end is None and all(self._ended(need) for need in worker.task.needs):
                worker.end, acted = self.now + self.seconds(worker.task), True
                self.intervals[worker.task.key] = (self.now, worker.end)
        return acted

    def _issue(self) -> bool:
        if self.main.task is not None:
            return False
        limit = len(self.to_issue) + len(self.pending) if self.ahead is None else self.ahead
        if self.pending and (len(self.pending) > limit or not self.to_issue):
            self.main.task = self.pending.popleft()
        elif self.to_issue:
            task = self.to_issue.popleft()
            (self.pending if task.lane == COMPUTE_LANE else self.queues[task.lane]).append(task)
        else:
            return False
        return True

    def _ended(self, need: Key) -> bool:
        return need in self.intervals and self.intervals[need][1] <= self.now

    def _wait(self) -> None:
        """Advances to the next end of a task."""
        busy = [worker for worker in [*self.workers, self.main] if worker.end is not None]
        assert busy, "nothing runs and nothing can start: the schedule is stuck"
        self.now = min(worker.end for worker in busy if worker.end is not None)
        for worker in busy:
            if worker.end == self.now:
                worker.task = worker.end = None
