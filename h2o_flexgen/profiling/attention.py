"""Attention rates, through the cache that a run uses: of decode steps, bound by reading or by computing, and of prompts, with
and without scores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch

from h2o_flexgen.core.tiers import DEVICE, HOST
from h2o_flexgen.core.workload import Batch
from h2o_flexgen.engine.stores.kv import image_over
from h2o_flexgen.kv.cache import KVCache
from h2o_flexgen.kv.coding import Coding
from h2o_flexgen.kv.scores import SlotScores
from h2o_flexgen.kv.step import KVStep
from h2o_flexgen.memory.device import Device
from h2o_flexgen.memory.host import HostTier
from h2o_flexgen.memory.pack import DTYPES
from h2o_flexgen.planning.machine import PLAIN_SCORES, WITH_SCORES
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.policies.occupancy import Occupancy
from h2o_flexgen.profiling.sizes import Sizes
from h2o_flexgen.profiling.subject import Clock, Figures, Subject
from h2o_flexgen.quant.codec import PLAIN, ROW_FORMS

READING, COMPUTING, PROMPTS = "attention_bytes", "attention_flops", "prompt_flops"
UNPACKING, HEAD = "unpacked_values", "head_seconds"
SHORTER = 16  # how many times shorter texts must be to show what a head costs beside its slots
SMALL_SHARE, SMALLEST_SECONDS = 0.02, 1e-9  # lower bounds, in case one of two measurements was disturbed
BUDGET = 0.2  # for a policy that evicts
STEP = 1


@dataclass(frozen=True)
class Heads:
    queries: int
    keys: int
    dim: int


def decode_reading(clock: Clock, dtype: str, sizes: Sizes) -> list[Subject]:
    """One query per key, to read as many bytes as possible for what is computed, on each tier where KV is attended to."""
    heads = Heads(sizes.heads, sizes.heads, sizes.head_dim)
    tiers = {HOST: Device(), **({DEVICE: clock.device} if clock.device.accelerator else {})}
    return [_decode_reading(replace(clock, device=device), tier, heads, dtype, sizes) for tier, device in tiers.items()]


def _decode_reading(clock: Clock, tier: str, heads: Heads, dtype: str, sizes: Sizes) -> Subject:
    step = Step.of(clock.device, heads, Coding(PLAIN, DTYPES[dtype], heads.dim), sizes.kv_rows, sizes.slots)
    return clock.rate(f"decode attention, {tier}", f"{READING} {tier}", step.cache.image.nbytes, step)


def decode_computing(clock: Clock, dtypes: tuple[str, ...], dtype: str, sizes: Sizes) -> list[Subject]:
    """Several queries per key, to compute as much as possible for what is read. `dtypes` are those of plain KV."""
    subjects = []
    for name in dtypes:
        step, flops = _grouped(clock, PLAIN, name, sizes.queries_per_key, sizes)
        subjects.append(clock.rate(f"decode attention, {name}, grouped", f"{COMPUTING} {name}", flops, step))
    return [*subjects, *(_packed_computing(clock, codec, dtype, sizes) for codec in ROW_FORMS)]


def _packed_computing(clock: Clock, codec: str, dtype: str, sizes: Sizes) -> Subject:
    """Compares one query per key with several: as many values to unpack, but fewer flops."""
    few, few_flops = _grouped(clock, codec, dtype, 1, sizes)
    many, many_flops = _grouped(clock, codec, dtype, sizes.queries_per_key, sizes)
    values = 2.0 * prod(many.cache.image.shape[1:4]) * sizes.head_dim

    def measure() -> Figures:
        with_few, with_many = clock.of(few), clock.of(many)
        for_flops = max((with_many - with_few) / (many_flops - few_flops), SMALL_SHARE * with_many / many_flops)
        unpacking = max(with_few - few_flops * for_flops, SMALL_SHARE * with_few)
        return {f"{COMPUTING} {codec}": 1 / for_flops, f"{UNPACKING} {codec}": values / unpacking}

    return Subject(f"decode attention, {codec}, grouped", measure)


def _grouped(clock: Clock, codec: str, dtype: str, queries_per_key: int, sizes: Sizes) -> tuple[Step, float]:
    """A decode step and its flops."""
    keys = max(1, sizes.heads // sizes.queries_per_key)
    heads = Heads(keys * queries_per_key, keys, sizes.head_dim)
    step = Step.of(clock.device, heads, Coding(codec, DTYPES[dtype], heads.dim), sizes.kv_rows, sizes.slots)
    return step, 4.0 * heads.queries * heads.dim * sizes.slots * sizes.kv_rows


def decode_of_short_texts(clock: Clock, dtype: str, sizes: Sizes) -> Subject:
    """Compares many rows of few slots with few rows of many: as many bytes, but fewer heads."""
    heads, coding = Heads(sizes.heads, sizes.heads, sizes.head_dim), Coding(PLAIN, DTYPES[dtype], sizes.head_dim)
    many = Step.of(clock.device, heads, coding, SHORTER * sizes.kv_rows, max(2, sizes.slots // SHORTER))
    few = Step.of(clock.device, heads, coding, sizes.kv_rows, sizes.slots)
    heads_more = (SHORTER - 1) * sizes.kv_rows * heads.keys

    def measure() -> Figures:
        return {HEAD: max(SMALLEST_SECONDS, (clock.of(many) - clock.of(few)) / heads_more)}

    return Subject("decode attention, short texts", measure)


@dataclass(frozen=True, eq=False)
class Step:
    """One layer's attention at a decode step that fills all slots, repeatable."""

    cache: KVCache
    now: KVStep
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # query, key and value of the newest token

    @classmethod
    def of(cls, device: Device, heads: Heads, coding: Coding, rows: int, slots: int) -> Step:
        held = Plan().policy.occupancy(Batch(tuple(range(rows)), (slots - 1,) * rows), STEP + 1)
        assert held.capacity >= slots
        return cls(_cache(device, heads, coding, held, None), _step(device, held, STEP), _new(device, heads, coding, rows, 1))

    def __call__(self) -> object:
        return self.cache.attend(self.now, *self.given)


