"""Working space: an estimate of the most that the functions of one visit allocate temporarily, compared with runs by a test.

What allocators are asked for is known to the byte (core/buffer_layout, formats/kernel_sizes). This is the rest: what torch
allocates for the results of its functions, from their shapes. The constants of the estimate are here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil
from typing import NamedTuple

from h2o_flexgen.core.buffer_layout import PICKED_VALUES, next_hidden_bytes, next_step_bytes, prompt_form
from h2o_flexgen.core.model_spec import IN_HEADS_BYTES, TRIED_AT_ONCE, ModelSpec, TensorSpec
from h2o_flexgen.core.site import Site
from h2o_flexgen.core.workload import ECHO_TOKENS, Batch
from h2o_flexgen.formats.kernel_sizes import (
    DOT_OUTPUTS,
    DOT_PROGRAMS,
    FLOAT_BYTES,
    ROOM_CHUNK,
    SCORED_BYTES,
    STATE_CHUNK,
    STEP_CHUNK,
    WIDTH_OF_TORCH,
    ManyQueries,
    PromptRoom,
    choosing_room,
    mask_bytes,
    prompt_parts,
    prompt_threads,
    ranked_rows,
    twin_values,
)
from h2o_flexgen.formats.kernel_table import (
    BASELINE,
    CHOOSE_SLOTS,
    CPU,
    DECODE_ATTENTION,
    GATED_DELTA,
    INT8_PRODUCT,
    PROMPT_ATTENTION,
    ROWS_OF_TILE_DOTS,
    SELECTIVE_SCAN,
    SHARED_ATTENTION,
    TILE_DOTS,
    TORCH,
    Processor,
    choose,
    kernels_of,
)
from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.planning.placement import HeldKV
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.policies.occupancy import Occupancy, RowBudget
from h2o_flexgen.policies.policy import ATTENTION, PROBE, KVPolicy
from h2o_flexgen.policies.recall import ALL, INDEX, attended, index_bytes
from h2o_flexgen.schedule.ops import OF_ROWS, READ, WORKERS, Data

SLACK = 1.15  # factor on the whole: allocators keep some of what is freed
DECODING_BYTES, ENCODING_BYTES = 16, 24  # per value that is worked on at once: its code, it as fp32, and copies of them
ROUNDED_BYTES = 12  # per value in and out of a product of 8 bits by torch: three of fp32 at a time
SORTED_BYTES, RANKED_BYTES = 48, 40  # per place of a prompt, and per slot: ranks, indices of 8 bytes and masks
WEIGHED_BYTES = 16  # alike, where it counts what a token is worth: that, as it comes and beside what is held, and products
COMPARED_BYTES = 24  # per value of a row's keys while tokens are compared: keys and values as they are, and results in fp32
PICKING_BYTES = 48  # per logit that tokens are picked from at once: distances, weights and sums of them, in order, in float64
NUMBER_BYTES = 8  # of a slot
COPIES_BROUGHT = 3  # of chosen slots of a row, where torch brings them to a device
MARK_BYTES = 8  # of a slot, while one worker reads what is wanted from disk: marks, and the entry that it has in memory
FAR_BYTES = 10  # per query and key: how far apart they are in 8 bytes, and masks
LOGITS_AT_ONCE = 2**22  # 16 MiB in fp32, whatever the texts and the vocabulary
GUESSED_AT_ONCE = 4, 8, 16  # tokens of a row; passes of one row with so many are recorded
AHEAD_TOGETHER = 8  # tokens of a row behind its newest that are attended in one call, where tokens are guessed
BROUGHT = 3  # times the values of a key, of two values of a head, and of what a token has to do with others of its chunk
GRAPH_BYTES = 96 << 10  # of the driver, for the graph of a layer and batch, where no check has measured them (an H200: 82 KiB)
RECORDED_BYTES = 16 << 10  # of the calls of a layer and batch on a CPU, and of what they are given
EXPERT_TENSOR_BYTES = 1 << 10  # the same where torch multiplies: a tensor for each
EXPERT_CALL_BYTES = 256  # alike, of a matrix of an expert in a turn: at most 236 were measured
# Kept on a device, and in parts of segments. On Hopper torch has cuBLAS and cuBLASLt keep 32 MiB each for the stream that
# computes; the context itself is outside of every budget.
DEVICE_LIBRARIES = 128 << 20


class LevelHeads(NamedTuple):
    """KV heads of one level, which attend at once."""

    spec: ModelSpec  # of a model with these alone
    policy: KVPolicy
    occupancy: Occupancy
    brings_chosen: bool  # what a step attends, from where it is not computed

    @classmethod
    def of(cls, kv: HeldKV, batch: int) -> list[LevelHeads]:
        """The levels of a batch, each as in the layer where it has most heads."""
        levels = enumerate(kv.levels)
        counted = [(level.policy, kv.occupancies[at][batch], kv.most_heads(at)) for at, level in levels]
        pairs, brings = zip(kv.specs, counted), kv.index_is_copy
        return [cls(spec.with_kv_heads(count), policy, own, brings) for spec, (policy, own, count) in pairs if count]


def positions_at_once(plan: Plan, vocab: int) -> int:
    """How many positions have their logits made together: of prompts, or of guesses. The plan counts those of a step of a batch
    in any case."""
    return max(plan.gpu_batch_size, LOGITS_AT_ONCE // vocab)


def attended_together(rows: int, guesses: bool) -> int:
    """The most tokens that a decode step attends in one call. Those that a row has behind its newest come in pieces."""
    return max(rows, AHEAD_TOGETHER) if guesses else rows


def guesses_bytes(planned: BlockPlan, batch: int) -> int:
    """Bytes of what the guesses of a batch change in the slots of heads that evict, until they are known to be right: the slots
    that they take over, and all that is noted beside keys and values. Room for the slots of a layer, of a value each, is there
    while it is found which of them go."""
    size, plan = planned.block.batches[batch].size, planned.plan
    tokens = min(size * GUESSED_AT_ONCE[-1], positions_at_once(plan, planned.spec.vocab) - size)
    kept = passing = 0
    for number, (level, spec) in enumerate(zip(planned.levels, planned.kv.specs)):
        if not level.policy.keeps_all:
            slots = planned.kv.occupancies[number][batch].capacity
            of_head = slots * level.policy.score_bytes + spec.kv_bytes_per_head + NUMBER_BYTES
            kept += tokens * of_head * sum(map(len, level.heads))
            passing = max(passing, size * slots * planned.kv.most_heads(number) * spec.kv_sets * spec.itemsize)
    return max(0, kept) + passing


def block_working_bytes(planned: BlockPlan, site: Site, scored_at_once: int, guesses: bool = False) -> int:
    spec, plan, batches = planned.spec, planned.plan, planned.block.batches
    slots = ([level.capacity for level in levels] for levels in zip(*planned.kv.occupancies))
    moves = [planned.schedule.traffic.moves_hidden(at) for at in range(len(batches))]
    kinds = {
        (batch.lengths, batch.seen, tuple(own), batch.longest_prefix, moves[at]): at
        for at, (batch, own) in enumerate(zip(batches, slots))
    }  # most batches are alike
    most = max(working_bytes(planned.kv, at, plan, site, scored_at_once, moves[at], guesses) for at in kinds.values())
    has_graphs = plan.may_capture(site.graph_bytes) if site.accelerator else plan.may_record and site.processor.build != TORCH
    if has_graphs:
        of_graphs = max(graph_bytes(planned.kv, at, plan, site, guesses) for at in kinds.values())
        of_graphs += graph_count(planned, guesses) * (site.graph_bytes or GRAPH_BYTES if site.accelerator else RECORDED_BYTES)
        of_graphs += 0 if site.accelerator else calls_of_experts(planned, site, guesses)
        is_beside_prompts = site.accelerator or guesses or not planned.reads_prompts_first
        steps = most if is_beside_prompts else max(step_bytes(planned.kv, at, plan, site, moves[at]) for at in kinds.values())
        most = max(most, steps + of_graphs)
    decoding = DECODING_BYTES * _values_at_once(site)
    return int(SLACK * most) + min(decoding, 6 * max(tensor.decoded_nbytes for tensor in spec.unlike_tensors))


def graph_count(planned: BlockPlan, guesses: bool = False) -> int:
    """Graphs of a block: for each layer and batch as many as there are buffers through which weights, KV or states come. They
    change their buffers in step. A row by itself has others for its guesses."""
    return planned.schedule.traffic.layers * _graphs_of_a_layer(planned, guesses)


def _graphs_of_a_layer(planned: BlockPlan, guesses: bool) -> int:
    schedule, traffic = planned.schedule, planned.schedule.traffic
    weights = (Data.WEIGHTS,) if traffic.moves_any_weights else ()
    layers = {data: {layer for layer, _ in traffic.moved_places(data)} for data in OF_ROWS}
    kinds = {tuple(data for data in OF_ROWS if layer in layers[data]) for layer in set().union(*layers.values())}
    met = max(schedule.ways(*weights, *of_rows) for of_rows in kinds or {()})
    ways = 1 + len(GUESSED_AT_ONCE) if guesses and not traffic.accelerator else 1
    return traffic.batches * met * ways


def calls_of_experts(planned: BlockPlan, site: Site, guesses: bool = False) -> int:
    """Bytes of recorded calls beside the usual ones: in each turn, each kernel is told of every matrix of every expert."""
    spec = planned.spec
    if not spec.turns:
        return 0
    tokens = max(batch.size for batch in planned.block.batches)
    tokens = max(tokens, 1 + GUESSED_AT_ONCE[-1]) if guesses else tokens
    turns = sum(turns.recorded(tokens) * matrices * count for (turns, matrices), count in spec.turns.items())
    formats = {*spec.formats} - {PLAIN} or {PLAIN}
    kernels = max(_kernels_up_to(tokens, spec, format, site) for format in formats)
    of_call = EXPERT_TENSOR_BYTES if PLAIN in formats else EXPERT_CALL_BYTES
    return of_call * turns * kernels * _graphs_of_a_layer(planned, guesses)


def _kernels_up_to(rows: int, spec: ModelSpec, format: str, site: Site) -> int:
    """Kernels that multiply up to so many rows with matrices of a format."""
    bounds = {min(kernel.most_rows, rows) for kernel in kernels_of(spec.product, format)} | {rows}
    return len({choose(spec.product, format, spec.dtype, site.processor.runs, bound) for bound in bounds})


def loading_bytes(tensor: TensorSpec) -> int:
    """Bytes of a tensor on its way to a device, and of what is held while it is encoded."""
    return tensor.nbytes + min(tensor.decoded_nbytes, ENCODING_BYTES * twin_values(CPU))


def _values_at_once(site: Site) -> int:
    """Values that are encoded or decoded at once. Kernels need no more room anywhere than twins do on a CPU."""
    return twin_values(site.processor.device if site.processor.build == TORCH else CPU)


def working_bytes(
    kv: HeldKV,
    number: int,
    plan: Plan,
    site: Site,
    scored_at_once: int = 0,
    moves_hidden: bool = True,
    guesses: bool = False,
) -> int:
    """Bytes for one batch, most where its hidden states move."""
    spec, batch, levels = kv.spec, kv.block.batches[number], LevelHeads.of(kv, number)
    prompts = prompt_form(spec, batch)
    prefill = max(_prefill_bytes(prompts, part, site, plan.prefill_tokens) for part in _parts(plan, batch, levels))
    decode = _decode_bytes(spec, plan, levels, site, guesses)
    at_head = max(scored_at_once, positions_at_once(plan, spec.vocab) if guesses else 0)
    scored = min(at_head, batch.size * batch.prompt_len)
    scoring = scored * (spec.vocab * (3 * FLOAT_BYTES + spec.itemsize) + _normed_bytes(spec))
    beside = next_hidden_bytes(spec, batch, plan.prefill_tokens, moves_hidden, site.accelerator)
    return max(prefill, decode, scoring, picking_bytes(spec, batch.size)) + beside


def step_bytes(kv: HeldKV, number: int, plan: Plan, site: Site, moves_hidden: bool) -> int:
    """Bytes for the decode steps of a batch alone, with a token of each row."""
    spec, rows = kv.spec, kv.block.batches[number].size
    decode = _decode_bytes(spec, plan, LevelHeads.of(kv, number), site)
    return max(decode, picking_bytes(spec, rows)) + next_step_bytes(spec, rows, moves_hidden, site.accelerator)


def picking_bytes(spec: ModelSpec, rows: int) -> int:
    """Bytes for logits, for their parts until they are joined or scores in fp32, and for picking tokens from some of them."""
    logits = rows * spec.vocab
    made = spec.itemsize + max(spec.itemsize, FLOAT_BYTES)
    return logits * made + min(logits, max(spec.vocab, PICKED_VALUES)) * PICKING_BYTES


def _decode_bytes(spec: ModelSpec, plan: Plan, levels: Sequence[LevelHeads], site: Site, guesses: bool = False) -> int:
    """Bytes for a decode step, of the level that needs most. Graphs have as much of their own, which no other work gets."""
    rows = levels[0].occupancy.batch.size
    together = attended_together(rows, guesses)
    attention = (_decode_attention_bytes(at, plan, site, together) for at in levels)
    states = _trial_bytes(spec, site, rows) if guesses else _states_bytes(spec, site, rows, 1)
    mixing = max(states, *attention)
    return mixing + rows * (_rounding_bytes(spec, site) + _picking_bytes(spec, levels)) + _dots_bytes(spec, site, rows)


def graph_bytes(kv: HeldKV, number: int, plan: Plan, site: Site, guesses: bool = False) -> int:
    """Bytes for the values that all graphs work on: those of a decode step in the layer that needs most."""
    spec, levels = kv.spec, LevelHeads.of(kv, number)
    decode = _decode_bytes(spec, plan, levels, site, guesses and not site.accelerator)
    rows = max(kv.block.batches[number].size, 1 + GUESSED_AT_ONCE[-1] if guesses and not site.accelerator else 1)
    passing = max(width * max(rows, least) for width, least in spec.passing_widths) * spec.itemsize
    if site.accelerator:
        return decode + passing
    if any(turns.most(rows) > turns.recorded(rows) for turns, _ in spec.turns):
        passing *= 2  # what is left behind the recorded turns is computed beside their room
    heads = 4 * _values_of_heads(spec) * FLOAT_BYTES
    return ROOM_CHUNK + decode + rows * (_normed_bytes(spec) + heads) + passing


def _decode_attention_bytes(at: LevelHeads, plan: Plan, site: Site, tokens: int) -> int:
    """Bytes for so many tokens that are attended in one call."""
    spec, policy, occupancy, _ = at
    slots = attended(policy.recall, occupancy.capacity)
    scored = tokens * spec.heads * slots * (8 + 2 * spec.itemsize) + _evicting_bytes(at) + _recalling_bytes(at, plan, site)
    decoded = tokens * slots * _decoding_bytes_per_slot(spec, policy, site)
    decoded += _many_queries_bytes(at, site, slots, tokens)
    return scored + decoded + (0 if plan.copies_prefixes else _sharing_bytes(spec, occupancy.batch, tokens, site))


def _recalling_bytes(at: LevelHeads, plan: Plan, site: Site) -> int:
    """Bytes for choosing the slots that are attended: the numbers of these, and all of them side by side; what torch ranks them
    by, for one row at a time, in fp32; and the newest keys on their way to the index. Without kernels the slots of one row are
    copied on their way to a device."""
    (spec, policy, occupancy, _), rows = at, at.occupancy.batch.size
    if policy.recall == ALL:
        return 0
    capacity, chosen = occupancy.capacity, attended(policy.recall, occupancy.capacity)
    newest = rows * spec.kv_heads * (3 * spec.head_dim * spec.itemsize + 2 * index_bytes(policy.recall, spec))
    newest += rows * spec.kv_heads * FLOAT_BYTES * (capacity + 2 * chosen) * policy.has_scores  # what slots got
    taken = rows * (chosen * spec.kv_bytes_per_slot + _chosen_bytes(at, plan, site))
    if threads := site.threads_of(CHOOSE_SLOTS, spec.dtype, INDEX):
        units, group = rows * spec.kv_heads, spec.heads // spec.kv_heads
        return newest + taken + FLOAT_BYTES * choosing_room(units, group, capacity, threads, policy.chooses_together)
    if site.has_kernel(CHOOSE_SLOTS, spec.dtype, INDEX, spec.head_dim):
        return newest + taken + _choosing_on_gpu_bytes(spec, rows, capacity)
    values = capacity * spec.kv_heads * spec.head_dim
    ranked = capacity * (spec.kv_heads * RANKED_BYTES + 4 * spec.heads * FLOAT_BYTES)
    ranked += COPIES_BROUGHT * chosen * spec.kv_bytes_per_slot * (site.accelerator and at.brings_chosen)
    return newest + taken + ranked + 2 * values * FLOAT_BYTES + DECODING_BYTES * min(values, _values_at_once(site))


def _chosen_bytes(at: LevelHeads, plan: Plan, site: Site) -> int:
    """Bytes for the numbers of the slots that a row has chosen. A visit that brings these slots from elsewhere keeps numbers
    until then, with the products that its layer begins with: of one such visit more than the schedule has buffers. A row has
    the number of its place there. What stays in memory of earlier reads has entries; beside a device nothing stays."""
    spec, policy, occupancy, brings_chosen = at
    numbers = attended(policy.recall, occupancy.capacity) * spec.kv_heads * NUMBER_BYTES
    if not brings_chosen:
        return numbers
    has_entries = policy.reuses_read and not site.accelerator
    kept = numbers * (1 + has_entries) + _begun_values(spec) * spec.itemsize  # of slots, and of their entries in memory
    return (plan.buffers + 1) * kept + MARK_BYTES * WORKERS[READ] * occupancy.capacity + NUMBER_BYTES


def _choosing_on_gpu_bytes(spec: ModelSpec, rows: int, slots: int) -> int:
    """Bytes for a GPU to choose among so many slots of a row: all scores and what chunks leave beside them; what all slots got;
    and what torch ranks those of some rows by."""
    left = spec.heads * (slots + ceil(slots / STEP_CHUNK) * (spec.head_dim + 2))
    at_once = min(rows, ranked_rows(spec.kv_heads, slots))
    return rows * FLOAT_BYTES * (left + spec.kv_heads * slots) + at_once * slots * spec.kv_heads * RANKED_BYTES


def choosing_beside_bytes(planned: BlockPlan, site: Site) -> int:
    """Bytes of the host for choosing slots, where it attends beside a device: with kernels in C or without; and for reading of
    a disk what a device has chosen."""
    traffic = planned.schedule.traffic
    read = (layout for place in traffic.kv if traffic.in_pages(*place) for layout in planned.kv.layouts(*place))
    marked = max((layout.rows * layout.slots for layout in read if layout is not None and layout.by_row), default=0)
    beside = {batch for layer, batch in traffic.kv if traffic.is_beside(layer, batch)}
    hosts = [replace(site, processor=Processor(CPU, build)) for build in (BASELINE, TORCH)]
    levels = (at for batch in beside for at in LevelHeads.of(planned.kv, batch))
    chosen = max((_recalling_bytes(at, planned.plan, host) for at in levels for host in hosts), default=0)
    return int(SLACK * (chosen + MARK_BYTES * WORKERS[READ] * marked))


def _begun_values(spec: ModelSpec) -> int:
    """Values of a token that products of a layer have made when it would attend, in the layer that has most."""
    attending = [layer for layer in spec.unlike_layers if layer.has_kv]
    cut = [layer.without(*layer.halves.used_behind) for layer in attending if layer.halves is not None]
    return max((sum(matrix.shape[-2] for matrix, _ in layer.multiplied) for layer in cut), default=0)


def _indexing_bytes(at: LevelHeads, tokens: int, site: Site) -> int:
    """Bytes for the index of so many new keys: these side by side, decoded, and in the index's format."""
    spec, share = at.spec, at.policy.recall
    if not index_bytes(share, spec):
        return 0
    values = tokens * spec.kv_heads * spec.head_dim
    of_codes = tokens * spec.kv_heads * index_bytes(share, spec)
    return 2 * values * spec.itemsize + of_codes + ENCODING_BYTES * min(values, _values_at_once(site))


