"""Working space: an estimate of the most that the functions of one visit allocate in passing, compared with runs by a test.

What allocators are asked for is known to the byte (core/layout, kernels/sizes). This is the rest: what torch allocates for the
results of its functions, from their shapes. The constants of the estimate are here.
"""

from __future__ import annotations

from collections.abc import Iterator

from h2o_flexgen.core.layout import hidden_bytes
from h2o_flexgen.core.model_spec import ModelSpec, TensorSpec
from h2o_flexgen.core.site import Site
from h2o_flexgen.core.workload import ECHO_TOKENS, Batch
from h2o_flexgen.kernels.sizes import FLOAT_BYTES, SCORED_BYTES, PromptRoom, prompt_threads, twin_values
from h2o_flexgen.kernels.table import CPU, DECODE_ATTENTION, INT8_PRODUCT, PROMPT_ATTENTION, SHARED_ATTENTION, TORCH
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.policies.occupancy import Budget, Occupancy
from h2o_flexgen.policies.policy import ATTENTION, PROBE, KVPolicy
from h2o_flexgen.quant.codec import PLAIN

SLACK = 1.15  # factor on the whole: allocators keep some of what is freed
DECODING_BYTES, ENCODING_BYTES = 16, 24  # per value that is worked on at once: its code, it as fp32, and copies of them
ROUNDED_BYTES = 12  # per value in and out of a product of 8 bits by torch: three of fp32 at a time
SORTED_BYTES, RANKED_BYTES = 48, 40  # per place of a prompt, and per slot: ranks, indices of 8 bytes and masks
WEIGHED_BYTES = 16  # alike, where it counts what a token is worth: that, as it comes and beside what is held, and products
GRAPH_BYTES = 64 << 10  # of the driver, for the graph of a layer and batch: an estimate that no GPU has confirmed
# Kept on a device, and in parts of segments. On Hopper torch has cuBLAS and cuBLASLt keep 32 MiB each for the stream that
# computes; the context itself is outside of every budget.
DEVICE_LIBRARIES = 128 << 20


def block_working_bytes(planned: BlockPlan, site: Site, scored_at_once: int) -> int:
    spec = planned.spec
    kinds = {
        (occupancy.batch.lengths, occupancy.batch.seen, occupancy.capacity, occupancy.batch.longest_prefix): occupancy
        for occupancy in planned.occupancy
    }  # most batches are alike
    most = max(working_bytes(spec, planned.plan, occupancy, site, scored_at_once) for occupancy in kinds.values())
    if site.accelerator and planned.plan.may_capture:
        most += max(_decode_bytes(spec, planned.plan, occupancy, site) for occupancy in kinds.values())
        most += GRAPH_BYTES * len(spec.layers) * len(planned.occupancy)
    decoding = DECODING_BYTES * _values_at_once(site)
    return int(SLACK * most) + min(decoding, 6 * max(tensor.decoded_nbytes for tensor in spec.tensors.values()))


def loading_bytes(tensor: TensorSpec) -> int:
    """Bytes of a tensor on its way to a device, and of what is held while it is encoded."""
    return tensor.nbytes + min(tensor.decoded_nbytes, ENCODING_BYTES * twin_values(CPU))


def _values_at_once(site: Site) -> int:
    """Values that are encoded or decoded at once. Kernels need no more room anywhere than twins do on a CPU."""
    return twin_values(site.processor.device if site.processor.build == TORCH else CPU)


def working_bytes(spec: ModelSpec, plan: Plan, occupancy: Occupancy, site: Site, scored_at_once: int = 0) -> int:
    """Bytes for one batch."""
    policy, batch = plan.policy, occupancy.batch
    prefill = max(_prefill_bytes(spec, policy, part, site) for part in _parts(plan, occupancy))
    decode = _decode_bytes(spec, plan, occupancy, site)
    scored = min(scored_at_once, batch.size * batch.prompt_len)
    head = max(batch.size, scored) * spec.vocab * (3 * 4 + spec.itemsize) + scored * _normed_bytes(spec)
    return max(prefill, decode, head) + hidden_bytes(spec, batch)


def _decode_bytes(spec: ModelSpec, plan: Plan, occupancy: Occupancy, site: Site) -> int:
    """Bytes for a decode step. Graphs have as much of their own, which no other work gets."""
    policy, batch = plan.policy, occupancy.batch
    decode = batch.size * spec.heads * occupancy.capacity * (8 + 2 * spec.itemsize) + _evicting_bytes(spec, policy, occupancy)
    decode += batch.size * (occupancy.capacity * _decoding_bytes_per_slot(spec, policy, site) + _rounding_bytes(spec, site))
    return decode + (0 if plan.copies_prefixes else _sharing_bytes(spec, batch, batch.size, site))


