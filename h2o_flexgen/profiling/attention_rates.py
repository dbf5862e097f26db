"""Attention rates, through the cache that a run uses: of decode steps, bound by reading or by computing, also over latents of
which some may be chosen; and of prompts, with and without scores."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch

from h2o_flexgen.core.buffer_layout import VIEW_ALIGNMENT
from h2o_flexgen.core.workload import Batch
from h2o_flexgen.formats.kernel_sizes import shared
from h2o_flexgen.formats.table import PLAIN, ROW_FORMATS
from h2o_flexgen.kv.cache import KVCache
from h2o_flexgen.kv.key_index import KeyIndex
from h2o_flexgen.kv.slots import Coding, SlotScores, image_over
from h2o_flexgen.kv.step import KVStep
from h2o_flexgen.memory.device import Device
from h2o_flexgen.memory.host import HostTier
from h2o_flexgen.memory.pack import TORCH_DTYPES
from h2o_flexgen.models.new_tokens import NewTokens
from h2o_flexgen.planning.machine import CHOOSING, CHOSEN, PLAIN_SCORES, WHOLE, WITH_SCORES
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.policies.occupancy import Occupancy
from h2o_flexgen.policies.recall import ALL, INDEX, RECALLED, attended
from h2o_flexgen.profiling.bench import Bench, Figures, OfRounds, ProfileSizes, Subject

READING, COMPUTING, PROMPTS = "attention_bytes", "attention_flops", "prompt_flops"
UNPACKING, HEAD, LATENTS = "unpacked_values", "head_seconds", "latents_flops"
SHORTER = 16  # how many times shorter texts must be to show what a head costs beside its slots
SMALL_SHARE, SMALLEST_SECONDS = 0.02, 1e-9  # lower bounds, in case one of two measurements was disturbed
BUDGET = 0.2  # for a policy that evicts
FEWER = 8  # how many times fewer rows or heads are tried first
WEIGHT = 2.0
STEP, EVERYTHING = 1, Plan()
LATENT, LATENT_VALUES = 576, 512  # as wide as most models have latents, of which the last values are values
MOST_QUERY_HEADS = 128  # of models with latents
LONGER = 16  # how many times longer texts are of which some slots are chosen


@dataclass(frozen=True)
class HeadSizes:
    queries: int
    keys: int
    dim: int


def decode_reading(benches: Mapping[str, Bench], dtype: str, sizes: ProfileSizes) -> list[Subject]:
    """One query per key, to read as many bytes as possible for what is computed, on each tier where KV is attended to."""
    heads = HeadSizes(sizes.heads, sizes.heads, sizes.head_dim)
    coding = Coding(PLAIN, TORCH_DTYPES[dtype], heads.dim)

    def measure(tier: str, rows: int) -> Figures:
        step = Step.of(benches[tier], heads, coding, rows, sizes.slots)
        return {f"{READING} {tier}": step.cache.image.nbytes / benches[tier].clock.of(step)}

    return [_of_rows(f"decode attention, {tier}", partial(measure, tier), sizes, max) for tier in benches]


def _of_rows(
    title: str, measure: Callable[[int], Figures], sizes: ProfileSizes, of_rounds: OfRounds = statistics.median
) -> Subject:
    """Few rows first, then as many as a cache cannot hold."""
    return Subject(title, measure, (max(1, sizes.kv_rows // FEWER), sizes.kv_rows), weight=WEIGHT, of_rounds=of_rounds)


def decode_computing(bench: Bench, dtypes: Iterable[str], dtype: str, sizes: ProfileSizes) -> list[Subject]:
    """Several queries per key, to compute as much as possible for what is read. `dtypes` are those of plain KV."""

    def measure(name: str, rows: int) -> Figures:
        step, flops = _grouped(bench, PLAIN, name, sizes.queries_per_key, rows, sizes)
        return {f"{COMPUTING} {name}": flops / bench.clock.of(step)}

    plain = [_of_rows(f"decode attention, {name}, grouped", partial(measure, name), sizes, max) for name in dtypes]
    return [*plain, *(_packed_computing(bench, format, dtype, sizes) for format in ROW_FORMATS)]


def _packed_computing(bench: Bench, format: str, dtype: str, sizes: ProfileSizes) -> Subject:
    """Compares one query per key with several: as many values to unpack, but fewer flops."""

    def measure(rows: int) -> Figures:
        few, few_flops = _grouped(bench, format, dtype, 1, rows, sizes)
        many, many_flops = _grouped(bench, format, dtype, sizes.queries_per_key, rows, sizes)
        values = 2.0 * prod(many.cache.image.shape[1:4]) * sizes.head_dim
        with_few, with_many = bench.clock.of(few), bench.clock.of(many)
        for_flops = max((with_many - with_few) / (many_flops - few_flops), SMALL_SHARE * with_many / many_flops)
        unpacking = max(with_few - few_flops * for_flops, SMALL_SHARE * with_few)
        return {f"{COMPUTING} {format}": 1 / for_flops, f"{UNPACKING} {format}": values / unpacking}

    return _of_rows(f"decode attention, {format}, grouped", measure, sizes)


def _grouped(bench: Bench, format: str, dtype: str, queries_per_key: int, rows: int, sizes: ProfileSizes) -> tuple[Step, float]:
    """A decode step and its flops."""
    keys = max(1, sizes.heads // sizes.queries_per_key)
    heads = HeadSizes(keys * queries_per_key, keys, sizes.head_dim)
    step = Step.of(bench, heads, Coding(format, TORCH_DTYPES[dtype], heads.dim), rows, sizes.slots)
    return step, 4.0 * heads.queries * heads.dim * sizes.slots * rows


def decode_of_short_texts(bench: Bench, dtype: str, sizes: ProfileSizes) -> Subject:
    """Compares many rows of few slots with few rows of many: as many bytes, but fewer heads."""
    heads, coding = HeadSizes(sizes.heads, sizes.heads, sizes.head_dim), Coding(PLAIN, TORCH_DTYPES[dtype], sizes.head_dim)

    def measure(rows: int) -> Figures:
        many = Step.of(bench, heads, coding, SHORTER * rows, max(2, sizes.slots // SHORTER))
        few = Step.of(bench, heads, coding, rows, sizes.slots)
        heads_more = (SHORTER - 1) * rows * heads.keys
        return {HEAD: max(SMALLEST_SECONDS, (bench.clock.of(many) - bench.clock.of(few)) / heads_more)}

    return _of_rows("decode attention, short texts", measure, sizes)


@dataclass(frozen=True, eq=False)
class Step:
    """One layer's attention at a decode step that fills all slots, repeatable."""

    cache: KVCache
    now: KVStep
    given: NewTokens

    @classmethod
    def of(cls, bench: Bench, heads: HeadSizes, coding: Coding, rows: int, slots: int, plan: Plan = EVERYTHING) -> Step:
        """`plan`: one that keeps everything."""
        device = bench.device
        held = plan.policy.occupancy(Batch(tuple(range(rows)), (slots - 1,) * rows), STEP + 1)
        assert held.capacity >= slots
        return cls(_cache(bench, heads, coding, held, plan), _step(device, held, STEP), _new(device, heads, coding, rows, 1))

    def __call__(self) -> object:
        return self.cache.attend(self.now, self.given)

    def choose(self) -> None:
        self.cache.choose(self.now, self.given)

    def attending_chosen(self) -> Callable[[], object]:
        """The step without its choice, which is made here."""
        self.choose()
        choice, slots = self.cache.choice, self.cache.choice.slots

        def attend() -> object:
            choice.now, choice.slots = self.now, slots
            return self()

        return attend


