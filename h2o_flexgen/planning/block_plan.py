"""BlockPlan: a block under a plan, with all that follows from the two: what lies where, and in which order it is done.

Engine, footprint, cost, command line and benchmarks start from this one object, and from BlockPlans for a whole workload.
KVRooms and StateRooms are the buffers through which the KV of one level passes, and states of rows, in bytes. The stores have
them allocated, and the footprint counts them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from h2o_flexgen.core.buffer_layout import KVLayout, PromptPlaces, StateLayout, region_bytes
from h2o_flexgen.core.model_spec import TRIED_AT_ONCE, ModelSpec
from h2o_flexgen.core.site import DEVICE, DISK, HOST, NO_ADAPTERS, AdapterRoom, Site
from h2o_flexgen.core.workload import Block, BlockSize, Workload
from h2o_flexgen.planning.placement import (
    HeldKV,
    Place,
    Placement,
    layers_of,
    only_layers,
    place,
    place_weights,
    placed_shares,
    state_layouts,
    traffic,
)
from h2o_flexgen.planning.plan import OFF, Plan
from h2o_flexgen.policies.levels import Level
from h2o_flexgen.schedule import SCHEDULES
from h2o_flexgen.schedule.pipeline import Pipeline
from h2o_flexgen.schedule.schedule import Schedule

Shape = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class BlockPlan:
    spec: ModelSpec
    plan: Plan
    block: Block
    placement: Placement
    schedule: Schedule
    levels: tuple[Level, ...]  # the KV heads by what they keep, most first; a single one where all keep the same
    adapters: AdapterRoom = NO_ADAPTERS  # of rows

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        plan: Plan,
        block: Block,
        site: Site,
        weights: Mapping[str, str] | None = None,
        levels: tuple[Level, ...] | None = None,
    ) -> BlockPlan:
        """Plans a block. `weights`: their tiers, if they are known already; `levels`: of KV heads, where these are not all the
        layers of a model."""
        _refuse_batches_that_wait(plan, block)
        _refuse_rows_of_a_pipeline(plan, block)
        plan.refuse_recall(spec, site)
        if plan.policy.echoes:
            block = block.echoed(spec.max_positions)
        levels = plan.levels(spec) if levels is None else levels
        placement = place(spec, plan, block, weights, levels, DEVICE if site.accelerator else HOST)
        kind = SCHEDULES[plan.schedule] if plan.pipeline == 1 else Pipeline
        schedule = kind(traffic(spec, plan, block, placement, site))
        return cls(spec, plan, block, placement, schedule, levels, site.adapters)

    @cached_property
    def sections(self) -> tuple[BlockPlan, ...]:
        """The part of each device of a pipeline; the whole, where there is only one device."""
        lanes = self.schedule.traffic.lanes
        if lanes.devices == 1:
            return (self,)
        return tuple(self._section(layers_of(lanes.device_of, device)) for device in range(lanes.devices))

    def _section(self, layers: tuple[int, ...]) -> BlockPlan:
        """The block as seen by the device that computes these layers. Visits keep their numbers."""
        traffic = self.schedule.traffic
        own = replace(
            traffic,
            weights_on_disk=traffic.weights_on_disk.intersection(layers),
            weights_on_host=traffic.weights_on_host.intersection(layers),
            kv={place: tier for place, tier in traffic.kv.items() if place[0] in layers},
            state={place: tier for place, tier in traffic.state.items() if place[0] in layers},
        )
        spec = only_layers(self.spec, layers)
        return replace(
            self, spec=spec, schedule=replace(self.schedule, traffic=own), levels=self.kv.only(spec, layers.__contains__).levels
        )

    @cached_property
    def placed_percent(self) -> tuple[float, ...]:
        return placed_shares(self.kv, self.placement)

    def spec_at(self, step: int) -> ModelSpec:
        """The model as the rows of a step pass it."""
        return self.spec.of_prompts if self.schedule.traffic.is_of_prompts(step) else self.spec

    @cached_property
    def kv(self) -> HeldKV:
        return HeldKV(self.spec, self.levels, self.block, index_is_copy=self.schedule.traffic.reads_chosen)

    @cached_property
    def states(self) -> Mapping[Place, StateLayout]:
        """How the states of rows lie, by layer and batch."""
        return state_layouts(self.spec, self.block)

    def prompt_places(self, place: Place, layout: KVLayout) -> PromptPlaces:
        """The places of a device for the KV of a batch's prompts in one layer, where the host attends it later. `layout`: of
        one level's heads."""
        if not self.schedule.traffic.passes_parts:
            return PromptPlaces(layout, 1)
        parts = self.block.batches[place[1]].kinds_of_parts(self.plan.prefill_tokens)
        return PromptPlaces(layout.of_rows(max(part.size for part in parts)), min(2, sum(parts.values())))

    def guesses(self, batch: int) -> bool:
        """Whether tokens of a batch are guessed: only where keys and values stay. States of a text that lives on are those
        behind all that was said, with nothing on trial."""
        keeps_states = bool(self.spec.state_layers) and self.block.batches[batch].lives_on
        return self.plan.draft != OFF and not keeps_states and self.schedule.traffic.takes_several(batch)

    @property
    def tried_at_once(self) -> int | None:
        """The most tokens of a row in a pass, its newest included, where more could not be taken back; None: any number."""
        return TRIED_AT_ONCE if self.plan.draft != OFF and self.spec.state_layers else None

    @property
    def guesses_any(self) -> bool:
        return any(map(self.guesses, range(len(self.block.batches))))

    @property
    def reads_prompts_first(self) -> bool:
        """Whether all prompts are read before the first decode step begins."""
        has_order = self.schedule.keeps_step and self.schedule.traffic.lanes.devices == 1
        return has_order and not self.block.is_running

    @property
    def tiers(self) -> tuple[tuple[str, ...], ...]:
        """The tiers of KV, activations and states."""
        return tuple(self.placement.kv.values()), self.placement.hidden, tuple(self.placement.state.values())

    def sharing(self, other: BlockPlan) -> BlockPlan:
        """The same with the other's placement and schedule if they are equal: these take most of the memory of a BlockPlan, and
        prompts of many lengths have thousands."""
        if (self.placement, self.schedule) != (other.placement, other.schedule):
            return self
        return replace(self, placement=other.placement, schedule=other.schedule)

    @property
    def shape(self) -> Shape:
        """The key of blocks that cost the same."""
        return tuple((*batch.lengths, *batch.seen) for batch in self.block.batches)