def _prefill_bytes(spec: ModelSpec, policy: KVPolicy, occupancy: Occupancy, site: Site) -> int:
    """Bytes for prompts that are computed at once."""
    batch, heads = occupancy.batch, spec.heads * spec.head_dim
    tokens = batch.size * batch.prompt_len * batch.readings
    normed = _normed_bytes(spec)
    threads = site.threads_of(PROMPT_ATTENTION, spec.dtype)
    widened = spec.itemsize if threads else max(spec.itemsize, 4)  # torch's column sums are in fp32
    attention = tokens * (normed + (4 * heads + 4 * spec.kv_heads * spec.head_dim) * widened)
    attention += _kernel_bytes(spec, occupancy, threads) if threads else _scored_bytes(spec, policy, occupancy)
    attention += _choosing_bytes(spec, policy, occupancy, threads) + _extending_bytes(spec, policy, occupancy, threads)
    attention += tokens * spec.width * FLOAT_BYTES if policy.judge == PROBE else 0  # in fp32
    attention += _sharing_bytes(spec, batch, tokens, site) + _echo_bytes(spec, occupancy, threads)
    if spec.kv_codec != PLAIN:
        encoding = ENCODING_BYTES * _values_at_once(site)
        attention += tokens * spec.kv_bytes_per_slot + min(encoding, 4 * tokens * spec.kv_decoded_bytes_per_slot)
    passing = max(layer.passing_width for layer in spec.layers) * spec.itemsize
    return max(attention, tokens * (normed + passing)) + tokens * _rounding_bytes(spec, site)


def _normed_bytes(spec: ModelSpec) -> int:
    """Bytes for one token: norms work in fp32."""
    return 3 * spec.width * 4 + 2 * spec.widest * spec.itemsize


def _rounding_bytes(spec: ModelSpec, site: Site) -> int:
    """Bytes for one token: torch makes products of 8 bits from values of fp32. A kernel needs little more than 8 bits."""
    if spec.product != INT8_PRODUCT:
        return 0
    packed = [matrix for layer in spec.layers for matrix in layer.matrices if matrix.codec != PLAIN]
    if all(site.has_kernel(INT8_PRODUCT, spec.dtype, form) for form in {matrix.codec for matrix in packed}):
        return 0
    return ROUNDED_BYTES * max(sum(matrix.shape[-2:]) for matrix in packed)


def _scored_bytes(spec: ModelSpec, policy: KVPolicy, occupancy: Occupancy) -> int:
    """Bytes for torch to add up what keys receive."""
    if policy.ranks_by != ATTENTION:
        return 0
    batch, keys = occupancy.batch, _attended(occupancy)
    queries = _part_of_echo(batch) or max(budget.queries or batch.prompt_len for budget in occupancy.budgets)
    return 2 * min(SCORED_BYTES, 4 * batch.size * spec.heads * keys * queries)


def _part_of_echo(batch: Batch) -> int:
    """Tokens of an echo that are computed as one part, at most."""
    return min(ECHO_TOKENS, batch.prompt_len) if batch.echoes else 0


def _attended(occupancy: Occupancy) -> int:
    """Keys of a row that are attended at once."""
    return occupancy.held(0) + occupancy.batch.prompt_len + _part_of_echo(occupancy.batch)


def _kernel_bytes(spec: ModelSpec, occupancy: Occupancy, threads: int) -> int:
    """Bytes of the room of the kernel that attends prompts."""
    room = PromptRoom.of(_attended(occupancy), spec.head_dim)
    return FLOAT_BYTES * room.end * prompt_threads(occupancy.batch.size, spec.kv_heads, threads)


def _parts(plan: Plan, occupancy: Occupancy) -> Iterator[Occupancy]:
    """The prompts of a batch that are computed at once; and the longest prefix that rows share, which is computed by itself and
    is kept as a whole. Where rows take copies of it, it stands before their prompts."""
    batch, longest = occupancy.batch, occupancy.batch.longest_prefix
    if longest:
        yield Occupancy(Batch((0,), (longest,)), (Budget(longest),), 1)
    for part in batch.kinds_of_parts(plan.prefill_tokens):
        if longest and plan.copies_prefixes:
            behind = Batch(part.rows, part.lengths, (longest,) * part.size)
            yield Occupancy(behind, (Budget(longest + part.prompt_len),) * part.size, 1)
        else:
            yield plan.policy.occupancy(part, occupancy.gen_len)


