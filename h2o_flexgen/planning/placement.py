"""Placement: where everything of a block lies: the layers of each device, the KV that their heads hold, and the exact tier of
every tensor, of the KV and the states of every (layer, batch) and of every batch's activations.

Nothing is ever split over two tiers. What a tier got too much or too little is carried over to the next item, so that over the
first layers, however many, and so over all, each tier is within one item of what the plan asks. Only tables that are larger
than any layer of a block come first: each buffer of weights is as large as the largest layer that comes through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from h2o_flexgen.core.buffer_layout import KVLayout, StateLayout, hidden_bytes
from h2o_flexgen.core.model_spec import LayerSpec, ModelSpec
from h2o_flexgen.core.site import DEVICE, DISK, HOST, TIERS, Site
from h2o_flexgen.core.workload import Block
from h2o_flexgen.planning.plan import LEAST_PLACED, Plan, Shares
from h2o_flexgen.policies.levels import Level
from h2o_flexgen.policies.occupancy import Occupancy
from h2o_flexgen.policies.recall import ALL, index_bytes
from h2o_flexgen.schedule.traffic import Traffic


def device_of_layers(spec: ModelSpec, devices: int) -> tuple[int, ...]:
    """The device of every layer; none if there is only one device. The heaviest range is as light as can be, where
    a layer weighs as many values as a token is multiplied with."""
    if devices == 1:
        return ()
    if devices > len(spec.kv_layers):
        raise ValueError(
            f"a pipeline of {devices} devices was asked for, and {spec.name} has {len(spec.kv_layers)} decoder layers "
            "with attention; give no more devices than that"
        )
    starts = (0, *spec.kv_layers[1:], len(spec.layers))  # the embedding comes with the first, the head with the last
    weights = [sum(layer.matmul_values for layer in spec.layers[first:behind]) for first, behind in pairwise(starts)]
    sizes = _even_cuts(weights, devices)
    ranges = enumerate(pairwise(sizes))
    return tuple(device for device, (first, behind) in ranges for _ in range(starts[first], starts[behind]))


def layers_of(device_of: tuple[int, ...], device: int) -> tuple[int, ...]:
    return tuple(layer for layer, own in enumerate(device_of) if own == device)


def only_layers(spec: ModelSpec, layers: tuple[int, ...]) -> ModelSpec:
    """The model as seen by the device that computes these layers: all others are there, and empty."""
    return replace(spec, layers=tuple(one if at in layers else _emptied(one) for at, one in enumerate(spec.layers)))


def _emptied(layer: LayerSpec) -> LayerSpec:
    return replace(
        layer,
        tensors=(),
        products=(),
        has_kv=False,
        states=(),
        passing_width=0,
        token_table=None,
        logit_matrix=None,
        halves=None,
        in_prompts=None,
    )


def _even_cuts(weights: list[float], parts: int) -> list[int]:
    """The beginnings of parts, and the end of the last, where the heaviest part is as light as can be. For every number of
    items the best cuts into one part are found, then into one more."""
    before = [0.0]
    for weight in weights:
        before.append(before[-1] + weight)
    best: list[tuple[float, list[int]]] = [(total, [0]) for total in before]
    for part in range(1, parts):
        best = [
            min(
                ((max(best[cut][0], before[end] - before[cut]), [*best[cut][1], cut]) for cut in range(part, end)),
                default=(float("inf"), []),
            )
            for end in range(len(before))
        ]
    return [*best[-1][1], len(weights)]


Place = tuple[int, int]  # layer of the schedule, batch


@dataclass(frozen=True)
class HeldKV:
    """The KV of a block, in levels of heads that keep the same number of tokens. It says what each level holds in
    which layer. The size of a layer is found here, as a whole or level by level. Without head budgets there is one level,
    of all heads in all layers."""

    spec: ModelSpec
    levels: tuple[Level, ...]  # the one that keeps most comes first
    block: Block
    index_is_copy: bool = False  # steps choose by an index where they attend, of keys elsewhere

    @classmethod
    def of(cls, spec: ModelSpec, plan: Plan, block: Block) -> HeldKV:
        return cls(spec, plan.levels(spec), block)

    def only(self, spec: ModelSpec, is_kept: Callable[[int], bool]) -> HeldKV:
        """The same of a part of the model, which has only those layers with KV that are kept."""
        places = [place for place, layer in enumerate(self.spec.kv_layers) if is_kept(layer)]
        return replace(self, spec=spec, levels=tuple(level.only(places) for level in self.levels))

    @cached_property
    def occupancies(self) -> tuple[tuple[Occupancy, ...], ...]:
        """The occupancy of each level, in each batch."""
        batches, gen_len = self.block.batches, self.block.gen_len
        return tuple(tuple(level.policy.occupancy(batch, gen_len) for batch in batches) for level in self.levels)

    @cached_property
    def specs(self) -> tuple[ModelSpec, ...]:
        """The model with the heads of each level."""
        return tuple(map(self._spec_of, self.levels))

    def _spec_of(self, level: Level) -> ModelSpec:
        layers = (layer for layer, heads in zip(self.spec.kv_layers, level.heads) if heads)
        return next(map(self.spec.at, layers), self.spec)

    @cached_property
    def _heads(self) -> Mapping[int, tuple[int, ...]]:
        by_level = zip(*(map(len, level.heads) for level in self.levels))
        return dict(zip(self.spec.kv_layers, by_level))

    def heads(self, layer: int) -> tuple[int, ...]:
        """How many KV heads of a layer each level has; nothing of a layer without KV."""
        return self._heads.get(layer, ())

    def note_bytes(self, level: int) -> int:
        """Bytes kept for a slot of a KV head of a level, where it is computed with, beside key and value: what a policy that
        evicts knows of it, or the index of its key."""
        policy = self.levels[level].policy
        return policy.score_bytes + index_bytes(policy.recall, self.specs[level], self.index_is_copy)

    def most_heads(self, level: int) -> int:
        """KV heads that a level has in the layer where it has most."""
        return max((heads[level] for heads in self._heads.values()), default=0)

    def layouts(self, layer: int, batch: int) -> tuple[KVLayout | None, ...]:
        """How the KV of a batch lies in one layer, of each level; nothing of those that have none of the layer's heads."""
        return self._laid(layer, batch)[0]

    def image_bytes(self, layer: int, batch: int) -> int:
        """Bytes of the KV of a batch in one layer, in memory."""
        return self._laid(layer, batch)[1]

    def _laid(self, layer: int, batch: int) -> tuple[tuple[KVLayout | None, ...], int]:
        """Both, which are the same in all layers with such heads."""
        heads = self._heads[layer]
        kind = heads, self.spec.layers[layer].kv_heads, batch
        if kind not in self._known:
            spec = self.spec.at(layer)
            layouts = tuple(each[batch].layout(spec, own) if own else None for each, own in zip(self.occupancies, heads))
            self._known[kind] = layouts, sum(layout.image_bytes for layout in layouts if layout is not None)
        return self._known[kind]

    @cached_property
    def _known(self) -> dict[object, tuple[tuple[KVLayout | None, ...], int]]:
        return {}

    def alike_blocks(self, numbers: Sequence[int]) -> Sequence[list[int]]:
        """Those decoder blocks, parted into some that compute the same and have as many heads of each level."""
        heads: dict[int, list[tuple[int, ...]]] = {}
        for layer, own in self._heads.items():
            if (block := self.spec.layers[layer].block) is not None:
                heads.setdefault(block, []).append(own)
        kinds: dict[object, list[int]] = {}
        for number in numbers:
            kinds.setdefault((self.spec.block_kinds[number], tuple(heads.get(number, ()))), []).append(number)
        return tuple(kinds.values())