def _refuse_batches_that_wait(plan: Plan, block: Block) -> None:
    """Refuses to let rows come and go where a batch begins when the one before is over: that would take all rows."""
    if block.is_running and len(block.batches) > 1 and not SCHEDULES[plan.schedule].keeps_step:
        raise ValueError(
            f"schedule={plan.schedule!r} runs one batch after the other, so rows cannot join {len(block.batches)} of them; "
            "give num_gpu_batches=1, or schedule='zigzag'"
        )


def _refuse_rows_of_a_pipeline(plan: Plan, block: Block) -> None:
    """Refuses rows that come and go, and texts that live on: what they hold would have to be known on every device at once."""
    if plan.pipeline > 1 and (block.is_running or any(batch.lives_on or any(batch.seen) for batch in block.batches)):
        what = "rows that come and go" if block.is_running else "a text that continues turn by turn"
        raise ValueError(f"a pipeline of {plan.pipeline} devices is for blocks of prompts, not for {what}; give pipeline=1")


def _refuse_what_rows_have_not(spec: ModelSpec, plan: Plan) -> None:
    """Refuses shares of states where rows have none, and models in which they have nothing else."""
    if plan.state is not None and not spec.state_layers:
        raise ValueError(f"rows of {spec.name} have no state beside their KV; leave state out")
    if spec.state_layers and not spec.kv_layers:
        raise ValueError(f"no layer of {spec.name} has attention, and models of states alone are not run; take another model")