def _many_queries_bytes(at: LevelHeads, site: Site, slots: int, tokens: int) -> int:
    """Bytes of the kernel in C for KV heads that many query heads attend, over so many slots: its room, and the shares of whole
    tiles."""
    spec, threads = at.spec, site.threads_of(DECODE_ATTENTION, at.spec.dtype)
    laid = ManyQueries.of(spec.heads // spec.kv_heads, slots, spec.head_dim)
    if laid is None or not threads:
        return 0
    shares = max(laid.kept(tokens * spec.kv_heads), laid.passing(threads))
    return FLOAT_BYTES * (laid.room.end * threads + shares)


def _prefill_bytes(spec: ModelSpec, levels: Sequence[LevelHeads], site: Site, at_once: int) -> int:
    """Bytes for prompts that are read together, with so many of their tokens computed at once: what the layer has of all heads,
    the space of the level that needs most, and what all have of a prompt in pieces."""
    batch = levels[0].occupancy.batch
    total = batch.size * batch.prompt_len * batch.readings
    tokens, normed = min(total, at_once), _normed_bytes(spec)
    widened = spec.itemsize if site.threads_of(PROMPT_ATTENTION, spec.dtype) else max(spec.itemsize, 4)  # torch sums in fp32
    attention = tokens * (normed + 4 * _values_of_heads(spec) * widened + _picking_bytes(spec, levels))
    attention += max(_prompt_attention_bytes(at, site, at_once) for at in levels)
    if any(layer.has_kv and layer.states for layer in spec.unlike_layers):
        attention += tokens * spec.width * spec.itemsize  # what a scan beside attention has made
    attention += total * spec.width * FLOAT_BYTES if any(at.policy.judge == PROBE for at in levels) else 0  # in fp32
    passing = max(width for width, _ in spec.passing_widths) * spec.itemsize
    passing_states = _states_bytes(spec, site, batch.size, min(batch.prompt_len * batch.readings, at_once))
    passing_states += _echoed_states_bytes(spec, batch.size) + tokens * passing if batch.echoes and spec.state_layers else 0
    most = max(attention, tokens * (normed + passing) + passing_states) + tokens * _rounding_bytes(spec, site)
    most += _dots_bytes(spec, site, tokens)
    return most + (_pieces_bytes(spec, levels, total) if total > tokens else 0)


def _pieces_bytes(spec: ModelSpec, levels: Sequence[LevelHeads], tokens: int) -> int:
    """Bytes that stay while a prompt is computed piece by piece: its keys and values, what each token got, and the turns of all
    positions, which are made in fp32. Each level has one rotation, since its layers are of one kind, and a step of its own
    that keeps the turns: so there is one turn for each level."""
    total = tokens * max(own.head_dim for own in spec.of_heads) * (spec.itemsize * len(levels) + 2 * FLOAT_BYTES)
    for spec_of_level, policy, occupancy, _ in levels:
        of_keys = spec_of_level.kv_decoded_bytes_per_slot // spec.kv_sets
        of_token = spec_of_level.kv_decoded_bytes_per_slot + (of_keys if policy.rolls else 0)
        total += _attended(occupancy) * (of_token + 2 * spec_of_level.kv_heads * FLOAT_BYTES)
    return total + (tokens * spec.width * spec.itemsize if any(at.policy.judge == PROBE for at in levels) else 0)


def _prompt_attention_bytes(at: LevelHeads, site: Site, at_once: int) -> int:
    (spec, _, occupancy, _), batch = at, at.occupancy.batch
    total = batch.size * batch.prompt_len * batch.readings
    tokens, threads = min(total, at_once), site.threads_of(PROMPT_ATTENTION, spec.dtype)
    room = _kernel_bytes(spec, occupancy, threads) if threads else _scored_bytes(at, tokens, site)
    room += _choosing_bytes(at, threads) + _extending_bytes(at, threads) + _indexing_bytes(at, total, site)
    room += _mask_bytes(spec, 1, tokens, _attended(occupancy), threads) if total > tokens else 0
    room += _sharing_bytes(spec, batch, tokens, site) + _echo_bytes(spec, occupancy, threads, tokens)
    room += _in_heads_bytes(spec, occupancy, at_once, threads)
    room += 2 * FLOAT_BYTES * tokens * spec.heads if spec.sink_scores else 0  # one more key of each query, and it in its place
    if spec.kv_codec != PLAIN:
        encoding = ENCODING_BYTES * _values_at_once(site)
        room += total * spec.kv_bytes_per_slot + min(encoding, 4 * total * spec.kv_decoded_bytes_per_slot)
    return room


def _states_bytes(spec: ModelSpec, site: Site, rows: int, tokens: int) -> int:
    """Bytes for torch to take tokens of rows through states: one more of each state, and what a chunk of tokens brings to each
    head, in fp32. A kernel works in place. Prompts pass states in fp32, and steps in torch, however they are kept."""
    chunk, of_row = min(tokens, STATE_CHUNK), [0]
    matrices = {state for layer in spec.unlike_layers for state in layer.states if state.is_of_heads}
    for state in matrices:
        heads, key_width, value_width = state.shape
        in_full = 0 if state == state.in_full else state.in_full.nbytes
        if not all(site.has_kernel(op, spec.dtype, width=key_width) for op in (GATED_DELTA, SELECTIVE_SCAN)):
            brought = BROUGHT * (key_width + 2 * value_width + chunk)
            of_row.append(in_full + heads * FLOAT_BYTES * (key_width * value_width + chunk * brought))
        elif tokens > 1:
            of_row.append(in_full)
    return rows * max(of_row)


def _trial_bytes(spec: ModelSpec, site: Site, rows: int) -> int:
    """Bytes for tokens that are tried: what they bring row by row, and what becomes of it; and in torch a state for them."""
    brought = (sum(one.nbytes for one in layer.states if one.notes) for layer in spec.unlike_layers)
    matrices = (layer.passed_bytes for layer in spec.unlike_layers)
    passing = _states_bytes(spec, site, rows, TRIED_AT_ONCE)
    return passing + rows * (2 * max(brought) + (max(matrices) if passing else 0))


def _echoed_states_bytes(spec: ModelSpec, rows: int) -> int:
    """Bytes of the states that an echo changes instead of those of the rows."""
    return rows * max(layer.passed_bytes for layer in spec.unlike_layers)


def _in_heads_bytes(spec: ModelSpec, occupancy: Occupancy, at_once: int, threads: int) -> int:
    """Bytes for prompts that are attended with keys and values of heads, of some heads at a time: these; latent vectors side by
    side, and as products want them; what keys got of each group of heads; and what rooms have beyond those for latents."""
    own = spec.prompt_heads
    if own is None:
        return 0
    batch, keys = occupancy.batch, _attended(occupancy)
    of_head = own.nbytes(batch.size, min(batch.prompt_len, at_once), keys, spec.itemsize)
    together = min(spec.heads, max(1, IN_HEADS_BYTES // of_head))
    made = min(spec.heads * of_head, max(of_head, IN_HEADS_BYTES))
    of_latents = 2 * batch.size * keys * own.latent * spec.itemsize
    got = 2 * FLOAT_BYTES * batch.size * keys * ceil(spec.heads / together)
    at_most = min(spec.heads, together + 1)  # where the first pieces of a prompt attend fewer keys
    room = FLOAT_BYTES * PromptRoom.of(keys, own.width).end * prompt_threads(batch.size, at_most, threads)
    return made + of_latents + got + max(0, room - _kernel_bytes(spec, occupancy, threads))


def _picking_bytes(spec: ModelSpec, levels: Sequence[LevelHeads]) -> int:
    """Bytes for one token: where heads are of several levels, those of one are picked from the layer's, and the outcome is put
    together."""
    return 2 * _values_of_heads(spec) * spec.itemsize if len(levels) > 1 else 0


def _values_of_heads(spec: ModelSpec) -> int:
    """Values of the queries and keys of one token, in the layer that has most."""
    return max((own.heads + own.kv_heads) * own.head_dim for own in spec.of_heads)


def _normed_bytes(spec: ModelSpec) -> int:
    """Bytes for one token: norms work in fp32."""
    return 3 * spec.width * 4 + 2 * spec.widest * spec.itemsize


def _rounding_bytes(spec: ModelSpec, site: Site) -> int:
    """Bytes for one token: torch makes products of 8 bits from values of fp32. A kernel needs little more than 8 bits."""
    if spec.product != INT8_PRODUCT:
        return 0
    packed = [matrix for layer in spec.layers for matrix in layer.matrices if matrix.format != PLAIN]
    if all(site.has_kernel(INT8_PRODUCT, spec.dtype, format) for format in {matrix.format for matrix in packed}):
        return 0
    return ROUNDED_BYTES * max(sum(matrix.shape[-2:]) for matrix in packed)


def _dots_bytes(spec: ModelSpec, site: Site, rows: int) -> int:
    """Bytes for products of up to so many rows on the tensor cores of a GPU: sums of the parts of a matrix, in fp32."""
    rows = min(rows, ROWS_OF_TILE_DOTS)  # of more, some leave, and each expert has but some
    found = (choose(spec.product, format, spec.dtype, site.processor.runs, rows) for format in spec.formats)
    has_parts = any(kernel is not None and kernel.function == TILE_DOTS for kernel in found)
    return rows * DOT_PROGRAMS * DOT_OUTPUTS * FLOAT_BYTES if has_parts else 0


def _scored_bytes(at: LevelHeads, at_once: int, site: Site) -> int:
    """Bytes for torch to score so many tokens, or to add up what keys receive of them."""
    spec, policy, occupancy, _ = at
    batch, keys = occupancy.batch, _attended(occupancy)
    is_asked_more = spec.attention_cap is not None or spec.sink_scores or policy.sees is not None
    is_wide = spec.head_dim > WIDTH_OF_TORCH
    if (is_asked_more or is_wide) and not site.has_kernel(PROMPT_ATTENTION, spec.dtype, width=spec.head_dim):
        scored = min(SCORED_BYTES, FLOAT_BYTES * batch.size * spec.heads * keys * min(batch.prompt_len, at_once))
        of_score = 0 if policy.sees is None else FAR_BYTES + spec.heads // spec.kv_heads  # too far away, for each head
        widened = 2 * FLOAT_BYTES * batch.size * keys * spec.kv_heads * spec.head_dim  # keys and values in fp32
        held = 4 if spec.sink_scores else 3  # scores and shares, those of queries before them, and scores beside one more key
        return widened + held * scored + scored * of_score // (FLOAT_BYTES * spec.heads)
    if policy.ranks_by != ATTENTION:
        return 0
    counted = _part_of_echo(batch) or max(budget.queries or batch.prompt_len for budget in occupancy.budgets)
    queries = min(counted, at_once)
    return 2 * min(SCORED_BYTES, 4 * batch.size * spec.heads * keys * queries)


def _part_of_echo(batch: Batch) -> int:
    """Tokens of an echo that are computed as one part, at most."""
    return min(ECHO_TOKENS, batch.prompt_len) if batch.echoes else 0


def _attended(occupancy: Occupancy) -> int:
    """Keys of a row that are attended at once."""
    return occupancy.held(0) + occupancy.batch.prompt_len + _part_of_echo(occupancy.batch)


def _kernel_bytes(spec: ModelSpec, occupancy: Occupancy, threads: int) -> int:
    """Bytes of the room of the kernel that attends prompts."""
    (rows, keys), parts = (occupancy.batch.size, _attended(occupancy)), prompt_parts(spec.heads // spec.kv_heads)
    given = rows * spec.kv_heads * parts * keys if parts > 1 else 0
    room = PromptRoom.of(keys, spec.head_dim).end * prompt_threads(rows, spec.kv_heads * parts, threads)
    return FLOAT_BYTES * (room + given)


def _parts(plan: Plan, batch: Batch, levels: Sequence[LevelHeads]) -> Iterator[list[LevelHeads]]:
    """The prompts of a batch that are read together; and the longest prefix that rows share, which is computed by itself and
    is kept as a whole, and may begin with a copy of another. Where rows take copies of it, it stands before their prompts."""
    longest = batch.longest_prefix
    for known in (0, 1) if longest > 1 else (0,) if longest else ():
        whole = Occupancy(Batch((0,), (longest - known,), (known,)), (RowBudget(longest),), 1)
        yield [at._replace(occupancy=whole) for at in levels]
    for part in batch.kinds_of_parts(plan.prefill_tokens):
        if longest and plan.copies_prefixes:
            behind = Batch(part.rows, part.lengths, (longest,) * part.size)
            copied = Occupancy(behind, (RowBudget(longest + part.prompt_len),) * part.size, 1)
            yield [at._replace(occupancy=copied) for at in levels]
        else:
            yield [at._replace(occupancy=at.policy.occupancy(part, at.occupancy.gen_len)) for at in levels]


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


def _choosing_bytes(at: LevelHeads, threads: int) -> int:
    """Bytes for ranking the tokens of prompts, sorting them, and moving those that stay."""
    spec, policy, occupancy, _ = at
    if policy.keeps_all:
        return 0
    keys = occupancy.held(0) + occupancy.batch.prompt_len
    weighed = 0 if policy.judge is None else WEIGHED_BYTES + (SORTED_BYTES if policy.has_scores else 0)
    moved = 0 if threads else 4 * spec.head_dim  # torch moves with an index for each value
    compared = COMPARED_BYTES * spec.head_dim if policy.compares else 0  # of one row at a time
    return spec.kv_heads * keys * (occupancy.batch.size * (SORTED_BYTES + weighed + moved) + compared)


def _extending_bytes(at: LevelHeads, threads: int) -> int:
    """Bytes for new tokens after held ones: all of them side by side, as held, as stored and as attended."""
    spec, policy, occupancy, _ = at
    if occupancy.held(0) == 0:
        return 0
    tokens = occupancy.batch.prompt_len
    keys = occupancy.held(0) + tokens * occupancy.batch.readings
    copies = keys * spec.kv_decoded_bytes_per_slot * (4 if policy.rolls else 3)
    rows = occupancy.batch.size
    return rows * copies + _mask_bytes(spec, rows, tokens, keys, threads)


def _mask_bytes(spec: ModelSpec, rows: int, queries: int, keys: int, threads: int) -> int:
    """Bytes of the masks in torch that say which token sees which."""
    of_query = rows * keys * mask_bytes(spec.heads // spec.kv_heads)
    return 0 if threads else min(queries * of_query, max(of_query, SCORED_BYTES))


def _echo_bytes(spec: ModelSpec, occupancy: Occupancy, threads: int, at_once: int) -> int:
    """Bytes for a part of an echo: what it attends, side by side, what it gets, and what it gives."""
    batch, keys = occupancy.batch, _attended(occupancy)
    part = min(_part_of_echo(batch), at_once)
    if not part:
        return 0
    copies = 2 * keys * spec.kv_decoded_bytes_per_slot + part * spec.heads * spec.head_dim * spec.itemsize
    given = 4 * keys * spec.kv_heads * FLOAT_BYTES
    return batch.size * (copies + given) + _mask_bytes(spec, batch.size, part, keys, threads)


def _decoding_bytes_per_slot(spec: ModelSpec, policy: KVPolicy, site: Site) -> int:
    """Bytes per slot of packed KV that is decoded before it is attended, and of its bytes side by side."""
    if spec.kv_codec == PLAIN:
        return 0
    if site.reads(DECODE_ATTENTION, spec.kv_codec, spec.dtype, width=spec.head_dim):  # except keys that are to be rotated
        return (spec.kv_decoded_bytes_per_slot + spec.kv_bytes_per_slot) // spec.kv_sets if policy.rolls else 0
    return spec.kv_decoded_bytes_per_slot + spec.kv_bytes_per_slot


def _evicting_bytes(at: LevelHeads) -> int:
    spec, policy, occupancy, _ = at
    if policy.keeps_all:
        return 0
    weighed = 0 if policy.judge is None else WEIGHED_BYTES
    rolled = spec.head_dim * (4 + 3 * spec.itemsize) if policy.rolls else 0  # angles, and keys on their way
    return occupancy.batch.size * spec.kv_heads * occupancy.capacity * (RANKED_BYTES + weighed + rolled)