@dataclass(frozen=True)
class Placement:
    weights: Mapping[str, str]  # tensor's name in the checkpoint -> tier; a tied head is the embedding and occurs once
    kv: Mapping[Place, str]  # (layer of the schedule, batch) -> tier, layer by layer
    hidden: tuple[str, ...]  # tier of each batch
    state: Mapping[Place, str] = field(default_factory=dict)  # as of KV


def spread(sizes: Sequence[int], shares: Shares) -> tuple[str, ...]:
    """Places each item whole on the tier that lacks most of its share of the bytes so far, this item included.

    After every item each tier is within one largest item of its share. Before an item is placed the three lacks sum up to its
    size s, so the largest is s/3 at least: no tier gets more than 2/3 of an item too much. And if a tier that lacks more than
    an item were passed over, the one chosen would lack as much, and the third would have had an item too much."""
    wanted = [(tier, share) for tier in TIERS if (share := shares.of(tier)) > LEAST_PLACED]
    if len(wanted) == 1:
        return (wanted[0][0],) * len(sizes)
    placed, total, places = [0] * len(wanted), 0, list[int]()
    others = [*enumerate(share for _, share in wanted)][1:]
    for size in sizes:
        total += size
        place, most = 0, wanted[0][1] * total - placed[0]
        for other, share in others:
            if (lacking := share * total - placed[other]) > most:  # among equals the first, which is the fastest
                place, most = other, lacking
        placed[place] += size
        places.append(place)
    return tuple([wanted[place][0] for place in places])


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
    if not first:
        return dict(zip(sizes, spread(list(sizes.values()), shares)))
    rest = {name: size for name, size in sizes.items() if name not in first}
    of_rest = Shares(*(room / (sum(rest.values()) or 1) for room in left.values()))
    placed = first | dict(zip(rest, spread(list(rest.values()), of_rest)))
    return {name: placed[name] for name in sizes}