def prompts(clock: Clock, dtype: str, sizes: Sizes) -> list[Subject]:
    """Part of a batch's prompts, with a policy that keeps everything, and with one that keeps the most attended tokens."""
    scored = Plan.create(kv_policy="h2o", kv_budget=BUDGET)
    return [_prompts(clock, kind, plan, dtype, sizes) for kind, plan in ((PLAIN_SCORES, Plan()), (WITH_SCORES, scored))]


def _prompts(clock: Clock, kind: str, plan: Plan, dtype: str, sizes: Sizes) -> Subject:
    heads, device = Heads(sizes.heads, sizes.heads, sizes.head_dim), clock.device
    coding, rows = Coding(PLAIN, DTYPES[dtype], heads.dim), max(1, sizes.prompt_tokens // sizes.prompt_len)
    occupancy = plan.policy.occupancy(Batch(tuple(range(rows)), (sizes.prompt_len,) * rows), 1 + STEP)
    cache, now = _cache(device, heads, coding, occupancy, plan), _step(device, occupancy, 0)
    given = _new(device, heads, coding, rows, sizes.prompt_len)
    flops = 4.0 * heads.queries * heads.dim * rows * sizes.prompt_len * (sizes.prompt_len + 1) / 2
    return clock.rate(f"attention of prompts, {kind}", f"{PROMPTS} {kind}", flops, lambda: cache.attend(now, *given))


def _cache(device: Device, heads: Heads, coding: Coding, occupancy: Occupancy, plan: Plan | None) -> KVCache:
    """A cache full of the codec's form of zeros, with scores if the plan's policy needs them."""
    memory, shape = device.memory(HostTier()), (occupancy.batch.size, heads.keys, occupancy.capacity)
    region = memory.alloc(2 * prod(shape) * coding.width * coding.kept_dtype.itemsize)
    image = image_over(region, shape, coding, device.accelerator)
    image.copy_(coding.encode(torch.zeros(heads.dim, dtype=coding.dtype, device=device.torch_device)))
    if plan is None or not plan.policy.score_bytes:
        return KVCache(image, None, coding)
    scores = SlotScores.over(memory.alloc(prod(shape) * plan.policy.score_bytes), plan.policy, shape)
    return KVCache(image, scores, coding)


def _step(device: Device, occupancy: Occupancy, step: int) -> KVStep:
    return KVStep.of(occupancy, step, occupancy.capacity, device.torch_device)


def _new(
    device: Device, heads: Heads, coding: Coding, rows: int, tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    def drawn(count: int) -> torch.Tensor:
        return torch.randn(rows, tokens, count, heads.dim, device=device.torch_device).to(coding.dtype)

    return drawn(heads.queries), drawn(heads.keys), drawn(heads.keys)
