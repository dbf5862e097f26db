"""The linear program: for batches of given sizes, the shares of weights, KV and activations per tier that take the least time.

A step takes at least as long as its busiest lane and as what the lanes share, and all of these are linear in the shares. So
they are known from the corners, where all data of one kind is on one tier; `pricing` itself prices them. What a tier must hold
is linear except for rings of buffers, which are there or not: so it is anchored at an answer and solved again, until the answer
fits as the allocator counts.

All cases of a search are one program: one call of the solver.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from itertools import combinations, product
from math import ceil
from typing import TYPE_CHECKING

from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.site import DEVICE, DISK, HOST, TIERS, Site
from h2o_flexgen.core.workload import Block
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.planning.footprint import READ_BEFORE, WEIGHTS, Footprint, MemoryLimits, footprint
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.placement import HeldKV
from h2o_flexgen.planning.plan import ALL_DEVICE, Plan, Shares
from h2o_flexgen.planning.predict import sampled_steps, sum_of_steps, typical_passes
from h2o_flexgen.planning.pricing import SHARED_DISK, SHARED_MEMORY, Pricing, least_seconds
from h2o_flexgen.planning.seating import Seating

if TYPE_CHECKING:  # functions import it: a plan that is given is run where pulp is not installed
    import pulp

PLACED_FIELDS = (WEIGHTS, "kv", "hidden")
ROUNDS = 3  # rounds of solving, each anchored at the answers before
FURTHER_ROUNDS = 4  # of cases of which the last plan does not fit
LACKING = 1e6  # seconds per whole limit that is missing: far more than anything else can cost
TIE = 1e-5  # share of the seconds that a kind of data costs a tier lower: among equal answers, the one that offloads least wins
# properties of a case that do not depend on buffers
BOUNDS = ("seating", "steps", "weights_of_steps", "base", "more", "read_before")
FOUND = (*BOUNDS, "whole", "footprints")  # and those that do not depend on what stays
PLACES = {DEVICE: Shares(1.0, 0.0), HOST: Shares(0.0, 1.0), DISK: Shares(0.0, 0.0)}
Corner = tuple[str, str]  # kind of data, tier
Bounds = Mapping[str, float]  # lane, or what lanes share -> seconds


@dataclass(frozen=True)
class Case:
    """A question to the program: a plan with shares that are to be found, and a block of its sizes."""

    spec: ModelSpec
    plan: Plan
    block: Block
    machine: Machine
    limits: MemoryLimits
    site: Site
    stays: tuple[str, ...] = ()  # kinds of data that may not leave the fastest tier and so need no buffers

    @property
    def tiers(self) -> tuple[str, ...]:
        return TIERS if self.site.accelerator else (HOST, DISK)

    @property
    def corners(self) -> list[Corner]:
        return [(kind, tier) for kind in PLACED_FIELDS for tier in self.tiers]

    def tiers_of(self, kind: str) -> tuple[str, ...]:
        return tiers_of(kind, self.plan, self.site)

    def with_shares(self, **shares: Shares) -> Plan:
        plan = replace(self.plan, **{"weights": ALL_DEVICE, "kv": ALL_DEVICE, "hidden": ALL_DEVICE, **shares})  # type: ignore[arg-type]
        return plan.at(self.site)

    def planned(self, plan: Plan) -> BlockPlan:
        return BlockPlan.of(self.spec, plan, self.block, self.site)

    def footprint(self, plan: Plan) -> Footprint:
        if plan not in self.footprints:
            self.footprints[plan] = footprint(self.planned(plan), self.site)
        return self.footprints[plan]

    def fits(self, plan: Plan) -> bool:
        return self.limits.first_exceeded(self.footprint(plan)) is None

    @cached_property
    def footprints(self) -> dict[Plan, Footprint]:
        """What is known already: rounds of solving often end at the same plan."""
        return {}

    # -- time ----------------------------------------------------------------------------------------------------------

    @cached_property
    def seating(self) -> Seating | None:
        """The rows that have a seat in each pass, where rows come and go."""
        return Seating.of(self.planned(self.with_shares())) if self.block.is_running else None

    @property
    def tokens(self) -> int:
        """Tokens that are generated in the block."""
        return self.block.num_rows * self.block.gen_len if self.seating is None else self.seating.grown

    @property
    def rows(self) -> int:
        """Rows that come to their end in the block."""
        return self.block.num_rows if self.seating is None else self.seating.rows

    @cached_property
    def steps(self) -> list[int]:
        """The prompts, and the decode steps that represent all of them."""
        if self.seating is not None:
            return [*typical_passes(self.seating)]
        return [0, *sampled_steps(self.planned(self.with_shares()))]

    @cached_property
    def weights_of_steps(self) -> list[float]:
        """How often each of these counts."""
        if self.seating is not None:
            return [*typical_passes(self.seating).values()]
        samples = self.steps[1:]
        units = ([float(one == step) for one in samples] for step in samples)
        return [1.0, *(sum_of_steps(samples, unit) for unit in units)]

    @cached_property
    def base(self) -> list[dict[str, float]]:
        """Bounds of each step with all data on the fastest tier."""
        return self._bounds(self.with_shares())

    @cached_property
    def more(self) -> dict[Corner, list[dict[str, float]]]:
        """What a kind of data adds to these bounds if all of it is on a tier."""
        found: dict[Corner, list[dict[str, float]]] = {}
        for kind, tier in self.corners:
            if tier == self.tiers[0] or tier not in self.tiers_of(kind):
                found[kind, tier] = [{} for _ in self.base]
                continue
            bounds = self._bounds(self.with_shares(**{kind: PLACES[tier]}))
            found[kind, tier] = [
                {name: seconds - before.get(name, 0.0) for name, seconds in after.items()}
                for before, after in zip(self.base, bounds)
            ]
        return found

    def _bounds(self, plan: Plan) -> list[dict[str, float]]:
        """Bounds at a corner: those of the model's first block, and what each other one adds. Those that compute the same, with
        as many heads of each level, add as much."""
        if self.spec.num_blocks < 3:
            return self._bounds_of(plan)
        first = self._bounds_of(plan, 0)
        return _extended(first, [(self._bounds_of(plan, 0, other), count) for other, count in self._other_blocks])

    @cached_property
    def _held(self) -> HeldKV:
        return HeldKV.of(self.spec, self.plan, self.block)

    @cached_property
    def _other_blocks(self) -> Sequence[tuple[int, int]]:
        """One block of each kind among those after the first, and how many are of its kind."""
        return [(numbers[0], len(numbers)) for numbers in self._held.alike_blocks(self.spec.block_numbers[1:])]

    def _bounds_of(self, plan: Plan, *blocks: int) -> list[dict[str, float]]:
        """Bounds of some blocks of the model, or of all."""
        held = self._held
        if blocks:
            held = held.only(self.spec.only_blocks(*blocks), lambda layer: self.spec.layers[layer].block in blocks)
        planned = BlockPlan.of(held.spec, plan, self.block, self.site, levels=held.levels)
        pricing = Pricing(planned, self.machine, True, self.seating)
        return [pricing.bounds(step) for step in self.steps]

    # -- memory --------------------------------------------------------------------------------------------------------

    @cached_property
    def whole(self) -> Footprint:
        """The block with all data on the fastest tier."""
        return self.footprint(self.with_shares())

    @cached_property
    def bytes_of(self) -> Mapping[str, int]:
        """Bytes of each kind of data: what a tier holds for a share of one."""
        compute = self.whole.parts[self.tiers[0]]
        of_states = compute.get("states", 0) if self.plan.state is None else 0  # they lie by the shares of KV
        return {WEIGHTS: compute[WEIGHTS], "kv": compute.get("KV", 0) + of_states, "hidden": compute["activations"]}

    @cached_property
    def read_before(self) -> int:
        """Bytes of host memory for what steps have read of KV, if all of it is on disk."""
        if not self.plan.policy.reuses_read or DISK not in self.tiers_of("kv"):
            return 0
        return self.footprint(self.with_shares(kv=PLACES[DISK])).parts[HOST].get(READ_BEFORE, 0)

    def bytes_on(self, tier: str) -> Mapping[Corner, int]:
        """The bytes that data takes on this tier, of all processes, by where it lies: weights that already lie on disk take no
        room there, and KV on disk takes some in memory, where steps keep what they have read."""
        lies_there = tier == DISK and not self.site.writes_weights
        found = {
            (kind, tier): 0 if lies_there and kind == WEIGHTS else nbytes * self.limits.copies(tier, kind)
            for kind, nbytes in self.bytes_of.items()
        }
        return {**found, ("kv", DISK): self.read_before * self.limits.copies(HOST, READ_BEFORE)} if tier == HOST else found

    def has_room_for(self, stays: tuple[str, ...]) -> bool:
        """Whether the fastest tier can hold these kinds of data whole, if it holds nothing else."""
        fastest = self.tiers[0]
        limit, nbytes = self.limits.of(fastest), self.bytes_on(fastest)
        return limit is None or sum(nbytes[kind, fastest] for kind in (*self.stays, *stays)) <= limit

    def anchored(self, plan: Plan, exact: Footprint) -> dict[str, float]:
        """What each tier holds beside the shares of the data, exact under this plan and a good guess near it."""
        return {
            tier: self.limits.needs(exact, tier)
            - sum(getattr(plan, kind).of(place) * nbytes for (kind, place), nbytes in self.bytes_on(tier).items())
            for tier in self.tiers
        }


@dataclass(frozen=True)
class BestShares:
    """Shares in whole per cent that fit, and the least seconds that a block takes with them."""

    case: Case
    plan: Plan
    seconds: float
    is_thorough: bool = False  # solved with every choice of kinds of data that stay


def _extended(one: Sequence[Bounds], others: Sequence[tuple[Sequence[Bounds], int]]) -> list[dict[str, float]]:
    """The value for many, extended from the value for one. `others`: the value with one more of a kind beside it, and how many
    more there are of this kind."""
    extended = [dict(low) for low in one]
    for two, count in others:
        for total, low, high in zip(extended, one, two, strict=True):
            for name, seconds in high.items():
                total[name] = total.get(name, 0.0) + count * (seconds - low.get(name, 0.0))
    return extended


def solve_thoroughly(cases: Sequence[Case]) -> list[BestShares]:
    """Solves each case with every choice of kinds of data that stay on the fastest tier, because no linear function says
    whether buffers are there. It takes up to eight times as long."""
    choices = [stay for count in range(len(PLACED_FIELDS) + 1) for stay in combinations(PLACED_FIELDS, count)]
    rooms = [(case, stays, number) for number, case in enumerate(cases) for stays in choices if case.has_room_for(stays)]
    staying = [(_staying(case, stays), number) for case, stays, number in rooms]
    numbers = {id(case): number for case, number in staying}
    best: dict[int, BestShares] = {}
    for answer in solve([case for case, _ in staying]):
        number = numbers[id(answer.case)]
        if number not in best or order(answer) < order(best[number]):
            best[number] = replace(answer, case=cases[number], is_thorough=True)
    return [best[number] for number in sorted(best)]


def _staying(case: Case, stays: tuple[str, ...]) -> Case:
    """The case with these kinds of data staying, too, keeping what was already found of it."""
    other = replace(case, stays=(*case.stays, *stays))
    vars(other).update({name: found for name, found in vars(case).items() if name in FOUND})
    return other


def with_buffers(case: Case, buffers: int) -> Case:
    """The case with so many buffers, two at least, keeping its bounds: they are those of lanes that are never kept waiting."""
    other = replace(case, plan=replace(case.plan, buffers=buffers))
    vars(other).update({name: found for name, found in vars(case).items() if name in BOUNDS})
    return other


def solve(cases: Sequence[Case]) -> list[BestShares]:
    """The best answer for each case that has one."""
    best: dict[int, BestShares] = {}
    anchors = [_first_anchor(case) for case in cases]
    left, known, again = list(range(len(cases))), dict[int, Plan](), set[int]()
    for place in range(ROUNDS + FURTHER_ROUNDS):
        if not left:
            break
        plans = dict(zip(left, _solve_once([cases[number] for number in left], [anchors[number] for number in left])))
        left = []
        for number, plan in plans.items():
            case, is_known, anchor = cases[number], known.get(number) == plan, plan
            known[number] = plan
            if _take(best, number, case, plan):
                if is_known or place >= ROUNDS - 1:
                    continue  # it would have this again, or has had its rounds
            elif is_known or (place >= ROUNDS and number not in best):
                least = None if number in again else _first_offloaded(case)
                again.add(number)
                if least is None and is_known:
                    continue
                anchor = least or plan
                _take(best, number, case, anchor)
            anchors[number] = case.anchored(anchor, case.footprint(anchor))
            left.append(number)
    for number, case in enumerate(cases):  # a careful anchor must not offload what fits whole
        _take(best, number, case, case.with_shares())
    return [best[number] for number in sorted(best)]


def _take(best: dict[int, BestShares], number: int, case: Case, plan: Plan) -> bool:
    """Keeps a plan that fits, if it is better than the best so far, and says whether it fits."""
    if not case.fits(plan):
        return False
    answer = BestShares(case, plan, seconds_at(case, plan))
    if number not in best or order(answer) < order(best[number]):
        best[number] = answer
    return True


def _first_offloaded(case: Case) -> Plan | None:
    """A plan that fits, to begin again from where no round finds one: rings of buffers and large tensors are there or not."""
    staying = dict.fromkeys(case.stays, PLACES[case.tiers[0]])
    plans = (replace(plan, **staying) for plan in offloaded(case.spec, case.plan, case.site))  # type: ignore[arg-type]
    return next(filter(case.fits, plans), None)


def tiers_of(kind: str, plan: Plan, site: Site) -> tuple[str, ...]:
    """The tiers of a site on which data of a kind may lie under a plan."""
    there, allowed = TIERS if site.accelerator else (HOST, DISK), plan.tiers_of_kv(site) if kind == "kv" else TIERS
    return tuple(tier for tier in there if tier in allowed)


def offloaded(spec: ModelSpec, plan: Plan, site: Site) -> Iterator[Plan]:
    """The plan with everything on the slowest tier, as far as it may lie there. Then with more and more a tier above: rings of
    buffers take room too, and a disk may be full. Weights are the last, and the largest tensors of them come before all."""
    places = {kind: [PLACES[tier] for tier in reversed(tiers_of(kind, plan, site)[-2:])] for kind in PLACED_FIELDS}
    large = sum(spec.weight_sizes[name] for name in spec.outsized) / sum(spec.weight_sizes.values())
    weights = dict.fromkeys((places[WEIGHTS][0], Shares(0.0, ceil(100 * large) / 100), places[WEIGHTS][-1]))
    for of_weights, kv, hidden in product(weights, places["kv"], places["hidden"]):
        yield replace(plan, weights=of_weights, kv=kv, hidden=hidden)


def order(answer: BestShares) -> tuple[float, float]:
    """The fastest answer is the best, and of equal ones the one that offloads least: simulated, fewer transfers wait less."""
    shares = (getattr(answer.plan, kind) for kind in PLACED_FIELDS)
    return answer.seconds, sum(place * one.of(tier) for one in shares for place, tier in enumerate(answer.case.tiers))


def _first_anchor(case: Case) -> dict[str, float]:
    """The first anchor: a plan with some of everything on every tier."""
    even = {kind: dict.fromkeys(own := case.tiers_of(kind), 1 / len(own)) for kind in PLACED_FIELDS if kind not in case.stays}
    plan = case.with_shares(**{kind: Shares(own.get(DEVICE, 0.0), own.get(HOST, 0.0)) for kind, own in even.items()})
    return case.anchored(plan, case.footprint(plan))


def seconds_at(case: Case, plan: Plan) -> float:
    """Seconds of a plan by the program: for each step the largest of its bounds, or their sum where nothing overlaps."""
    total = 0.0
    for number, weight in enumerate(case.weights_of_steps):
        bounds = dict(case.base[number])
        for kind, tier in case.corners:
            share = getattr(plan, kind).of(tier)
            for name, seconds in case.more[kind, tier][number].items():
                bounds[name] = bounds.get(name, 0.0) + share * seconds
        total += weight * least_seconds(bounds, case.plan.buffers)
    return total


# -- the program -----------------------------------------------------------------------------------------------------------


def _solve_once(cases: Sequence[Case], anchors: Sequence[Mapping[str, float]]) -> list[Plan]:
    """Solves all cases as one program. They are independent, so the sum of their times is least where each is."""
    if not find_spec("pulp"):
        raise ValueError("pulp, which solves the search for a plan, is not installed; install it, or give a plan (--percent)")
    with warnings.catch_warnings():  # pulp warns of version 4, which has another interface
        warnings.simplefilter("ignore", DeprecationWarning)
        return _solved(cases, anchors)


def _solved(cases: Sequence[Case], anchors: Sequence[Mapping[str, float]]) -> list[Plan]:
    import pulp

    program = pulp.LpProblem("placement", pulp.LpMinimize)
    shares, goals = [], []
    for number, (case, anchor) in enumerate(zip(cases, anchors)):
        own, goal, constraints = _case(str(number), case, anchor)
        shares.append(own)
        goals.append(goal)
        for constraint in constraints:
            program += constraint
    program += pulp.lpSum(goals)
    status = program.solve(pulp.PULP_CBC_CMD(msg=False, threads=1))
    assert pulp.LpStatus[status] == "Optimal", pulp.LpStatus[status]  # lacking memory can always be bought
    return [_plan(case, {corner: share.value() for corner, share in own.items()}) for case, own in zip(cases, shares)]


def _case(
    name: str, case: Case, anchor: Mapping[str, float]
) -> tuple[dict[Corner, pulp.LpVariable], pulp.LpAffineExpression, list[pulp.LpConstraint]]:
    import pulp

    allowed = {kind: case.tiers[:1] if kind in case.stays else case.tiers_of(kind) for kind in PLACED_FIELDS}
    shares = {
        (kind, tier): pulp.LpVariable(f"{kind}_{tier}_{name}", 0, int(tier in allowed[kind])) for kind, tier in case.corners
    }
    constraints = [pulp.lpSum(shares[kind, tier] for tier in case.tiers) == 1 for kind in PLACED_FIELDS]
    seconds = [pulp.LpVariable(f"step{number}_{name}", 0) for number in range(len(case.steps))]
    for number, step in enumerate(seconds):
        constraints += [_at_least(step, bound) for bound in _step_bounds(case, shares, number)]
    lacking = {tier: pulp.LpVariable(f"lacking_{tier}_{name}", 0) for tier in case.tiers}
    for tier in case.tiers:
        limit = case.limits.of(tier)
        if limit is not None:  # in shares of the limit, so that coefficients are near 1; a full disk has none
            unit = limit or sum(case.bytes_of.values())
            held = pulp.lpSum(shares[corner] * (nbytes / unit) for corner, nbytes in case.bytes_on(tier).items())
            constraints.append(held + anchor[tier] / unit <= limit / unit + lacking[tier])
    total = pulp.lpSum(weight * step for weight, step in zip(case.weights_of_steps, seconds))
    scale = TIE * sum(weight * max(bounds.values()) for weight, bounds in zip(case.weights_of_steps, case.base))
    lower = pulp.lpSum(place * shares[kind, tier] for kind in PLACED_FIELDS for place, tier in enumerate(case.tiers))
    return shares, total + scale * lower + LACKING * pulp.lpSum(lacking.values()), constraints


@dataclass(frozen=True)
class StepBound:
    """Seconds that a step takes at least: those with all data on the fastest tier, and those that each share adds."""

    seconds: float
    added: Mapping[pulp.LpVariable, float]


def _at_least(step: pulp.LpVariable, bound: StepBound) -> pulp.LpConstraint:
    """Made of one mapping: sums and products of pulp's own are what building a program takes longest for."""
    import pulp

    terms = {step: 1.0} | {share: -seconds for share, seconds in bound.added.items()}
    return pulp.LpConstraint(pulp.LpAffineExpression(terms, constant=-bound.seconds), pulp.LpConstraintGE)