def place(
    spec: ModelSpec,
    plan: Plan,
    block: Block,
    weights: Mapping[str, str] | None = None,
    levels: Sequence[Level] | None = None,
    compute: str = DEVICE,
) -> Placement:
    """Places a block. `weights`: their tiers, if they are known already; `levels`: of KV heads, if they are. Keys, values and
    states that no later visit needs stay on the tier where it is computed."""
    held = HeldKV.of(spec, plan, block) if levels is None else HeldKV(spec, tuple(levels), block)
    kv, hidden, states = _kv_sizes(held), _hidden_sizes(spec, block), state_layouts(spec, block)
    return Placement(
        weights=place_weights(spec, plan) if weights is None else weights,
        kv=dict.fromkeys(kv, compute) if block.only_reads else dict(zip(kv, spread(list(kv.values()), plan.kv))),
        hidden=spread(hidden, plan.hidden),
        state=dict.fromkeys(states, compute) if block.only_reads else _placed_states(states, plan),
    )


def _placed_states(states: Mapping[Place, StateLayout], plan: Plan) -> dict[Place, str]:
    return dict(zip(states, spread([layout.nbytes for layout in states.values()], plan.of_states)))


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
        prompt_weights=_prompt_weights(spec.of_prompts, plan, placement) if len(spec.forms) > 1 else None,
        kv=placement.kv,
        choosing=frozenset() if plan.policy.recall == ALL else choosing_layers(spec, plan.levels(spec)),
        state=placement.state,
        hidden=placement.hidden,
        kv_before=any(any(batch.seen) for batch in block.batches),
        kv_after=any(batch.lives_on for batch in block.batches),
        attends_on_host=site.accelerator and plan.attend_on == HOST,
        rows_join=block.is_running,
        device_of=device_of_layers(spec, plan.pipeline),
    )


def choosing_layers(spec: ModelSpec, levels: Sequence[Level]) -> frozenset[int]:
    """The layers in which decode steps attend what they choose; a window is read whole."""
    chosen = (zip(spec.kv_layers, level.heads) for level in levels if level.policy.recall != ALL)
    return frozenset(layer for of_layers in chosen for layer, heads in of_layers if heads)


# -- sizes in bytes ------------------------------------------------------------------------------------------------------


def _kv_sizes(held: HeldKV) -> dict[Place, int]:
    batches = range(len(held.block.batches))
    return {(layer, batch): held.image_bytes(layer, batch) for layer in held.spec.kv_layers for batch in batches}


def state_layouts(spec: ModelSpec, block: Block) -> dict[Place, StateLayout]:
    """How the states of each batch lie, layer by layer."""
    sizes = [batch.size for batch in block.batches]
    return {
        (layer, batch): StateLayout(rows, spec.layers[layer].states)
        for layer in spec.state_layers
        for batch, rows in enumerate(sizes)
    }


def _hidden_sizes(spec: ModelSpec, block: Block) -> list[int]:
    return [hidden_bytes(spec, batch) for batch in block.batches]


# -- what came of it -----------------------------------------------------------------------------------------------------


LayersByTiers = Mapping[tuple[int, tuple[str, ...]], Sequence[int]]


def layers_by_tiers(spec: ModelSpec, plan: Plan, weights: Mapping[str, str]) -> LayersByTiers:
    """The layers by the sizes of their tensors and the tiers of these: with many slices of experts most are alike."""
    key = layers_by_tiers, plan.weights
    if key not in spec.worked_out:
        found: dict[tuple[int, tuple[str, ...]], list[int]] = {}
        for index, (layer, kind) in enumerate(zip(spec.layers, spec.stored_kinds, strict=True)):
            found.setdefault((kind, tuple([weights[tensor.name] for tensor in layer.stored])), []).append(index)
        spec.worked_out[key] = found
    known: LayersByTiers = spec.worked_out[key]
    return known


def _layers_with(spec: ModelSpec, plan: Plan, placement: Placement, tier: str) -> frozenset[int]:
    key = _layers_with, plan.weights, tier
    if key not in spec.worked_out:
        by_tiers = layers_by_tiers(spec, plan, placement.weights)
        spec.worked_out[key] = frozenset(index for (_, tiers), own in by_tiers.items() if tier in tiers for index in own)
    found: frozenset[int] = spec.worked_out[key]
    return found


def _prompt_weights(spec: ModelSpec, plan: Plan, placement: Placement) -> tuple[frozenset[int], frozenset[int]]:
    return _layers_with(spec, plan, placement, DISK), _layers_with(spec, plan, placement, HOST)


def _percent(placed: Iterable[tuple[str, int]]) -> tuple[float, float]:
    sizes = dict.fromkeys(TIERS, 0)
    for tier, size in placed:
        sizes[tier] += size
    total = sum(sizes.values()) or 1
    return round(100 * sizes[DEVICE] / total, 2), round(100 * sizes[HOST] / total, 2)
