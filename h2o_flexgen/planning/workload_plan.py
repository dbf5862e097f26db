"""WorkloadPlan: a workload under a plan, from its blocks to what they hold; what would fit if that is too much; and room for
the prefixes of requests that are not known yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from math import ceil
from typing import TypeVar

from h2o_flexgen.core.allowed_values import AUTO, Bounds
from h2o_flexgen.core.buffer_layout import PrefixLayout
from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.prefix_groups import ROOM_TOKENS, room_of
from h2o_flexgen.core.site import DEVICE, DISK, HOST, Site, on_tier
from h2o_flexgen.core.units import format_bytes
from h2o_flexgen.core.workload import MOST_TOKENS, Block, BlockSize, Workload
from h2o_flexgen.planning.block_plan import BlockPlan, BlockPlans
from h2o_flexgen.planning.footprint import Footprint, MemoryLimits, footprint
from h2o_flexgen.planning.plan import OFF, Plan, Shares


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number of rows (or of anything that needs memory) that fits; 0 if not even one does. What is asked for at
    most often fits. Otherwise it is halved until it does, and the last interval is bisected."""
    low, high = most, most + 1
    while low and not fits(low):
        low, high = low // 2, low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class WorkloadPlan:
    """A workload under a plan: its blocks, each planned, and what they hold. Report, prediction and run start from this one
    object; it alone decides whether a plan fits."""

    spec: ModelSpec
    plan: Plan
    workload: Workload
    site: Site
    scored_at_once: int = 0  # positions of prompts for which logits are made together

    @cached_property
    def blocks(self) -> BlockPlans:
        return BlockPlans.of(self.spec, self.plan, self.workload, self.site)

    def blocks_of(self, rows: Sequence[int], size: BlockSize) -> BlockPlans:
        """Blocks of the rows that are left after memory ran out in larger blocks."""
        return BlockPlans.of(self.spec, self.plan, self.workload, self.site, size, rows)

    def planned(self, block: Block) -> BlockPlan:
        """Another block under the same plan."""
        return BlockPlan.of(self.spec, self.plan, block, self.site, self.blocks.first.placement.weights)

    @cached_property
    def footprint(self) -> Footprint:
        each = (footprint(block, self.site, self.scored_at_once) for block, _ in self.blocks.alike)
        return reduce(Footprint.__or__, each)

    def fits(self, limits: MemoryLimits) -> bool:
        return limits.first_exceeded(self.footprint) is None

    def refuse_what_does_not_fit(self, limits: MemoryLimits) -> None:
        tier = limits.first_exceeded(self.footprint)
        if tier is None:
            return
        limit = limits.of(tier)
        assert limit is not None
        parts = limits.held(self.footprint, tier).items()
        held = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in parts if nbytes)
        raise DoesNotFit(
            f"plan needs {format_bytes(limits.needs(self.footprint, tier))} {on_tier(tier)} ({held}), "
            f"{self._told_limit(limits, tier)}; {what_would_fit(self, limits)}"
        )

    @staticmethod
    def _told_limit(limits: MemoryLimits, tier: str) -> str:
        limit = format_bytes(limits.of(tier) or 0)
        return f"{limits.folder} has room for {limit}" if tier == DISK and limits.folder else f"the limit is {limit}"


class DoesNotFit(ValueError):
    """An error: the plan needs more than may be held."""


def what_would_fit(asked: WorkloadPlan, limits: MemoryLimits) -> str:
    """The nearest plans that fit: one without graphs, a smaller batch, or less of the weights and KV in memory."""
    found = []
    if asked.plan.graphs == AUTO and replace(asked, plan=replace(asked.plan, graphs=OFF)).fits(limits):
        found.append(f"graphs={OFF!r}")
    if asked.plan.policy.reuses_read and replace(asked, plan=asked.plan.without_reuse()).fits(limits):
        found.append("no kv_recall_reuse")
    for size in _halves(asked.plan.gpu_batch_size):
        plan = replace(asked.plan, gpu_batch_size=size)
        if replace(asked, plan=plan).fits(limits):
            found.append(f"gpu_batch_size {size}")
            break
    if (room := asked.workload.prefix_room) and replace(asked, workload=replace(asked.workload, prefix_room=0)).fits(limits):
        found.append(f"less than {room} tokens of prefix_room")
    tier = limits.first_exceeded(asked.footprint)
    with_less = (plan for kept in (0.75, 0.5, 0.25, 0.1, 0.0) for plan in _with_less(asked.plan, tier, kept))
    for plan in with_less:
        if replace(asked, plan=plan).fits(limits):
            found.append(_shares(plan))
            break
    if not found:
        found = [_smaller_with_less(asked, limits, tier)]
    if tier == DISK and any(found):
        found.append("an offload_dir with more room" if limits.folder else "a larger disk_mem")
    if any(found):
        return "would fit: " + " or ".join(found)
    return f"no smaller batch or share fits: {_lacking(asked, limits, tier or HOST)}"


def _lacking(asked: WorkloadPlan, limits: MemoryLimits, tier: str) -> str:
    """What the smallest of the plans that were tried lacks: on this tier, or else where what left it would go; and what makes
    it smaller than the plan that was asked for."""
    plan, misses = replace(asked.plan, gpu_batch_size=min(_halves(asked.plan.gpu_batch_size), default=1)), []
    for one in (plan, *_with_less(plan, tier, 0.5), *_with_less(plan, tier, 0.0)):
        needed = replace(asked, plan=one).footprint
        least = tier if limits.room(needed, tier) < 0 else limits.first_exceeded(needed) or tier
        need = limits.needs(needed, least)
        misses.append((need - (limits.of(least) or 0), need, least, _smaller_by(one, asked.plan)))
    more, need, least, smaller_by = min(misses)
    larger = more_memory(limits, least, more, need)
    return f"the smallest needs {format_bytes(need)} {on_tier(least)}; {larger}{smaller_by}"