def _step_bounds(case: Case, shares: Mapping[Corner, pulp.LpVariable], number: int) -> Iterator[StepBound]:
    base, more = case.base[number], {corner: case.more[corner][number] for corner in case.corners}
    names = dict.fromkeys([*base, *(name for added in more.values() for name in added)])
    for name in names:
        yield StepBound(base.get(name, 0.0), {shares[corner]: added[name] for corner, added in more.items() if added.get(name)})
    if case.plan.buffers == 1:
        alone = [name for name in names if name not in (SHARED_DISK, SHARED_MEMORY)]
        sums = {shares[corner]: sum(added.get(name, 0.0) for name in alone) for corner, added in more.items()}
        yield StepBound(
            sum(base.get(name, 0.0) for name in alone), {share: seconds for share, seconds in sums.items() if seconds}
        )


def _plan(case: Case, values: Mapping[Corner, float | None]) -> Plan:
    """The plan in whole per cent, as --percent takes them; the rest after rounding goes to the slowest tier that has some."""

    def shares(kind: str) -> Shares:
        device, host, disk = (100 * (values.get((kind, tier)) or 0.0) for tier in TIERS)
        on_device = int(device + 1e-6)
        on_host = 100 - on_device if disk < 1e-6 else min(int(host + 1e-6), 100 - on_device)
        return Shares(on_device / 100, on_host / 100)

    return case.with_shares(**{kind: shares(kind) for kind in PLACED_FIELDS})
