"""Placement: the exact tier of every tensor, of the KV of every (layer, batch) and of every batch's activations.

Nothing is ever split over two tiers. What a tier got too much or too little is carried over to the next item, so that over the
first layers, however many, and so over all, each tier is within one item of what the plan asks. Only tables that are larger
than any layer of a block come first: each buffer of weights is as large as the largest layer that comes through it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from h2o_flexgen.core.buffer_layout import hidden_bytes
from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.site import DEVICE, DISK, HOST, TIERS, Site
from h2o_flexgen.core.workload import Block
from h2o_flexgen.planning.held_kv import HeldKV, Place
from h2o_flexgen.planning.plan import Plan, Shares
from h2o_flexgen.planning.sections import device_of_layers
from h2o_flexgen.policies.levels import Level
from h2o_flexgen.schedule.traffic import Traffic


@dataclass(frozen=True)
class Placement:
    weights: Mapping[str, str]  # tensor's name in the checkpoint -> tier; a tied head is the embedding and occurs once
    kv: Mapping[Place, str]  # (layer of the schedule, batch) -> tier, layer by layer
    hidden: tuple[str, ...]  # tier of each batch


def spread(sizes: Sequence[int], shares: Shares) -> tuple[str, ...]:
    """Places each item whole on the tier that lacks most of its share of the bytes so far, this item included.

    After every item each tier is within one largest item of its share. Before an item is placed the three lacks sum up to its
    size s, so the largest is s/3 at least: no tier gets more than 2/3 of an item too much. And if a tier that lacks more than
    an item were passed over, the one chosen would lack as much, and the third would have had an item too much."""
    wanted = {tier: share for tier in TIERS if (share := shares.of(tier)) > 1e-9}  # 1 - 0.58 - 0.42 is not quite 0
    if len(wanted) == 1:
        return tuple(wanted) * len(sizes)
    placed = dict.fromkeys(wanted, 0)
    total, tiers = 0, []
    for size in sizes:
        total += size
        tier = max(wanted, key=lambda tier: wanted[tier] * total - placed[tier])  # among equals the first, which is the fastest
        placed[tier] += size
        tiers.append(tier)
    return tuple(tiers)


def place_weights(spec: ModelSpec, plan: Plan) -> dict[str, str]:
    """The tiers of the weights, which stay for all blocks of a workload."""
    key = place_weights, plan.weights
    if key not in spec.worked_out:
        spec.worked_out[key] = _placed_weights(spec.weight_sizes, plan.weights, spec.outsized)
    found: dict[str, str] = spec.worked_out[key]
    return found


def _placed_weights(sizes: Mapping[str, int], shares: Shares, outsized: Sequence[str]) -> dict[str, str]:
    """Outsized tensors on the fastest tier in memory with room for them in its share. The others are spread by what is then
    left of each share, so that each tier still ends within one tensor of what was asked."""
    total, first = sum(sizes.values()), dict[str, str]()
    left = {tier: shares.of(tier) * total for tier in (DEVICE, HOST)}
    for name in outsized:
        tier = next((tier for tier, room in left.items() if sizes[name] <= room), None)
        if tier is not None:
            first[name] = tier
            left[tier] -= sizes[name]
    rest = {name: size for name, size in sizes.items() if name not in first}
    of_rest = Shares(*(room / (sum(rest.values()) or 1) for room in left.values())) if first else shares
    placed = first | dict(zip(rest, spread(list(rest.values()), of_rest)))
    return {name: placed[name] for name in sizes}


def place(
    spec: ModelSpec, plan: Plan, block: Block, weights: Mapping[str, str] | None = None, levels: Sequence[Level] | None = None
) -> Placement:
    """Places a block. `weights`: their tiers, if they are known already; `levels`: of KV heads, if they are."""
    held = HeldKV.of(spec, plan, block) if levels is None else HeldKV(spec, tuple(levels), block)
    kv, hidden = _kv_sizes(held), _hidden_sizes(spec, block)
    return Placement(
        weights=place_weights(spec, plan) if weights is None else weights,
        kv=dict(zip(kv, spread(list(kv.values()), plan.kv))),
        hidden=spread(hidden, plan.hidden),
    )


def placed_shares(held: HeldKV, placement: Placement) -> tuple[float, ...]:
    """The shares that were placed, as FlexGen's six numbers: per cent on device and host of weights, KV and activations."""
    weights, kv, hidden = held.spec.weight_sizes, _kv_sizes(held), _hidden_sizes(held.spec, held.block)
    return (
        *_percent((placement.weights[name], size) for name, size in weights.items()),
        *_percent((placement.kv[unit], size) for unit, size in kv.items()),
        *_percent(zip(placement.hidden, hidden)),
    )


def traffic(spec: ModelSpec, plan: Plan, block: Block, placement: Placement, site: Site) -> Traffic:
    """Everything that a schedule must move under this placement."""
    return Traffic(
        steps=block.gen_len,
        layers=len(spec.layers),
        batches=len(block.batches),
        buffers=plan.buffers,
        accelerator=site.accelerator,
        weights_on_disk=_layers_with(spec, plan, placement, DISK),
        weights_on_host=_layers_with(spec, plan, placement, HOST),
        kv=placement.kv,
        hidden=placement.hidden,
        kv_before=any(any(batch.seen) for batch in block.batches),
        kv_after=any(batch.lives_on for batch in block.batches),
        attends_on_host=site.accelerator and plan.attend_on == HOST,
        rows_join=block.is_running,
        device_of=device_of_layers(spec, plan.pipeline),
    )


# -- sizes in bytes ------------------------------------------------------------------------------------------------------


def _kv_sizes(held: HeldKV) -> dict[Place, int]:
    batches = range(len(held.block.batches))
    return {(layer, batch): held.image_bytes(layer, batch) for layer in held.spec.kv_layers for batch in batches}


def _hidden_sizes(spec: ModelSpec, block: Block) -> list[int]:
    return [hidden_bytes(spec, batch) for batch in block.batches]


# -- what came of it -----------------------------------------------------------------------------------------------------


def _layers_with(spec: ModelSpec, plan: Plan, placement: Placement, tier: str) -> frozenset[int]:
    key = _layers_with, plan.weights, tier
    if key not in spec.worked_out:
        spec.worked_out[key] = frozenset(
            index
            for index, layer in enumerate(spec.layers)
            if any(placement.weights[tensor.name] == tier for _, tensor in layer.tensors)
        )
    found: frozenset[int] = spec.worked_out[key]
    return found


def _percent(placed: Iterable[tuple[str, int]]) -> tuple[float, float]:
    sizes = dict.fromkeys(TIERS, 0)
    for tier, size in placed:
        sizes[tier] += size
    total = sum(sizes.values()) or 1
    return round(100 * sizes[DEVICE] / total, 2), round(100 * sizes[HOST] / total, 2)
