"""Attention, through the cache that a run attends with: of a step, bound by what it reads or by what it computes, and of
prompts, with scores and without."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch

from h2o_flexgen.kv.cache import KVCache
from h2o_flexgen.kv.coding import Coding
from h2o_flexgen.kv.notes import Notes
from h2o_flexgen.kv.passes import Pass
from h2o_flexgen.kv.slots import Slots
from h2o_flexgen.memory.device import Device
from h2o_flexgen.memory.host import HostTier
from h2o_flexgen.memory.pack import DTYPES
from h2o_flexgen.planning.machine import PLAIN_SCORES, WITH_SCORES
from h2o_flexgen.planning.plan import DEVICE, HOST, Plan
from h2o_flexgen.planning.workload import Batch
from h2o_flexgen.quant.codec import PACKED, PLAIN
from h2o_flexgen.runtime.kvstore import image_over
from h2o_flexgen.runtime.profiling.sizes import Sizes
from h2o_flexgen.runtime.profiling.subject import Clock, Figures, Subject

READING, COMPUTING, PROMPTS = "attention_bytes", "attention_flops", "prompt_flops"
BUDGET = 0.2  # of a policy that evicts
STEP = 1


@dataclass(frozen=True)
class Heads:
    queries: int
    keys: int
    dim: int


def decode_reading(clock: Clock, dtype: str, sizes: Sizes) -> list[Subject]:
    """A key for each query: as many bytes as possible for what is computed. On each tier that KV is attended on."""
    heads = Heads(sizes.heads, sizes.heads, sizes.head_dim)
    tiers = {HOST: Device(), **({DEVICE: clock.device} if clock.device.accelerator else {})}
    return [_decode_reading(replace(clock, device=device), tier, heads, dtype, sizes) for tier, device in tiers.items()]


def _decode_reading(clock: Clock, tier: str, heads: Heads, dtype: str, sizes: Sizes) -> Subject:
    step = Step.of(clock.device, heads, Coding(PLAIN, DTYPES[dtype], heads.dim), sizes.kv_rows, sizes.slots)
    figure = f"{READING} {tier}"
    return Subject(f"decode attention, {tier}", lambda: {figure: step.cache.image.nbytes / clock.of(step)})


def decode_computing(clock: Clock, dtypes: tuple[str, ...], dtype: str, sizes: Sizes) -> list[Subject]:
    """Several queries share a key: the most that is computed for what is read. `dtypes` are those of plain KV."""
    kept = {**{name: (PLAIN, name) for name in dtypes}, **{codec: (codec, dtype) for codec in PACKED.values()}}
    return [_decode_computing(clock, name, codec, DTYPES[each], sizes) for name, (codec, each) in kept.items()]


def _decode_computing(clock: Clock, kept: str, codec: str, dtype: torch.dtype, sizes: Sizes) -> Subject:
    heads = Heads(sizes.heads, max(1, sizes.heads // sizes.queries_per_key), sizes.head_dim)
    step = Step.of(clock.device, heads, Coding(codec, dtype, heads.dim), sizes.kv_rows, sizes.slots)
    flops, figure = 4.0 * heads.queries * heads.dim * sizes.slots * sizes.kv_rows, f"{COMPUTING} {kept}"
    return Subject(f"decode attention, {kept}, grouped", lambda: {figure: flops / clock.of(step)})


@dataclass(frozen=True, eq=False)
class Step:
    """One layer's attention at a step whose rows then hold all slots, again and again."""

    cache: KVCache
    now: Pass
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # query, key and value of the newest token

    @classmethod
    def of(cls, device: Device, heads: Heads, coding: Coding, rows: int, slots: int) -> Step:
        held = Plan().policy.slots(Batch(tuple(range(rows)), (slots - 1,) * rows), STEP + 1)
        assert held.capacity >= slots
        return cls(_cache(device, heads, coding, held, None), _pass(device, held, STEP), _new(device, heads, coding, rows, 1))

    def __call__(self) -> object:
        return self.cache.attend(self.now, *self.given)


def prompts(clock: Clock, dtype: str, sizes: Sizes) -> list[Subject]:
    """A part of a batch's prompts: with a policy that keeps all, and with one that keeps what is attended most."""
    scored = Plan.create(kv_policy="h2o", kv_budget=BUDGET)
    return [_prompts(clock, kind, plan, dtype, sizes) for kind, plan in ((PLAIN_SCORES, Plan()), (WITH_SCORES, scored))]


def _prompts(clock: Clock, kind: str, plan: Plan, dtype: str, sizes: Sizes) -> Subject:
    heads, device = Heads(sizes.heads, sizes.heads, sizes.head_dim), clock.device
    coding, rows = Coding(PLAIN, DTYPES[dtype], heads.dim), max(1, sizes.prompt_tokens // sizes.prompt_len)
    slots = plan.policy.slots(Batch(tuple(range(rows)), (sizes.prompt_len,) * rows), 1 + STEP)
    cache, now = _cache(device, heads, coding, slots, plan), _pass(device, slots, 0)
    given = _new(device, heads, coding, rows, sizes.prompt_len)
    pairs, figure = rows * sizes.prompt_len * (sizes.prompt_len + 1) / 2, f"{PROMPTS} {kind}"

    def measure() -> Figures:
        return {figure: 4.0 * heads.queries * heads.dim * pairs / clock.of(lambda: cache.attend(now, *given))}

    return Subject(f"attention of prompts, {kind}", measure)


def _cache(device: Device, heads: Heads, coding: Coding, slots: Slots, plan: Plan | None) -> KVCache:
    """Filled with what the codec makes of zeros; with notes where the plan's policy has some."""
    memory, shape = device.memory(HostTier()), (slots.batch.size, heads.keys, slots.capacity)
    region = memory.alloc(2 * prod(shape) * coding.width * coding.kept_dtype.itemsize)
    image = image_over(region, shape, coding, device.accelerator)
    image.copy_(coding.encode(torch.zeros(heads.dim, dtype=coding.dtype, device=device.torch_device)))
    if plan is None or not plan.policy.note_bytes:
        return KVCache(image, None, coding)
    notes = Notes.over(memory.alloc(prod(shape) * plan.policy.note_bytes), plan.policy, shape)
    return KVCache(image, notes, coding)


def _pass(device: Device, slots: Slots, step: int) -> Pass:
    return Pass.of(slots, step, slots.capacity, device.torch_device)


def _new(
    device: Device, heads: Heads, coding: Coding, rows: int, tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    def drawn(count: int) -> torch.Tensor:
        return torch.randn(rows, tokens, count, heads.dim, device=device.torch_device).to(coding.dtype)

    return drawn(heads.queries), drawn(heads.keys), drawn(heads.keys)