@dataclass(frozen=True)
class BlockPlans:
    """Blocks in the order in which they run. There may be hundreds of thousands, but neighbours of one shape lie alike: they
    are planned once, and each is made when it is asked for."""

    groups: tuple[tuple[BlockPlan, Sequence[int]], ...]  # the first of neighbours of one shape, and the rows of all of them

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        plan: Plan,
        workload: Workload,
        site: Site,
        size: BlockSize | None = None,
        rows: Sequence[int] | None = None,
    ) -> BlockPlans:
        """Divides all rows, or those that are left, into blocks of the plan's size or of another. The model is the whole one,
        and no part of it."""
        _refuse_what_rows_have_not(spec, plan)
        weights, size = place_weights(spec, plan), size or BlockSize(plan.gpu_batch_size, plan.num_gpu_batches)
        made: list[tuple[BlockPlan, Sequence[int]]] = []
        known: dict[object, BlockPlan] = {}
        for block, own in workload.alike_blocks(*size, rows):
            one = BlockPlan.of(spec, plan, block, site, weights)
            made.append((one.sharing(known.setdefault(one.tiers, one)), own))
        return cls(tuple(made))

    def __len__(self) -> int:
        return sum(self._counts)

    def __iter__(self) -> Iterator[BlockPlan]:
        return (self._made(group, number) for group, count in enumerate(self._counts) for number in range(count))

    def __getitem__(self, number: int) -> BlockPlan:
        for group, count in enumerate(self._counts):
            if number < count:
                return self._made(group, number)
            number -= count
        raise IndexError(number)

    def followed_by(self, rest: BlockPlans, place: int) -> BlockPlans:
        """The first `number` of these blocks, and then others."""
        kept = []
        for (first, rows), count in zip(self.groups, self._counts):
            if place > 0:
                kept.append((first, rows[: min(place, count) * first.block.num_rows]))
            place -= count
        return BlockPlans((*kept, *rest.groups))

    @property
    def first(self) -> BlockPlan:
        """The largest block: longest prompts come first."""
        return self.groups[0][0]

    @cached_property
    def alike(self) -> Sequence[tuple[BlockPlan, int]]:
        """One block of each shape, and how many of it there are."""
        counted: dict[Shape, tuple[BlockPlan, int]] = {}
        for (first, _), count in zip(self.groups, self._counts):
            same, before = counted.get(first.shape, (first, 0))
            counted[first.shape] = same, before + count
        return tuple(counted.values())

    @property
    def visits(self) -> int:
        return sum(first.schedule.traffic.visits * count for first, count in self.alike)

    @cached_property
    def _counts(self) -> tuple[int, ...]:
        return tuple(len(rows) // first.block.num_rows for first, rows in self.groups)

    def _made(self, group: int, number: int) -> BlockPlan:
        first, rows = self.groups[group]
        size = first.block.num_rows
        return replace(first, block=first.block.with_rows(rows[number * size : (number + 1) * size]))


# -- buffers ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KVRooms:
    """Bytes of each buffer of a ring; none where nothing comes through it."""

    on_host: int  # on the way from the disk and back, with the numbers of slots that a device has chosen
    on_device: int
    noted: int  # on the device, of what a policy notes of the slots there
    staged: int  # on the host, for single slots that come from a device; there is one of it

    @classmethod
    def of(cls, planned: BlockPlan, layouts: Mapping[Place, KVLayout], score_bytes: int) -> KVRooms:
        """`layouts`: of the level in each layer and batch that it has heads in; `score_bytes`: of what is noted of a slot."""
        traffic = planned.schedule.traffic
        read = [layout for place, layout in layouts.items() if traffic.kv[place] == DISK]
        numbered = (layout.by_row and traffic.accelerator for layout in read)
        sizes = (layout.numbered_bytes if has_numbers else layout.image_bytes for layout, has_numbers in zip(read, numbered))
        on_host = max(map(region_bytes, sizes), default=0)
        moved = {place: layout for place, layout in layouts.items() if traffic.moves_kv(*place)}
        if not (moved and traffic.accelerator):
            return cls(on_host, 0, 0, 0)
        if traffic.attends_on_host:
            places = [planned.prompt_places(place, layout) for place, layout in moved.items()]
            noted = max(each.notes_bytes(score_bytes) for each in places)
            return cls(on_host, max(each.nbytes for each in places), noted, 0)
        on_device = max(region_bytes(layout.image_bytes) for layout in moved.values())
        return cls(on_host, on_device, 0, max(region_bytes(layout.staged_bytes) for layout in moved.values()))


@dataclass(frozen=True)
class StateRooms:
    """Bytes of each buffer of a ring; none where nothing comes through it."""

    on_host: int  # on the way from the disk and back
    on_device: int

    @classmethod
    def of(cls, planned: BlockPlan) -> StateRooms:
        traffic = planned.schedule.traffic
        moved = {place: layout for place, layout in planned.states.items() if traffic.moves_state(*place)}
        read = [region_bytes(layout.nbytes) for place, layout in moved.items() if traffic.state_on_disk(*place)]
        loaded = [region_bytes(layout.nbytes) for layout in moved.values()] if traffic.accelerator else []
        return cls(max(read, default=0), max(loaded, default=0))