def query_heads() -> tuple[int, int, int]:
    """The most query heads that attend latents one by one; one more, which do it together; and the most of models."""
    few = min(shared().many_queries, shared().many_values // LATENT)
    return few, few + 1, MOST_QUERY_HEADS


def latents(bench: Bench, dtype: str, sizes: ProfileSizes) -> list[Subject]:
    """Many query heads attend one vector of each token: all of these, or those that are chosen by an index. An accelerator
    chooses none."""
    coding = Coding(PLAIN, TORCH_DTYPES[dtype], LATENT, LATENT_VALUES)
    width = LATENT * coding.dtype.itemsize + replace(coding, format=INDEX).width
    room = (bench.pool.nbytes - VIEW_ALIGNMENT) // width
    slots = min(LONGER * sizes.slots, room)
    rows = max(1, min(sizes.kv_rows // LONGER, room // slots))

    def measure(queries: int, slots: int) -> Figures:
        heads, clock = HeadSizes(queries, 1, LATENT), bench.clock
        whole, some = (Step.of(bench, heads, coding, rows, slots, Plan.create(kv_recall=share)) for share in (ALL, RECALLED))
        flops = 2.0 * rows * queries * LATENT  # of one product with a slot
        return {
            f"{LATENTS} {WHOLE} {queries}": 2 * flops * slots / clock.of(whole),
            f"{LATENTS} {CHOOSING} {queries}": flops * slots / clock.of(some.choose),
            f"{LATENTS} {CHOSEN} {queries}": 2 * flops * attended(RECALLED, slots) / clock.of(some.attending_chosen()),
        }

    lengths = max(1, slots // FEWER), slots
    return [
        Subject(
            f"attention of latents, {queries} query heads", partial(measure, queries), lengths, weight=WEIGHT, of_rounds=max
        )
        for queries in (() if bench.device.accelerator else query_heads())
    ]


def prompts(bench: Bench, dtype: str, sizes: ProfileSizes) -> list[Subject]:
    """Part of a batch's prompts, with a policy that keeps everything, and with one that keeps the most attended tokens."""
    scored = Plan.create(kv_policy="h2o", kv_budget=BUDGET)
    return [_prompts(bench, kind, plan, dtype, sizes) for kind, plan in ((PLAIN_SCORES, Plan()), (WITH_SCORES, scored))]


def _prompts(bench: Bench, kind: str, plan: Plan, dtype: str, sizes: ProfileSizes) -> Subject:
    """Few heads first, then as many as a model has."""
    rows, length = max(1, sizes.prompt_tokens // sizes.prompt_len), sizes.prompt_len
    coding, occupancy = (
        Coding(PLAIN, TORCH_DTYPES[dtype], sizes.head_dim),
        plan.policy.occupancy(Batch(tuple(range(rows)), (length,) * rows), 1 + STEP),
    )

    def measure(number: int) -> Figures:
        heads, device = HeadSizes(number, number, sizes.head_dim), bench.device
        cache, now = _cache(bench, heads, coding, occupancy, plan), _step(device, occupancy, 0)
        given = _new(device, heads, coding, rows, length)
        flops = 4.0 * heads.queries * heads.dim * rows * length * (length + 1) / 2
        return {f"{PROMPTS} {kind}": flops / bench.clock.of(lambda: cache.attend(now, given))}

    sizes_of_heads = max(1, sizes.heads // FEWER), sizes.heads
    return Subject(f"attention of prompts, {kind}", measure, sizes_of_heads, weight=WEIGHT, of_rounds=max)


def _cache(bench: Bench, heads: HeadSizes, coding: Coding, occupancy: Occupancy, plan: Plan) -> KVCache:
    """A cache that is full, of whatever values, with an index of them and with scores if the plan's policy needs these."""
    shape = (occupancy.batch.size, heads.keys, occupancy.capacity)
    image = image_over(bench.pool.data, shape, coding, bench.device.accelerator)
    if plan.policy.recall != ALL:
        behind = bench.pool.data[-(-image.nbytes // VIEW_ALIGNMENT) * VIEW_ALIGNMENT :]
        return KVCache(image, None, coding, index=KeyIndex.over(behind, plan.policy, coding, shape))
    if not plan.policy.score_bytes:
        return KVCache(image, None, coding)
    memory = bench.device.memory(HostTier())
    scores = SlotScores.over(memory.alloc(prod(shape) * plan.policy.score_bytes), plan.policy, shape)
    return KVCache(image, scores, coding)


def _step(device: Device, occupancy: Occupancy, step: int) -> KVStep:
    return KVStep.of(occupancy.at(step), occupancy.capacity, device.torch_device)


def _new(device: Device, heads: HeadSizes, coding: Coding, rows: int, tokens: int) -> NewTokens:
    def drawn(count: int) -> torch.Tensor:
        return torch.randn(rows, tokens, count, heads.dim, device=device.torch_device).to(coding.dtype)

    return NewTokens(drawn(heads.queries), drawn(heads.keys), drawn(heads.keys))