def _sharing_bytes(spec: ModelSpec, batch: Batch, tokens: int, site: Site) -> int:
    """Bytes for attending prefixes that rows share: queries and outcomes of several groups, in whatever order they come, and
    the room of the kernel, or what torch widens and scores."""
    longest = batch.longest_prefix
    if not longest:
        return 0
    each = tokens * spec.heads * (spec.head_dim * (2 * FLOAT_BYTES + 2 * spec.itemsize) + 2 * FLOAT_BYTES)
    if threads := site.threads_of(SHARED_ATTENTION, spec.dtype):
        return each + FLOAT_BYTES * PromptRoom.of_shared(spec.head_dim).end * threads
    scored = FLOAT_BYTES * tokens * spec.heads * (max(longest, batch.prompt_len) + 1)
    return each + 4 * min(SCORED_BYTES, scored) + 2 * FLOAT_BYTES * longest * spec.kv_heads * spec.head_dim


def _choosing_bytes(spec: ModelSpec, policy: KVPolicy, occupancy: Occupancy, threads: int) -> int:
    """Bytes for ranking the tokens of prompts, sorting them, and moving those that stay."""
    if policy.keeps_all:
        return 0
    keys = occupancy.held(0) + occupancy.batch.prompt_len
    weighed = 0 if policy.judge is None else WEIGHED_BYTES + (SORTED_BYTES if policy.has_scores else 0)
    moved = 0 if threads else 4 * spec.head_dim  # torch moves with an index for each value
    return occupancy.batch.size * spec.kv_heads * keys * (SORTED_BYTES + weighed + moved)


def _extending_bytes(spec: ModelSpec, policy: KVPolicy, occupancy: Occupancy, threads: int) -> int:
    """Bytes for new tokens behind held ones: all of them side by side, as held, as stored and as attended."""
    if occupancy.held(0) == 0:
        return 0
    tokens = occupancy.batch.prompt_len
    keys = occupancy.held(0) + tokens * occupancy.batch.readings
    copies = keys * spec.kv_decoded_bytes_per_slot * (4 if policy.rolls else 3)
    return occupancy.batch.size * (copies + _mask_bytes(spec, tokens, keys, threads))


def _mask_bytes(spec: ModelSpec, tokens: int, keys: int, threads: int) -> int:
    """Bytes for torch to say who sees whom, as it is and for every head."""
    return 0 if threads else tokens * keys * (1 + (spec.heads // spec.kv_heads) * (1 + 4))


def _echo_bytes(spec: ModelSpec, occupancy: Occupancy, threads: int) -> int:
    """Bytes for a part of an echo: what it attends, side by side, what it gets, and what it gives."""
    batch, keys = occupancy.batch, _attended(occupancy)
    part = _part_of_echo(batch)
    if not part:
        return 0
    copies = 2 * keys * spec.kv_decoded_bytes_per_slot + part * spec.heads * spec.head_dim * spec.itemsize
    given = 4 * keys * spec.kv_heads * FLOAT_BYTES
    return batch.size * (copies + given + _mask_bytes(spec, part, keys, threads))


def _decoding_bytes_per_slot(spec: ModelSpec, policy: KVPolicy, site: Site) -> int:
    """Bytes per slot of packed KV that is decoded before it is attended, and of its bytes side by side."""
    if spec.kv_codec == PLAIN:
        return 0
    if site.reads(DECODE_ATTENTION, spec.kv_codec, spec.dtype, width=spec.head_dim):  # except keys that are to be rotated
        return (spec.kv_decoded_bytes_per_slot + spec.kv_bytes_per_slot) // 2 if policy.rolls else 0
    return spec.kv_decoded_bytes_per_slot + spec.kv_bytes_per_slot


def _evicting_bytes(spec: ModelSpec, policy: KVPolicy, occupancy: Occupancy) -> int:
    if policy.keeps_all:
        return 0
    weighed = 0 if policy.judge is None else WEIGHED_BYTES
    rolled = spec.head_dim * (4 + 3 * spec.itemsize) if policy.rolls else 0  # angles, and keys on their way
    return occupancy.batch.size * spec.kv_heads * occupancy.capacity * (RANKED_BYTES + weighed + rolled)
