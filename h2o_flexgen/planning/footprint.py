"""The footprint of a plan: the bytes that a block holds on every tier, peak included, before anything is allocated.

A budget is a promise. `refuse_what_does_not_fit` keeps it: it names the tier, the need, the budget and what would fit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce

from h2o_flexgen.core.model_spec import LayerSpec, ModelSpec
from h2o_flexgen.core.tiers import DEVICE, DISK, HOST, TIERS
from h2o_flexgen.core.units import format_bytes
from h2o_flexgen.core.workload import Batch, Block, BlockSize, Workload
from h2o_flexgen.kernels.table import DECODE_ATTENTION, LIBRARIES, TORCH, Processor, choose
from h2o_flexgen.planning.block_plan import BlockPlan, BlockPlans
from h2o_flexgen.planning.placement import Placement, image_bytes
from h2o_flexgen.planning.plan import Plan, Shares
from h2o_flexgen.policies.occupancy import Occupancy
from h2o_flexgen.policies.policy import ATTENTION, SCORED_BYTES, KVPolicy
from h2o_flexgen.quant.codec import PLAIN
from h2o_flexgen.schedule.schedule import Schedule

PAGE, LINE = 4096, 64  # what large and small tensors are aligned to
BUFFERS = 6 + 2 + 1 + 1  # threads that have one: disk threads, both workers of the read lane, the write lane, the caller
BUFFER_BYTES = (4 << 20) + 2 * PAGE
DEVICE_LIBRARIES = 64 << 20  # work space that matrix products keep; the context itself is outside of every budget
DECODING_BYTES, ENCODING_BYTES = 16 << 20, 24 << 20  # what torch holds in passing: some rows at a time
KERNEL_DTYPES = ("float32", "bfloat16")  # prompts in these are attended by a kernel:
KERNEL_KEYS, KERNEL_WIDTH, KERNEL_QUERIES = 256, 16, 48  # 4 PANEL, LANES and BLOCK of prompt_attention.c, at most
SORTED_BYTES, RANKED_BYTES = 48, 40  # per place of a prompt, and per slot: ranks, indices and masks
SLACK = 1.15  # on the estimate of what the functions of a layer allocate in passing: allocators keep some of it


Parts = dict[str, dict[str, int]]  # tier -> what it holds -> bytes


@dataclass(frozen=True)
class Footprint:
    """tier -> what it holds -> bytes."""

    parts: Mapping[str, Mapping[str, int]]

    def total(self, tier: str) -> int:
        return sum(self.parts.get(tier, {}).values())

    def __or__(self, other: Footprint) -> Footprint:
        """What is enough for both: blocks of a workload run one after the other."""
        return Footprint(
            {
                tier: {
                    name: max(self.parts.get(tier, {}).get(name, 0), other.parts.get(tier, {}).get(name, 0))
                    for name in [*self.parts.get(tier, {}), *other.parts.get(tier, {})]
                }
                for tier in TIERS
            }
        )


def footprint(planned: BlockPlan, writes_weights: bool = False, kernel_threads: int = 0, scored_at_once: int = 0) -> Footprint:
    """`writes_weights`: the disk share of the weights is not there yet but written for the run (dummy weights).
    `kernel_threads`: of the kernels for the CPU; 0 where torch does their work. `scored_at_once`: positions of prompts that
    logits are made for together; 0 where only the last of each row has any."""
    spec, block, schedule = planned.spec, planned.block, planned.schedule
    parts: Parts = {tier: defaultdict(int) for tier in TIERS}
    compute = DEVICE if schedule.traffic.accelerator else HOST
    _add_weights(parts, spec, planned.placement, schedule, compute, writes_weights)
    _add_kv(parts, planned, compute)
    _add_hidden(parts, spec, block, schedule, compute)
    kinds = {(slots.batch.lengths, slots.batch.seen): slots for slots in planned.slots}  # most batches are like others
    working = max(working_bytes(spec, planned.plan, slots, kernel_threads, scored_at_once) for slots in kinds.values())
    if compute == DEVICE:
        largest = max(tensor.nbytes + min(tensor.decoded_nbytes, ENCODING_BYTES) for tensor in spec.tensors.values())
        parts[HOST]["loading"] = largest  # one tensor on its way to the device
        parts[DEVICE]["libraries"] = DEVICE_LIBRARIES
    decoded = [tensor.decoded_nbytes for tensor in spec.tensors.values()]
    parts[compute]["working space"] = int(SLACK * working) + min(DECODING_BYTES, 6 * max(decoded))
    parts[compute]["decoded weights"] = max(map(_decoded_bytes, spec.layers))
    largest = max(_kv_row_bytes(spec, batch) for batch in block.batches) if DISK in schedule.traffic.kv.values() else 0
    parts[HOST]["disk buffers"] = BUFFERS * max(BUFFER_BYTES, largest)  # weights that stay in memory come through them as well
    return Footprint({tier: dict(held) for tier, held in parts.items()})


def _add_weights(parts: Parts, spec: ModelSpec, placement: Placement, schedule: Schedule, compute: str, written: bool) -> None:
    arenas: dict[tuple[str, ...], str] = {(DEVICE,): DEVICE, (HOST,): HOST} if compute == DEVICE else {(DEVICE, HOST): HOST}
    for tiers, holder in arenas.items():
        sizes = [tensor.nbytes for tensor in spec.tensors.values() if placement.weights[tensor.name] in tiers]
        parts[holder]["weights"] += arena_bytes(sizes)
    if written:
        on_disk = [tensor for tensor in spec.tensors.values() if placement.weights[tensor.name] == DISK]
        parts[DISK]["weights"] += sum(_aligned(tensor.stored_nbytes) for tensor in on_disk)
    if schedule.traffic.weights_on_disk:
        parts[HOST]["weight slots"] += schedule.weight_buffers * _largest_layer(spec, placement, DISK)
    if schedule.traffic.accelerator:
        parts[DEVICE]["weight slots"] += schedule.weight_buffers * _largest_layer(spec, placement, DISK, HOST)


def _largest_layer(spec: ModelSpec, placement: Placement, *tiers: str) -> int:
    """Bytes of the layer that has most on these tiers."""
    return max(
        arena_bytes([tensor.nbytes for _, tensor in layer.tensors if placement.weights[tensor.name] in tiers])
        for layer in spec.layers
    )


def arena_bytes(sizes: Sequence[int]) -> int:
    """Of tensors that lie in one arena, as memory.pack lays them out: large ones start at a page, others at a line."""
    end = 0
    for nbytes in sizes:
        end = _aligned(end, PAGE if nbytes >= 16 * PAGE else LINE) + nbytes
    return _aligned(end)


def _aligned(nbytes: int, alignment: int = PAGE) -> int:
    return -(-nbytes // alignment) * alignment


def _decoded_bytes(layer: LayerSpec) -> int:
    return arena_bytes([tensor.decoded_nbytes for tensor in layer.decoded])


def _add_kv(parts: Parts, planned: BlockPlan, compute: str) -> None:
    spec, policy, schedule = planned.spec, planned.plan.policy, planned.schedule
    traffic, images = schedule.traffic, [image_bytes(spec, slots) for slots in planned.slots]
    for (_, batch), tier in traffic.kv.items():
        slots = planned.slots[batch]
        if policy.note_bytes:
            notes = slots.capacity * slots.batch.size * spec.kv_heads * policy.note_bytes
            parts[compute]["KV notes"] += _aligned(notes) + PAGE
        padded = (slots.capacity + slots.journal_capacity) * _kv_row_bytes(spec, slots.batch)
        parts[tier if tier != DEVICE else compute]["KV"] += padded if tier == DISK else images[batch] + PAGE
    ring = schedule.buffers * (max(images) + PAGE)
    if DISK in traffic.kv.values():
        parts[HOST]["KV slots"] += ring
    if traffic.links_kv and any(traffic.moves_kv(*place) for place in traffic.kv):
        parts[DEVICE]["KV slots"] += ring


def _kv_row_bytes(spec: ModelSpec, batch: Batch) -> int:
    """One slot of all rows, as it lies on disk."""
    return _aligned(batch.size * spec.kv_bytes_per_slot)


def _add_hidden(parts: Parts, spec: ModelSpec, block: Block, schedule: Schedule, compute: str) -> None:
    sizes = [hidden_bytes(spec, batch) for batch in block.batches]
    for nbytes, tier in zip(sizes, schedule.traffic.hidden):
        parts[tier if tier != DEVICE else compute]["activations"] += nbytes
    moved = [nbytes for batch, nbytes in enumerate(sizes) if schedule.traffic.moves_hidden(batch)]
    if moved:
        parts[compute]["activation slots"] += schedule.buffers * max(moved)
    if DISK in schedule.traffic.hidden:
        parts[HOST]["activation slots"] += (schedule.buffers if compute == DEVICE else 0) * max(moved) + max(moved)


def hidden_bytes(spec: ModelSpec, batch: Batch) -> int:
    return _aligned(batch.size * batch.prompt_len * spec.widest * spec.itemsize)


def working_bytes(spec: ModelSpec, plan: Plan, slots: Occupancy, kernel_threads: int = 0, scored_at_once: int = 0) -> int:
    """The most that the functions of one visit allocate at once: an estimate from their shapes, held against runs by a test."""
    policy, batch = plan.policy, slots.batch
    parts = (policy.slots(part, slots.gen_len) for part in batch.kinds_of_parts(plan.prefill_tokens))
    prefill = max(_prefill_bytes(spec, policy, part, kernel_threads) for part in parts)
    decode = batch.size * spec.heads * slots.capacity * (8 + 2 * spec.itemsize) + _evicting_bytes(spec, policy, slots)
    processor = Processor(library=LIBRARIES[0] if kernel_threads else TORCH)
    decode += batch.size * slots.capacity * _decoding_bytes_per_slot(spec, policy, processor)
    scored = min(scored_at_once, batch.size * batch.prompt_len)
    head = max(batch.size, scored) * spec.vocab * (3 * 4 + spec.itemsize) + scored * _normed_bytes(spec)
    return max(prefill, decode, head) + batch.size * batch.prompt_len * spec.widest * spec.itemsize


def _prefill_bytes(spec: ModelSpec, policy: KVPolicy, slots: Occupancy, kernel_threads: int) -> int:
    """Of prompts that are computed at once."""
    tokens, heads = slots.batch.size * slots.batch.prompt_len, spec.heads * spec.head_dim
    normed = _normed_bytes(spec)
    threads = kernel_threads if spec.dtype in KERNEL_DTYPES else 0
    widened = spec.itemsize if threads else max(spec.itemsize, 4)  # torch's column sums are in fp32
    attention = tokens * (normed + (4 * heads + 4 * spec.kv_heads * spec.head_dim) * widened)
    attention += _kernel_bytes(spec, slots, threads) if threads else _scored_bytes(spec, policy, slots)
    attention += _choosing_bytes(spec, policy, slots, threads) + _extending_bytes(spec, policy, slots, threads)
    if spec.kv_codec != PLAIN:
        attention += tokens * spec.kv_bytes_per_slot + min(ENCODING_BYTES, 4 * tokens * spec.kv_decoded_bytes_per_slot)
    return max(attention, tokens * (normed + max(layer.passing_width for layer in spec.layers) * spec.itemsize))


def _normed_bytes(spec: ModelSpec) -> int:
    """Of one token: norms work in fp32."""
    return 3 * spec.width * 4 + 2 * spec.widest * spec.itemsize


def _scored_bytes(spec: ModelSpec, policy: KVPolicy, slots: Occupancy) -> int:
    """In torch, to add up what keys get."""
    if policy.ranks_by != ATTENTION:
        return 0
    batch, keys = slots.batch, slots.held(0) + slots.batch.prompt_len
    queries = max(budget.queries or batch.prompt_len for budget in slots.budgets)
    return 2 * min(SCORED_BYTES, 4 * batch.size * spec.heads * keys * queries)


def _kernel_bytes(spec: ModelSpec, slots: Occupancy, threads: int) -> int:
    """The room of the kernel that attends prompts: a head's keys and values and a block of queries in each thread."""
    keys = -(-(slots.held(0) + slots.batch.prompt_len) // KERNEL_KEYS) * KERNEL_KEYS + KERNEL_WIDTH
    dim = -(-spec.head_dim // KERNEL_WIDTH) * KERNEL_WIDTH
    floats = keys * (2 * dim + 1) + KERNEL_QUERIES * (keys + 2 * dim)
    return 4 * floats * min(threads, slots.batch.size * spec.kv_heads)


def _choosing_bytes(spec: ModelSpec, policy: KVPolicy, slots: Occupancy, kernel_threads: int) -> int:
    """To rank the tokens of prompts, to sort them, and to move those that stay."""
    if policy.keeps_all:
        return 0
    keys = slots.held(0) + slots.batch.prompt_len
    moved = 0 if kernel_threads else 4 * spec.head_dim  # in torch by an index for each value
    return slots.batch.size * spec.kv_heads * keys * (SORTED_BYTES + moved)


def _extending_bytes(spec: ModelSpec, policy: KVPolicy, slots: Occupancy, kernel_threads: int) -> int:
    """For new tokens behind those that are held: all of them side by side, as held, as stored and as attended."""
    if slots.held(0) == 0:
        return 0
    tokens, group = slots.batch.prompt_len, spec.heads // spec.kv_heads
    keys = slots.held(0) + tokens
    copies = keys * spec.kv_decoded_bytes_per_slot * (4 if policy.rolls else 3)
    mask = 0 if kernel_threads else tokens * (keys + group * keys * (1 + 4))  # who sees whom, as it is and for every head
    return slots.batch.size * (copies + mask)


def _decoding_bytes_per_slot(spec: ModelSpec, policy: KVPolicy, processor: Processor) -> int:
    """Where KV is packed: what of it is decoded before it is attended, and its bytes side by side."""
    if spec.kv_codec == PLAIN:
        return 0
    reads_packed = choose(DECODE_ATTENTION, spec.kv_codec, spec.dtype, processor.runs, width=spec.head_dim)
    if reads_packed:  # but for keys that are to be rotated
        return (spec.kv_decoded_bytes_per_slot + spec.kv_bytes_per_slot) // 2 if policy.rolls else 0
    return spec.kv_decoded_bytes_per_slot + spec.kv_bytes_per_slot


def _evicting_bytes(spec: ModelSpec, policy: KVPolicy, slots: Occupancy) -> int:
    if policy.keeps_all:
        return 0
    rolled = spec.head_dim * (4 + 3 * spec.itemsize) if policy.rolls else 0  # angles, and keys on their way
    return slots.batch.size * spec.kv_heads * slots.capacity * (RANKED_BYTES + rolled)


# -- budgets -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Budgets:
    """Bytes that may be held per tier; None is no limit. `host_base` is what the process holds before anything is loaded."""

    device: int | None = None
    host: int | None = None
    disk: int | None = None
    host_base: int = 0

    def of(self, tier: str) -> int | None:
        return {DEVICE: self.device, HOST: self.host, DISK: self.disk}[tier]

    def needs(self, footprint: Footprint, tier: str) -> int:
        return footprint.total(tier) + (self.host_base if tier == HOST else 0)

    def first_exceeded(self, footprint: Footprint) -> str | None:
        for tier in TIERS:
            budget = self.of(tier)
            if budget is not None and self.needs(footprint, tier) > budget:
                return tier
        return None

    def with_half_free(self) -> Budgets:
        """So much less that a plan leaves half of what there is beside the process."""
        host = None if self.host is None else self.host_base + max(0, self.host - self.host_base) // 2
        return replace(self, device=None if self.device is None else self.device // 2, host=host)


@dataclass(frozen=True)
class WorkloadPlan:
    """A workload under a plan: its blocks, each planned, and what they hold. Report, prediction and run start from this one
    object; it is also all that decides whether a plan fits."""

    spec: ModelSpec
    plan: Plan
    workload: Workload
    accelerator: bool
    writes_weights: bool = False
    kernel_threads: int = 0  # of the kernels for the CPU
    scored_at_once: int = 0  # positions of prompts that logits are made for together

    @cached_property
    def blocks(self) -> BlockPlans:
        return BlockPlans.of(self.spec, self.plan, self.workload, self.accelerator)

    def blocks_of(self, rows: Sequence[int], size: BlockSize) -> BlockPlans:
        """Those of the rows that are left, where memory has run out in larger ones."""
        return BlockPlans.of(self.spec, self.plan, self.workload, self.accelerator, size, rows)

    def planned(self, block: Block) -> BlockPlan:
        """Another block under the same plan."""
        return BlockPlan.of(self.spec, self.plan, block, self.accelerator, self.blocks.first.placement.weights)

    @cached_property
    def footprint(self) -> Footprint:
        each = (
            footprint(block, self.writes_weights, self.kernel_threads, self.scored_at_once) for block, _ in self.blocks.alike
        )
        return reduce(Footprint.__or__, each)

    def fits(self, budgets: Budgets) -> bool:
        return budgets.first_exceeded(self.footprint) is None

    def refuse_what_does_not_fit(self, budgets: Budgets) -> None:
        tier = budgets.first_exceeded(self.footprint)
        if tier is None:
            return
        budget = budgets.of(tier)
        assert budget is not None
        held = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in self.footprint.parts[tier].items() if nbytes)
        if tier == HOST and budgets.host_base:
            held += f", process {format_bytes(budgets.host_base)}"
        raise DoesNotFit(
            f"plan needs {format_bytes(budgets.needs(self.footprint, tier))} on {tier} ({held}), "
            f"the budget is {format_bytes(budget)}; {what_would_fit(self, budgets)}"
        )


class DoesNotFit(ValueError):
    """A plan that needs more than may be held."""


def what_would_fit(asked: WorkloadPlan, budgets: Budgets) -> str:
    """The nearest plans that fit: a smaller batch, or less of the weights and KV in memory."""
    found = []
    for size in _halves(asked.plan.gpu_batch_size):
        plan = replace(asked.plan, gpu_batch_size=size)
        if replace(asked, plan=plan).fits(budgets):
            found.append(f"gpu_batch_size {size}")
            break
    tier = budgets.first_exceeded(asked.footprint)
    with_less = (plan for kept in (0.75, 0.5, 0.25, 0.1, 0.0) for plan in _with_less(asked.plan, tier, kept))
    for plan in with_less:
        if replace(asked, plan=plan).fits(budgets):
            found.append("percent " + " ".join(f"{value:g}" for value in plan.percent))
            break
    if not found:
        found = [_smaller_with_less(asked, budgets, tier)]
    return "would fit: " + " or ".join(found) if any(found) else f"no smaller batch or share fits: {MORE[tier or HOST]}"


MORE = {
    DEVICE: "give more memory of the device, or a smaller model",
    HOST: "give more memory",
    DISK: "free some space on the disk, or give an --offload-dir on a larger one",
}


def _smaller_with_less(asked: WorkloadPlan, budgets: Budgets, tier: str | None) -> str:
    """Both at once, where neither alone is enough; nothing if that is not enough either."""
    for size in _halves(asked.plan.gpu_batch_size) or [1]:
        for kept in (0.5, 0.0):
            for plan in _with_less(replace(asked.plan, gpu_batch_size=size), tier, kept):
                if replace(asked, plan=plan).fits(budgets):
                    return f"gpu_batch_size {size} with percent " + " ".join(f"{value:g}" for value in plan.percent)
    return ""


def _halves(size: int) -> list[int]:
    halves = []
    while size > 1:
        size //= 2
        halves.append(size)
    return halves


def _with_less(plan: Plan, tier: str | None, kept: float) -> Iterator[Plan]:
    """Plans that keep only a part of the weights and KV on a tier. What leaves a device goes to the host, or else to disk; what
    leaves the disk goes to the host."""

    def scaled(device_kept: float, host_kept: float, to_host: bool) -> Plan:
        def less(shares: Shares) -> Shares:
            device = round(shares.device * device_kept, 2)
            host = shares.host * host_kept + (shares.device - device if to_host else 0.0)
            return Shares(device, min(round(host, 2), 1.0 - device))

        return replace(plan, weights=less(plan.weights), kv=less(plan.kv))

    if tier == DEVICE:
        yield scaled(kept, 1.0, to_host=True)
        yield scaled(kept, 1.0, to_host=False)
        yield scaled(kept, kept, to_host=False)
    elif tier == HOST:
        yield scaled(1.0, kept, to_host=False)
    else:
        yield replace(
            plan, weights=_off_disk(plan.weights, kept), kv=_off_disk(plan.kv, kept), hidden=_off_disk(plan.hidden, kept)
        )


def _off_disk(shares: Shares, kept: float) -> Shares:
    """Only a part of what was meant for the disk stays there; the rest goes to host memory."""
    return Shares(shares.device, min(1.0 - shares.device, round(shares.host + (1.0 - kept) * shares.disk, 2)))