def _smaller_by(plan: Plan, asked: Plan) -> str:
    size = f"gpu_batch_size {plan.gpu_batch_size}" if plan.gpu_batch_size != asked.gpu_batch_size else ""
    options = " and ".join(filter(None, (size, _shares(plan) if plan.percent != asked.percent else "")))
    return f", with {options}" if options else ""


def _shares(plan: Plan) -> str:
    return "percent " + " ".join(f"{value:g}" for value in plan.percent)


MEMORY_OPTIONS = {DEVICE: "gpu_mem", HOST: "cpu_mem", DISK: "disk_mem"}
MB = 10**6
UNLIKE_BYTES = MB  # by which processes differ in what they hold by themselves: 0.12 MB were measured among six


def more_memory(limits: MemoryLimits, tier: str, more: int, need: int) -> str:
    """What to give where a plan that needs so much lacks so many bytes of it."""
    if tier == DISK and limits.folder:
        return f"free {format_bytes(more)} more in {limits.folder}, or give an offload_dir on a larger disk"
    told = enough(need)
    return f"give {format_bytes(more + told - need)} more {on_tier(tier)} ({MEMORY_OPTIONS[tier]}='{told // MB}MB', rounded up)"


def enough(need: int) -> int:
    """The memory to give to a plan that needs so much of it, in whole MB: another process may need some more."""
    return ceil((need + UNLIKE_BYTES) / MB) * MB


def _smaller_with_less(asked: WorkloadPlan, limits: MemoryLimits, tier: str | None) -> str:
    """Both at once, if neither alone is enough; nothing if that is not enough either."""
    for size in _halves(asked.plan.gpu_batch_size) or [1]:
        for kept in (0.5, 0.0):
            for plan in _with_less(replace(asked.plan, gpu_batch_size=size), tier, kept):
                if replace(asked, plan=plan).fits(limits):
                    return f"gpu_batch_size {size} with {_shares(plan)}"
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
    """A plan that leaves only a part of the disk's share there; the rest goes to host memory."""
    return Shares(shares.device, min(1.0 - shares.device, round(shares.host + (1.0 - kept) * shares.disk, 2)))


Made = TypeVar("Made")
SEATS_PER_PREFIX = 8  # for so many seats, room for one prefix as long as the longest prompt is of use
ROOM = Bounds(0, MOST_TOKENS)  # tokens


def room_of_states(spec: ModelSpec, plan: Plan) -> int:
    """The room that the states at the end of a prefix take, in tokens."""
    return PrefixLayout.of(spec, 1, plan.prefix_note_bytes).beside


def prefix_rooms(plan: Plan, prompt_len: int, asked: int | None = None, beside: int = 0) -> list[int]:
    """Tokens for what requests share, in seats for prompts of this length: the first of them that fits is taken. None where
    answers would depend on which other requests have come, unless it is asked for. `beside`: what the states of each prefix
    take of this room.

    Seats come first: where no room is asked for, prefixes get the memory that seats leave, and no plan is refused because they
    get none. Where a room is asked for, they get exactly that, or the plan is refused because it does not fit."""
    if asked is not None:
        return [_checked(plan, asked, beside)]
    rooms, room = list[int](), _of_one(plan, prompt_len, beside) * max(1, plan.block_size // SEATS_PER_PREFIX)
    while room and room >= plan.least_prefix + beside:
        rooms.append(room)
        room = room // 2 // ROOM_TOKENS * ROOM_TOKENS
    return [*rooms, 0]


def rooms_to_search(plan: Plan, prompt_len: int, asked: int | None = None, beside: int = 0) -> list[int]:
    """The rooms, in tokens, that a search tries in the same way: one prefix, or else none."""
    if asked is not None:
        return [_checked(plan, asked, beside)]
    return list(dict.fromkeys((_of_one(plan, prompt_len, beside), 0)))


def first_that_fits(rooms: Sequence[int], make: Callable[[int], Made]) -> Made:
    """The result with the first room for which memory is enough; raises the error of the last if none is."""
    for room in rooms[:-1]:
        with suppress(DoesNotFit):
            return make(room)
    return make(rooms[-1])


def _of_one(plan: Plan, prompt_len: int, beside: int) -> int:
    """Room for one prefix as long as a prompt may have; none where none is shared by itself, or prompts are too short."""
    is_shared = plan.shares_prefixes and not plan.answers_depend_on_prefixes
    return room_of(prompt_len - 1) + beside if is_shared and prompt_len > plan.least_prefix else 0


def _checked(plan: Plan, asked: int, beside: int) -> int:
    room: int = ROOM.value("prefix_room", asked)
    if room and not plan.shares_prefixes:
        why = plan.why_none_are_shared
        raise ValueError(f"prefix_room is {room}, but no prefixes are shared ({why}); leave prefix_room out")
    if 0 < room < (least := plan.least_prefix + beside):
        what = f"takes {least} tokens at least, as its states take room" if beside else f"has {least} tokens at least"
        raise ValueError(f"prefix_room is {room}, and a prefix {what}; give more, or 0")
    return room
