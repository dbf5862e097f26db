"""Pricing: the seconds of a task on a machine. The simulator, the linear program and the timeline all use it.

A transfer takes its bytes over a bandwidth; a computation takes the sum of its parts: products, decoding of packed weights,
attention, and what every value and every visit costs beside them. All of it is linear in the shares of a placement, as long as
the batches stay the same. `docs/cost-model.md` has the terms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, prod

from h2o_flexgen.core.buffer_layout import part_starts
from h2o_flexgen.core.model_spec import LayerSpec, ModelSpec, asked_for, numbered
from h2o_flexgen.core.site import DEVICE, DISK, HOST
from h2o_flexgen.formats.kernel_sizes import FLOAT_BYTES
from h2o_flexgen.formats.kernel_table import FLOAT32, PRODUCT, Kernel
from h2o_flexgen.formats.table import FORMATS, PLAIN
from h2o_flexgen.planning.batch_pass import BatchPass, Prompts, products_of, rows_of
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.planning.cost import AtLevel, Cost
from h2o_flexgen.planning.machine import CHOOSING, CHOSEN, EVICTION, PLAIN_SCORES, WHOLE, WITH_SCORES, Machine
from h2o_flexgen.planning.placement import Place
from h2o_flexgen.planning.seating import Seating
from h2o_flexgen.policies.policy import ATTENTION
from h2o_flexgen.schedule.ops import (
    COMPUTE_LANE,
    LOAD,
    PASS,
    READ,
    STORE,
    WORKERS,
    WRITE,
    Data,
    Key,
    Op,
    Task,
    Visit,
    longest_by_kind,
)
from h2o_flexgen.schedule.schedule import Schedule
from h2o_flexgen.schedule.simulate import simulate
from h2o_flexgen.schedule.trace import Trace
from h2o_flexgen.schedule.traffic import Traffic

STATE_FLOPS = 8.0  # for each value of a matrix of states that a token passes: it fades, is read, added to, and read again
INDEX_PACE = 0.62  # of the rate at which a CPU reads KV of one query a head: that of an index by which it chooses, as measured
# Of the rate at which a link copies, that at which kernels read chosen slots over it: some hundred bytes at a place. It is
# assumed, and not measured: no profile has such reads yet.
CHOSEN_LINK_PACE = 0.5
LONG_ROW = 1 << 12  # values of a row over which its extra bytes are averaged
SHARED_DISK, SHARED_MEMORY = "disk", "memory"  # names of bounds beside the lanes


@dataclass(frozen=True)
class Pricing:
    planned: BlockPlan
    machine: Machine
    averaged: bool = False  # over the steps of a journal of KV, so that any step represents those around it
    known_seating: Seating | None = None  # of a block where rows come and go, if it is known already

    @cached_property
    def cost(self) -> Cost:
        return Cost(self.planned, self.known_seating)

    @property
    def spec(self) -> ModelSpec:
        return self.planned.spec

    @property
    def schedule(self) -> Schedule:
        return self.planned.schedule

    # -- a task --------------------------------------------------------------------------------------------------------

    def seconds(self, task: Task | Key) -> float:
        kind = self._kind(task)
        if kind not in self._known:
            self._known[kind] = self._seconds(task)
        return self._known[kind]

    def _seconds(self, task: Task | Key) -> float:
        if task.op is Op.ATTEND:
            return self._attending(task)
        if task.op is Op.CHOOSE:
            return self._choosing(task)
        if task.op.data is Data.KV and task.op.uses_disk and self.schedule.traffic.in_pages(task.layer, task.batch):
            return self._moving_pages(task)
        return self._moving(task) if task.op is not Op.COMPUTE else sum(self.compute_parts(task).values())

    @cached_property
    def _known(self) -> dict[object, float]:
        return {}

    def _kind(self, task: Task | Key) -> object:
        """The key of tasks that cost the same."""
        op, step, layer, batch = task[:4]
        if op.data is Data.WEIGHTS:
            return op, layer, self.schedule.traffic.is_of_prompts(step)
        kind = self._layer_kinds[self.schedule.traffic.is_of_prompts(step)][layer]
        if op.data is Data.HIDDEN:
            return op, step, kind, self._batch_kinds[batch], self.schedule.traffic.hidden[batch]
        of_visit = op is Op.COMPUTE and self._kind_of_visit(Visit(step, layer, batch))
        return op, step, kind, self._batch_kinds[batch], of_visit, self._attends_on_host(layer, batch)

    def _kind_of_visit(self, visit: Visit) -> object:
        """What the price of a COMPUTE depends on beside its layer and batch: what was decoded, recorded and made before."""
        traffic, place = self.schedule.traffic, visit[1:]
        return self.schedule.begins_layer(*place), traffic.rests(*place), traffic.chooses(visit)

    @cached_property
    def _layer_kinds(self) -> tuple[Sequence[int], Sequence[int]]:
        """The same number for layers that compute the same, with heads of the same levels and as much beside them: in a decode
        step, and in a step of prompts."""
        heads, beside = self.planned.kv.heads, self._adapter_bytes
        found = [
            numbered((kind, heads(at), beside[at]) for at, kind in enumerate(form.layer_kinds)) for form in self.spec.forms
        ]
        return found[0], found[-1]

    def _layer(self, task: Task | Key) -> LayerSpec:
        """The layer as the rows of a visit pass it."""
        return self.planned.spec_at(task.step).layers[task.layer]

    @cached_property
    def _batch_kinds(self) -> Sequence[int]:
        batches = self.planned.block.batches
        return range(len(batches)) if self.planned.block.is_running else numbered((one.lengths, one.seen) for one in batches)

    def _moving(self, task: Task | Key) -> float:
        machine, op, nbytes = self.machine, task.op, self._nbytes(task)
        if op.lane == PASS:  # from one device to another over both their links, whichever is slower
            return nbytes / min(machine.bandwidth(LOAD), machine.bandwidth(STORE)) + machine.task_seconds
        rate = machine.bandwidth(op.lane, pinned=self.planned.plan.page_locks(op))
        if op.data is Data.KV and op.uses_disk:
            rate = min(rate, machine.kv_read_per_s if op.fetches else machine.kv_write_per_s)
        if op.lane == LOAD and self.cost.brings_chosen(task):
            rate *= CHOSEN_LINK_PACE
        seconds = nbytes / rate + machine.task_seconds
        if machine.has_accelerator and op.data is Data.HIDDEN and self.schedule.traffic.hidden[task.batch] == DISK:
            seconds += nbytes / machine.bandwidth(READ if op.fetches else WRITE)  # in the same task
        return seconds

    def _moving_pages(self, task: Task | Key) -> float:
        """Seconds of KV that lies row by row on disk: tokens that a visit chooses, one by one, or ranges of rows."""
        moved, op, machine = self.cost.moved_pages(task), task.op, self.machine
        rate = min(machine.bandwidth(op.lane), machine.kv_read_per_s if op.fetches else machine.kv_write_per_s)
        pieces_per_s = machine.small_reads_per_s if self.cost.brings_chosen(task) else machine.small_writes_per_s
        return max(moved.nbytes / rate, moved.pieces / pieces_per_s) + machine.task_seconds

    def _choosing(self, task: Task | Key) -> float:
        """Seconds of making the queries of a visit, and the keys and values, which its COMPUTE finds. The comparison with the
        index is counted there, and decoding as if no choice came between two visits of a layer."""
        layer, rows = self._layer(task), self.cost.batch_pass(task.step, task.batch).rows
        return self._begun(layer, rows) + self._visit_seconds(layer, 1) if rows else 0.0

    def _begun(self, layer: LayerSpec, rows: int) -> float:
        """Seconds of the products that a layer makes up to its attention."""
        return self._products(layer.without(*(() if layer.halves is None else layer.halves.used_behind)), rows)

    def latency(self, op: Op) -> float:
        """The seconds of a task that are not the disk's: where a lane has several workers, it does the next task meanwhile."""
        return self.machine.task_seconds if WORKERS[op.lane] > 1 else 0.0

    def _nbytes(self, task: Task | Key) -> float:
        return self.cost.mean_nbytes(task) if self.averaged else self.cost.nbytes(task)

    # -- a COMPUTE -----------------------------------------------------------------------------------------------------

    def compute_parts(self, task: Task | Key) -> dict[str, float]:
        """The seconds of a visit, by what they are spent on."""
        layer, one = self._layer(task), self.cost.batch_pass(task.step, task.batch)
        rows = Counter({rows_of(one): 1}) if layer.makes_logits else products_of(one)
        first = self.schedule.begins_layer(task.layer, task.batch)
        is_begun = self.schedule.traffic.chooses(Visit(*task[1:4])) and layer.halves is not None and one.rows
        made = self._begun(layer, one.rows) if is_begun else 0.0
        return {
            "products": sum(count * self._products(layer, each) for each, count in rows.items()) - made,
            "adapters": sum(count * self._adapters(task.layer, each) for each, count in rows.items()),
            "decoding": self._decoding(layer, rows, first),
            "attention": self._attention(task) if layer.has_kv else 0.0,
            "states": self._states(layer, one),
            "values": sum(each * count for each, count in rows.items()) * self._values(layer) / self.machine.values_per_s,
            "overhead": self._overhead(task, layer, sum(rows.values())),
        }

    def _products(self, layer: LayerSpec, rows: int) -> float:
        total = 0.0
        for (format, share), values in layer.multiplied_values.items():
            own = _met(share, rows)
            rate = self.machine.product_rate(self.spec.product, format, self.spec.dtype, own)
            total += asked_for(share, rows) * 2.0 * values * own / rate
        return total

    def _adapters(self, layer: int, rows: int) -> float:
        """Seconds of the products with thin matrices, where each row has one of the adapters, and all are asked for alike."""
        nbytes = self._adapter_bytes[layer]
        if not nbytes:
            return 0.0
        own, dtype = rows / self.planned.adapters.number, FLOAT32 if FLOAT32 in self.machine.flops_per_s else self.spec.dtype
        return 2.0 * nbytes / FLOAT_BYTES * own / self.machine.flop_rate(dtype, own)

    @cached_property
    def _adapter_bytes(self) -> Sequence[int]:
        """Bytes of the matrices of all adapters, by layer."""
        return [self.planned.adapters.held({tensor.name for _, tensor in one.tensors}) for one in self.spec.layers]

    def _packed_product(self, format: str, rows: float) -> Kernel | None:
        return self.machine.packed_product(self.spec.product, format, self.spec.dtype, rows)

    def _decoding(self, layer: LayerSpec, rows: Iterable[int], first: bool) -> float:
        """Seconds of decoding, once for a pass over the layer's weights; parts of a logit matrix without a place, once per
        batch."""
        total = 0.0
        for (format, share), values in layer.multiplied_values.items():
            if format == PLAIN or all(self._packed_product(format, _met(share, each)) for each in rows):
                continue
            asked = asked_for(share, max(rows))  # nothing is decoded of experts that no row asks for
            again = 1.0 if first else self._share_decoded_again(layer)
            total += asked * again * values / self.machine.decoding_rate(format, self._bytes_to_decode(format))
        return total

    def _bytes_to_decode(self, format: str) -> float:
        """Bytes read and written to decode a value."""
        shape = FORMATS[format].rows_together, LONG_ROW
        return FORMATS[format].nbytes(shape, self.spec.itemsize) / prod(shape) + self.spec.itemsize

    def _share_decoded_again(self, layer: LayerSpec) -> float:
        if not layer.logit_parts:
            return 0.0
        parts, rooms = len(layer.logit_parts), len(part_starts(self.spec, layer))
        return (parts - rooms + 1) / parts if parts > rooms else 0.0

    def _values(self, layer: LayerSpec) -> float:
        """Values of one token that norms, activations and additions pass over; there are none after logits."""
        return 0.0 if layer.makes_logits else layer.values_around_products

    def _states(self, layer: LayerSpec, one: BatchPass) -> float:
        """Seconds of reading and writing the states of rows, at the rate at which attention reads KV; and of passing the tokens
        of prompts through them, at that of its arithmetic."""
        machine = self.machine
        reading = machine.attention_bytes_per_s.get(DEVICE if machine.has_accelerator else HOST, inf)
        computing = machine.attention_flops_per_s.get(FLOAT32, machine.attention_flops_per_s.get(self.spec.dtype, inf))
        matrices = sum(prod(state.shape) for state in layer.states if state.is_of_heads)
        tokens = sum(count * part.tokens for part, count in one.prompts.items())
        return self._state_bytes(layer, one) / reading + STATE_FLOPS * matrices * tokens / computing

    @staticmethod
    def _state_bytes(layer: LayerSpec, one: BatchPass) -> int:
        """Bytes of the states of rows, read and written once."""
        read = sum(count * part.rows for part, count in one.prompts.items())  # those of prefixes as well, which rows share
        return 2 * (one.rows + read) * sum(state.nbytes for state in layer.states)

    def _overhead(self, task: Task | Key, layer: LayerSpec, parts: int) -> float:
        """Seconds of a visit beside its work."""
        return 0.0 if self._is_chained(task) else self._visit_seconds(layer, parts) + self._eviction_seconds(task)

    def _is_chained(self, task: Task | Key) -> bool:
        """Whether it is one of many visits that are replayed in one call. Such a visit costs nothing beside its work."""
        one, layer = self.cost.batch_pass(task.step, task.batch), self._layer(task)
        if self.machine.has_accelerator or not self.planned.plan.may_record or layer.makes_logits:
            return False
        is_step = bool(one.rows) and not one.prompts and not one.shared.tokens
        return is_step and self.schedule.traffic.rests(task.layer, task.batch)

    def _visit_seconds(self, layer: LayerSpec, parts: int) -> float:
        """Seconds of calls and the like. The first of its parts finds neither code nor data of the layer in the caches."""
        visits, further = self.machine.visit_seconds, self.machine.part_seconds
        whole = sum(visits.get(kind, 0.0) for kind in layer.visits)
        again = sum(further.get(kind, visits.get(kind, 0.0)) for kind in layer.visits)
        return whole + (parts - 1) * again if parts else 0.0

    def _eviction_seconds(self, task: Task | Key) -> float:
        """Seconds of an eviction's many small operations, whatever the sizes: on scores, and on the tokens that leave and
        that come. Each level has its own."""
        levels = self.cost.by_level(task)
        is_here = task.op is Op.ATTEND or not self._attends_on_host(task.layer, task.batch)
        evicting = sum(at.one.evicts and bool(is_here or at.one.joining) for at in levels)
        return evicting * self.machine.visit_seconds.get(EVICTION, 0.0)

    # -- attention -----------------------------------------------------------------------------------------------------

    def _attention(self, task: Task | Key) -> float:
        """Seconds of a layer's attention: one for each level that has heads in it."""
        one, seconds = self.cost.batch_pass(task.step, task.batch), 0.0
        if one.rows and self._attends_on_host(task.layer, task.batch):
            seconds = self._to_host_and_back(self.spec.at(task.layer), one.rows)
        elif one.rows:
            seconds = sum(map(self._decode_attention, self.cost.by_level(task)))
        return seconds + (sum(self._prompt_attention(task, at) for at in self.cost.by_level(task)) if one.prompts else 0.0)

    def _attending(self, task: Task | Key) -> float:
        """Seconds of what the host does for a visit, beside the KV. Of its attention the machine of a device has one rate, at
        which it reads; an index is read more slowly, since slots are ranked by it."""
        one, machine = self.cost.batch_pass(task.step, task.batch), self.machine
        if not one.rows:
            return machine.task_seconds
        rate = machine.attention_bytes_per_s.get(HOST, inf)
        levels = self.cost.by_level(task)
        ranked = sum(map(self.cost.index_to_read, levels))
        reading = (sum(map(self.cost.bytes_to_read, levels)) + ranked * (1 / INDEX_PACE - 1)) / rate
        heads = one.rows * self.spec.at(task.layer).kv_heads * machine.head_seconds
        return reading + heads + self._eviction_seconds(task) + machine.task_seconds

    def _decode_attention(self, at: AtLevel) -> float:
        spec, machine, one = self.planned.kv.specs[at.level], self.machine, at.one
        (slots, indexed), heads = self.cost.read_slots(at), at.heads * (spec.heads // spec.kv_heads)
        tier = DEVICE if machine.has_accelerator else HOST
        nbytes = self.cost.bytes_to_read(at) + one.shared.tokens * at.heads * spec.kv_bytes_per_head
        is_plain = spec.kv_codec == PLAIN
        flops = 4.0 * heads * spec.head_dim * (slots + one.shared.attended)
        values = (
            0.0 if is_plain else float(spec.kv_sets) * at.heads * spec.head_dim * (slots + one.shared.tokens)
        )  # values to decode
        format, latents_for = spec.dtype if is_plain else spec.kv_codec, spec.heads if spec.values_in_keys else None
        computing = flops / machine.attention_rate(CHOSEN if indexed else WHOLE, format, latents_for)
        computing += 2.0 * heads * spec.head_dim * indexed / machine.attention_rate(CHOOSING, format, latents_for)
        unpacking = values / machine.unpacking_rate(spec.kv_codec, self._bytes_to_decode(spec.kv_codec))
        reading = nbytes / machine.attention_bytes_per_s.get(tier, inf)
        return max(reading, computing + unpacking) + one.rows * at.heads * machine.head_seconds

    def _attends_on_host(self, layer: int, batch: int) -> bool:
        return self.schedule.traffic.is_beside(layer, batch)

    def _to_host_and_back(self, spec: ModelSpec, rows: int) -> float:
        """Seconds of sending queries and new keys and values to the host, and the result of attention back."""
        machine = self.machine
        there = rows * (spec.heads + spec.kv_sets * spec.kv_heads) * spec.head_dim * spec.itemsize
        back = rows * spec.heads * spec.head_dim * spec.itemsize
        return there / machine.device_to_host_per_s + back / machine.host_to_device_per_s + 2 * machine.task_seconds

    def _prompt_attention(self, task: Task | Key, at: AtLevel) -> float:
        policy, occupancy = self.planned.levels[at.level].policy, self.planned.kv.occupancies[at.level][task.batch]
        scored = policy.ranks_by == ATTENTION and occupancy.evicts
        rate = self.machine.prompt_flops_per_s.get(WITH_SCORES if scored else PLAIN_SCORES, inf)
        spec = self.spec.at(task.layer)
        values = sum(count * self._values_attended(part, task, spec) for part, count in at.one.prompts.items())
        return 4.0 * at.heads * (spec.heads // spec.kv_heads) * values / rate

    def _values_attended(self, part: Prompts, task: Task | Key, spec: ModelSpec) -> float:
        """Values that each head multiplies queries of prompts with, and shares with: keys by their width. Where keys and values
        of heads are made for that, so are those of what is held; new tokens have as many operations without."""
        pairs, own = part.tokens * part.attended, spec.prompt_heads
        if own is None or part.echoes or spec.product != PRODUCT or not self._layer(task).has_plain(own.matrices):
            return pairs * spec.head_dim
        if not own.pays(part.length, part.held + part.length):
            return pairs * spec.head_dim
        return pairs * own.width + part.rows * part.held * own.latent * (own.made + own.value) / 2

    # -- a step --------------------------------------------------------------------------------------------------------

    def lane_seconds(self, step: int) -> dict[str, float]:
        """Seconds that each lane works in one step: the step takes at least the longest. Of several devices' lanes of a kind it
        is the one that works longest. Latency that other tasks of the lane can hide is not work of the lane."""
        return self._by_lane(self._priced(step))

    def visits_share(self, step: int) -> float:
        """The share of the time for computing a step that its visits cost beside their work: the same for more rows."""
        parts = [(count, self.compute_parts(key)) for key, count in self._unlike_tasks(step) if key.op is Op.COMPUTE]
        total = sum(count * sum(each.values()) for count, each in parts)
        return sum(count * each["overhead"] for count, each in parts) / total if total else 0.0

    def _priced(self, step: int) -> list[tuple[Key, float]]:
        """The tasks of a step and the seconds for which they occupy their lane, with all slices of weights together, and all
        tasks that are like them."""
        return [
            (key, count * self.schedule.parts(key.op) * (self.seconds(key) - self.latency(key.op)))
            for key, count in self._unlike_tasks(step)
        ]

    def _unlike_tasks(self, step: int) -> Iterator[tuple[Key, int]]:
        """One task of each kind in a step, and how many of its kind there are. With slices of experts a model has thousands of
        layers, and most are alike."""
        for place, count in self._unlike_places[self.schedule.traffic.is_of_prompts(step)]:
            yield from ((key, count) for key in self.schedule.of_visit(Visit(step, *place)))

    @cached_property
    def _unlike_places(self) -> tuple[Sequence[tuple[Place, int]], Sequence[tuple[Place, int]]]:
        """A layer and batch of each kind, and how many of its kind there are: in a decode step, and in a step of prompts."""
        return self._places_by_kind(1, of_prompts=False), self._places_by_kind(0, of_prompts=True)

    def _places_by_kind(self, step: int, of_prompts: bool) -> list[tuple[Place, int]]:
        traffic, cost, layers, found = self.schedule.traffic, self.cost, dict[object, list[int]](), list[tuple[Place, int]]()
        last, kinds, kept = traffic.layers - 1, self._layer_kinds[of_prompts], {at for at, _ in (*traffic.kv, *traffic.state)}
        weights = [*zip(cost.stored_bytes(step), cost.loaded_bytes(step))]
        for layer in range(traffic.layers):
            kv = tuple(_homes(traffic, (layer, batch)) for batch in range(traffic.batches)) if layer in kept else ()
            devices = traffic.lanes.device(layer), traffic.lanes.device(min(layer + 1, last))
            kind = kinds[layer], weights[layer], traffic.moves_of_weights(step, layer), kv, devices, layer == 0, layer == last
            layers.setdefault(kind, []).append(layer)
        for alike in layers.values():
            batches = dict[object, list[int]]()
            for batch, kind_of_batch in enumerate(self._kinds_of_batches):
                batches.setdefault((kind_of_batch, _homes(traffic, (alike[0], batch))), []).append(batch)
            found += [((alike[0], own[0]), len(alike) * len(own)) for own in batches.values()]
        return found

    @cached_property
    def _kinds_of_batches(self) -> Sequence[object]:
        homes = self.schedule.traffic.hidden or (None,) * len(self._batch_kinds)
        return [*zip(self._batch_kinds, homes, map(self.schedule.begins_pass, range(len(self._batch_kinds))))]

    def _by_lane(self, priced: Iterable[tuple[Key, float]]) -> dict[str, float]:
        lanes, total = self.schedule.traffic.lanes, dict[str, float]()
        for key, seconds in priced:
            lane = lanes.of(key)
            total[lane] = total.get(lane, 0.0) + seconds
        return longest_by_kind(total)

    # -- what lanes share ----------------------------------------------------------------------------------------------

    def bounds(self, step: int) -> dict[str, float]:
        """Seconds that a step takes at least, by lane and by what lanes share. Reads and writes share a disk; all transfers
        share the memory of the host, on a CPU also with the weights and the KV that are computed with."""
        priced = self._priced(step)
        reads, writes = self._disk_seconds(priced)
        memory = self.memory_bytes(step) / self.machine.host_read_per_s
        return {**self._by_lane(priced), SHARED_DISK: (reads + writes) / self.machine.disk_both, SHARED_MEMORY: memory}

    def least_seconds(self, step: int) -> float:
        """The largest of these bounds."""
        return least_seconds(self.bounds(step), self.schedule.traffic.buffers)

    def memory_bytes(self, step: int) -> float:
        """Bytes of host memory that a step moves, or computes with."""
        return self._memory_bytes(self._unlike_tasks(step))

    def stretches(self, step: int) -> dict[Op, float]:
        """How many times longer tasks take because of what they share with others."""
        bounds = self.bounds(step)
        longest_of_disk = max(self._disk_seconds(self._priced(step)))
        disk = max(1.0, bounds[SHARED_DISK] / longest_of_disk) if longest_of_disk else 1.0
        longest = max(seconds for name, seconds in bounds.items() if name not in (SHARED_DISK, SHARED_MEMORY))
        memory = max(1.0, bounds[SHARED_MEMORY] / longest) if longest else 1.0
        by_lane = self._stretched_by_processor(bounds.get(READ, 0.0), bounds.get(COMPUTE_LANE, 0.0))
        of_disk = {op: disk if self.schedule.traffic.uses_disk(op) else 1.0 for op in Op}
        return {op: max(memory, of_disk[op], by_lane.get(op.lane, 1.0)) for op in Op}

    def _stretched_by_processor(self, reads: float, computing: float) -> dict[str, float]:
        """How many times longer reads and COMPUTEs take where a CPU does both. Each has its share of its rate while the other
        is under way, and all of it when the other has ended."""
        machine, overlaps = self.machine, self.schedule.traffic.buffers > 1
        if machine.has_accelerator or not (overlaps and reads and computing):
            return {}
        of_reads, of_computing = machine.reads_beside_computing, machine.computing_beside_reads
        if reads / of_reads >= computing / of_computing:
            return {READ: 1 + computing * (1 - of_reads) / of_computing / reads, COMPUTE_LANE: 1 / of_computing}
        return {READ: 1 / of_reads, COMPUTE_LANE: 1 + reads * (1 - of_computing) / of_reads / computing}

    def _disk_seconds(self, priced: Iterable[tuple[Key, float]]) -> tuple[float, float]:
        """Seconds of reads, and of writes."""
        reads = writes = 0.0
        for key, seconds in priced:
            if self.schedule.traffic.uses_disk(key.op):
                reads += seconds if key.op.fetches else 0.0
                writes += seconds if key.op.stores else 0.0
        return reads, writes

    def _memory_bytes(self, keys: Iterable[tuple[Key, int]]) -> float:
        return sum(count * self._memory_bytes_of(key) for key, count in keys)

    def _memory_bytes_of(self, key: Key) -> float:
        if key.op is not Op.COMPUTE:
            return self.schedule.parts(key.op) * self._nbytes(key) + (self._attended_bytes(key) if key.op is Op.ATTEND else 0)
        if self.machine.has_accelerator:
            return 0.0
        of_states = self._state_bytes(self._layer(key), self.cost.batch_pass(key.step, key.batch))
        of_states += self._adapter_bytes[key.layer]
        return self._matrix_bytes(key) + of_states + (self._attended_bytes(key) if self._layer(key).has_kv else 0)

    def _attended_bytes(self, key: Key) -> float:
        newest = self.spec.at(key.layer).kv_bytes_per_head  # of each head: it was written just now
        return sum(self.cost.bytes_to_read(at) - at.one.rows * at.heads * newest for at in self.cost.by_level(key))

    def _matrix_bytes(self, key: Key) -> float:
        """Bytes of the matrices that a visit multiplies with."""
        rows = max(products_of(self.cost.batch_pass(key.step, key.batch)), default=0)
        by_share = self._matrix_bytes_by_share[self.schedule.traffic.is_of_prompts(key.step)][key.layer]
        return sum(asked_for(share, rows) * nbytes for share, nbytes in by_share.items())

    @cached_property
    def _matrix_bytes_by_share(self) -> tuple[Sequence[Mapping[float, int]], Sequence[Mapping[float, int]]]:
        """The bytes of each layer's matrices, by the share of rows that they multiply: in a decode step, and in a step of
        prompts."""
        found = [[*map(_bytes_by_share, form.layers)] for form in self.spec.forms]
        return found[0], found[-1]

    def simulated(self) -> Trace:
        """The trace of the block as it should run on this machine."""
        schedule = self.schedule
        lanes, latency = schedule.traffic.lanes, lambda task: self.latency(task.op)
        return simulate(schedule.tasks(), self.seconds, schedule.ahead, lanes=lanes, latency=latency)


def _homes(traffic: Traffic, place: Place) -> tuple[str | None, str | None]:
    """The tiers of what rows keep in a layer."""
    return traffic.kv.get(place), traffic.state.get(place)


def least_seconds(bounds: Mapping[str, float], buffers: int) -> float:
    """Seconds that a step takes at least: its largest bound, or with one buffer, where nothing overlaps, all lanes together."""
    if buffers > 1:
        return max(bounds.values())
    return max(sum(seconds for name, seconds in bounds.items() if name not in (SHARED_DISK, SHARED_MEMORY)), *bounds.values())


def _met(share: float, rows: float) -> float:
    """The rows that meet a matrix that any of these rows is multiplied with, on average."""
    return rows * share / asked_for(share, rows) if rows else 0.0


def _bytes_by_share(layer: LayerSpec) -> Mapping[float, int]:
    found = Counter[float]()
    for matrix, share in layer.multiplied:
        found[share] += matrix.nbytes
    return found


def lane_bounds(planned: BlockPlan, step: int, machine: Machine) -> dict[str, float]:
    """Seconds that each lane needs at least for one step: bytes over bandwidth, flops over their rate."""
    bare = replace(machine, task_seconds=0.0, head_seconds=0.0, visit_seconds={}, values_per_s=inf)
    return Pricing(planned, bare).lane_seconds(step)
