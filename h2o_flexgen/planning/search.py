"""Search: the best plan for a workload on a machine, within limits.

The linear program finds the shares for every allowed size of batches and blocks and every allowed codec; the most promising
plans are simulated with real tensors, and the best of these wins. KV budgets, codecs and inexact products, which change
quality, are searched only if the caller allows it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import log2

from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.site import DEVICE, DISK, Site, on_tier
from h2o_flexgen.core.units import format_bytes, format_seconds
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.formats.kernel_table import EXACT
from h2o_flexgen.planning.footprint import MemoryLimits
from h2o_flexgen.planning.linear_program import (
    BestShares,
    Case,
    offloaded,
    order,
    seconds_at,
    solve,
    solve_thoroughly,
    with_buffers,
)
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.plan import ALL_DEVICE, LEAST_PLACED, Plan
from h2o_flexgen.planning.predict import Prediction, predict
from h2o_flexgen.planning.workload_plan import DoesNotFit, WorkloadPlan, enough, largest, more_memory
from h2o_flexgen.policies.recall import ALL

THROUGHPUT, LATENCY = "throughput", "latency"
PREFERENCES = (THROUGHPUT, LATENCY)
SIZES = tuple(sorted({factor * 2**power for power in range(11) for factor in (1, 3)}))  # sizes of batches: 1 2 3 4 6 8 12 ...
BETWEEN = frozenset(3 * 2**power for power in range(11))  # sizes and numbers of batches tried only near good neighbours
MOST_ROWS = 1024  # rows of a batch
NUMBERS_OF_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16)  # batches of a block
MOST_MEASURED, TURNS = 2048, 8  # rows of a job that plans are measured by, and turns at least that each seat has among them
SIMULATED, ON_FRONT = 5, 4  # plans that are simulated: the best by the program; further ones for the front
SIMULATED_AT_MOST = 10  # the limit if simulations fall behind what the program promises of others
REFINED = 6  # good answers on the grid for which the neighbours are tried
HOPELESS = 0.5  # share of the soonest block's seconds below which no plan keeps a latency limit
LATENCY_MARGINS = (1.0, 0.95, 0.85, 0.7, 0.5)  # shares of a latency limit within which the program must promise to end
LARGER_PARTS = 16  # times as large as others, parts of prompts may be for the sake of experts, or of an accelerator
BUFFERS = (3, 4, 6, 8)  # numbers of buffers that are tried, one after the other, where none is given
WITH_BUFFERS = 4  # plans, the best that were simulated, that are tried with as many buffers as the best has
WORTH_BUFFERS = 0.005  # share of the speed that more buffers must promise; they bring more, and take memory
NEAR = 0.05  # plans this near to each other are equal: then the one that ends its block sooner wins


@dataclass(frozen=True)
class SearchProblem:
    """The question to a search. `plan` has what is not searched: schedule, KV policy and its budget, buffers, codecs."""

    model: Callable[[Plan], ModelSpec]  # its sizes under a plan: codecs, and layers apart or together, change them
    workload: Workload | None  # all prompts; None: as many as a block has room for
    prompt_len: int
    gen_len: int
    plan: Plan
    machine: Machine
    limits: MemoryLimits
    site: Site
    codecs: tuple[tuple[str, str], ...] = ()  # codecs of weights and KV that may replace the plan's
    computes: tuple[str, ...] = ()  # products that may replace the plan's where weights are packed
    recalls: tuple[float, ...] = ()  # shares of what is kept that decode steps may attend instead of the plan's
    buffers: tuple[int, ...] = ()  # numbers of buffers that may replace the plan's
    attend_on: tuple[str, ...] = (DEVICE,)
    batch_sizes: tuple[int, ...] = ()  # the only sizes to choose from; empty: all
    batches: tuple[int, ...] = ()
    latency_limit: float | None = None  # seconds from the first prompt of a block to its last token
    prefer: str = THROUGHPUT
    with_front: bool = True  # plans that are faster or larger than the best are simulated, too

    @property
    def accelerator(self) -> bool:
        return self.site.accelerator

    def prompts(self, plan: Plan) -> Workload:
        """The prompts that a plan is measured by."""
        return self.workload or Workload.uniform(plan.block_size, self.prompt_len, self.gen_len)

    def first_block(self, plan: Plan) -> Workload:
        """The prompts of the first block, which has the longest. Where rows come and go, there is one block."""
        if self.workload is None or self.workload.gen_lens is not None:
            return self.prompts(plan)
        longest = sorted(self.workload.prompt_lens, reverse=True)[: plan.block_size]
        return replace(self.workload, prompt_lens=tuple(longest))

    def measured(self, plan: Plan) -> Workload:
        """The first block; of a long job in which rows come and go, as many rows as show how long it takes."""
        return self.first_block(plan).thinned(max(MOST_MEASURED, TURNS * plan.block_size))

    def planned(self, plan: Plan, workload: Workload) -> WorkloadPlan:
        return WorkloadPlan(self.model(plan), plan, workload, self.site)

    def can_compute(self, compute: str, weight_codec: str) -> bool:
        """Whether the model's weights in this codec can be multiplied so."""
        return self.model(replace(self.plan, compute=EXACT, weight_codec=weight_codec)).can_compute(compute)

    def largest(self, plan: Plan) -> WorkloadPlan:
        """The block that needs most."""
        return self.planned(plan, self.first_block(plan))

    def fits(self, plan: Plan) -> bool:
        return self.largest(plan).fits(self.limits)

    def predict(self, plan: Plan) -> Prediction:
        rows = self.prompts(plan)
        return predict(self.planned(plan, rows if rows.gen_lens is None else self.measured(plan)), self.machine)


@dataclass(frozen=True)
class Candidate:
    """A plan, and what to expect of it."""

    plan: Plan
    prediction: Prediction

    @property
    def tokens_per_second(self) -> float:
        return self.prediction.tokens_per_second

    @property
    def block_seconds(self) -> float:
        """The latency of a block."""
        return self.prediction.block_seconds


@dataclass(frozen=True)
class SearchResult:
    best: Candidate
    runners_up: tuple[Candidate, ...]
    front: tuple[Candidate, ...]  # fastest block first: none has both more tokens per second and less latency than another
    cases: int  # cases that the program has solved
    equals: int = 0  # so many runners-up, the first ones, counted as equal to the best
    unlike: Candidate | None = None  # where a search may have steps choose what they attend: the best of those that do, or not

    @property
    def all(self) -> tuple[Candidate, ...]:
        return (self.best, *self.runners_up)


class NoPlan(DoesNotFit):
    """No plan fits, or none is fast enough."""


def search(problem: SearchProblem) -> SearchResult:
    with _uncollected():
        return _search(problem)


@contextmanager
def _uncollected() -> Iterator[None]:
    """A context without garbage collection: looking for cycles in millions of small tuples took four tenths of a simulation."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _search(problem: SearchProblem) -> SearchResult:
    _refuse_what_nothing_reaches(problem)
    answers, cases = _answers(problem)
    if not answers:
        raise NoPlan(nearest_miss(problem))
    tried = _tried(problem, answers)
    best, near, in_time = tried.chosen.candidate, tried.near, [trial.candidate for trial in tried.in_time]
    return SearchResult(
        best=best,
        runners_up=tuple(one for one in in_time if one is not best)[: SIMULATED - 1],
        front=_front(trial.candidate for trial in tried.best_of.values()),
        cases=cases,
        equals=min(len(near), SIMULATED) - 1,
        unlike=next((one for one in in_time if one.plan.policy.recall != best.plan.policy.recall), None),
    )


def _refuse_what_nothing_reaches(problem: SearchProblem) -> None:
    """Refuses a latency that no plan can have, before any is searched."""
    if problem.latency_limit is None:
        return
    least = min(map(partial(_soonest_seconds, problem), _bases(problem)))
    if problem.latency_limit < HOPELESS * least:
        raise NoPlan(
            f"no plan ends a block within {problem.latency_limit:g} s: even one row, with everything in the fastest memory, "
            f"needs about {format_seconds(least)}; give more time or fewer tokens"
        )


def _soonest_seconds(problem: SearchProblem, base: Plan) -> float:
    """Seconds of a block of one row that moves nothing, whether it fits or not: hardly any block can end sooner."""
    plan = replace(base, gpu_batch_size=1, num_gpu_batches=1, weights=ALL_DEVICE, kv=ALL_DEVICE, hidden=ALL_DEVICE)
    plan = plan.at(problem.site)
    return predict(problem.largest(plan), problem.machine).block_seconds


# -- what is simulated -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """A plan that was simulated, and the program's answer that it is. No lane waits in what the program promises, so no number
    of buffers makes these shares faster than that."""

    answer: BestShares
    candidate: Candidate


@dataclass(frozen=True)
class TriedPlans:
    """All that was simulated: of each block the best plan."""

    problem: SearchProblem
    best_of: dict[Plan, Trial] = field(default_factory=dict)
    numbers_tried: set[tuple[Plan, int]] = field(default_factory=set)  # numbers of buffers for blocks
    refined: set[Plan] = field(default_factory=set)  # blocks of which more buffers were tried, one number after the other

    @property
    def in_time(self) -> list[Trial]:
        """The best first."""
        limit = self.problem.latency_limit
        found = [one for one in self.best_of.values() if limit is None or one.candidate.block_seconds <= limit]
        return sorted(found, key=lambda trial: _order(self.problem, trial.candidate))

    @property
    def near(self) -> list[Trial]:
        """Those that count as equal to the best."""
        found = self.in_time
        first = _order(self.problem, found[0].candidate)[0]
        return [one for one in found if abs(_order(self.problem, one.candidate)[0] - first) <= NEAR * abs(first)]

    @property
    def chosen(self) -> Trial:
        near = self.near
        as_asked = [one for one in near if one.candidate.plan.policy.recall == self.problem.plan.policy.recall]
        near = as_asked or near  # what changes texts has to bring more than nothing
        if self.problem.prefer == LATENCY:  # among plans that end about as soon, the one that does most meanwhile
            return max(near, key=lambda one: one.candidate.tokens_per_second)
        return min(near, key=lambda one: (one.candidate.block_seconds, _order(self.problem, one.candidate)))

    def could_be_better(self, answer: BestShares, than: Trial | None) -> bool:
        """Whether an answer promises more than another has been seen to do: it never promises less than can be had."""
        return than is None or _promise(self.problem, answer) < _order(self.problem, than.candidate)[0]

    def simulated(self, answer: BestShares, thoroughly: bool = True) -> Trial:
        block = _block_of(self.problem, answer.plan)
        if block not in self.best_of:
            if thoroughly and not answer.is_thorough:
                better = (one for one in solve_thoroughly([answer.case]) if not _keeps_nothing(self.problem, one.plan))
                answer = next(map(partial(_faster, answer), better), answer)
            self.best_of[block] = self._trial(_in_larger_parts(self.problem, answer))
        return self.best_of[block]

    def _trial(self, answer: BestShares) -> Trial:
        return Trial(answer, Candidate(answer.plan, self.problem.predict(answer.plan)))

    def refine(self, trial: Trial) -> Trial:
        """The same block with more visits under way at once, as long as that is worth it: a disk that has read the few experts
        of a slice may otherwise wait for an attention to end. One that has got many at once may be faster with fewer."""
        self.refined.add(_block_of(self.problem, trial.answer.plan))
        numbers, now = self.problem.buffers, trial.answer.plan.buffers
        for some in (filter(now.__lt__, numbers), filter(now.__gt__, reversed(numbers))):
            for buffers in some:
                if (other := self.with_buffers(trial, buffers)) is trial:
                    break
                trial = other
        return trial

    def with_buffers(self, trial: Trial, buffers: int, than: Trial | None = None) -> Trial:
        """The same block with so many buffers, if it is faster with these. Buffers take memory, so shares are found anew. The
        program does not model waiting: what it promises is the most that buffers can bring. Where little is missing of that,
        or where it is not better than another that is known, none are tried."""
        before, block = trial.candidate, _block_of(self.problem, trial.answer.plan)
        if (block, buffers) in self.numbers_tried or before.block_seconds <= (1 + WORTH_BUFFERS) * trial.answer.seconds:
            return trial
        answer = next(iter(solve_thoroughly([with_buffers(trial.answer.case, buffers)])), None)
        if answer is not None and not self.could_be_better(answer, than):
            return trial  # the number is not noted: by itself, the block may still be faster with it
        self.numbers_tried.add((block, buffers))
        if answer is None or _keeps_nothing(self.problem, answer.plan) or not self.problem.fits(answer.plan):
            return trial
        other = self._trial(answer)
        was, now = (_order(self.problem, one)[0] for one in (before, other.candidate))
        if was - now < WORTH_BUFFERS * abs(was) or other.candidate.block_seconds > before.block_seconds:
            return trial
        self.best_of[block] = other
        return other


def _block_of(problem: SearchProblem, plan: Plan) -> Plan:
    """What tells blocks apart: sizes, codecs and all else that is searched, without shares, buffers and parts of prompts."""
    whole = {"weights": ALL_DEVICE, "kv": ALL_DEVICE, "hidden": ALL_DEVICE}
    return replace(plan, **whole, buffers=problem.plan.buffers, prefill_tokens=problem.plan.prefill_tokens)  # type: ignore[arg-type]


def _tried(problem: SearchProblem, answers: Sequence[BestShares]) -> TriedPlans:
    """The most promising plans and those of the front, simulated. A simulation takes longer than the program says: if none of
    them ends in time, plans that promise to end sooner are next."""
    ranked = sorted(answers, key=lambda answer: _rank(problem, answer))
    limit, tried = problem.latency_limit, TriedPlans(problem)
    for part in LATENCY_MARGINS:
        in_time = [answer for answer in ranked if limit is None or answer.seconds <= part * limit]
        if not in_time:
            break
        chosen = _promising(problem, in_time)
        _try(tried, chosen, in_time[:SIMULATED_AT_MOST])
        if tried.in_time:
            for answer in _front_answers(problem, answers, chosen) if problem.with_front else ():
                tried.simulated(answer, thoroughly=False)
            _settle(tried)
            return tried
    soonest = tried.refine(tried.simulated(min(answers, key=lambda answer: answer.seconds)))
    if limit is not None and soonest.candidate.block_seconds <= limit:
        return tried
    raise NoPlan(
        f"no plan ends a block within {limit:g} s; the fastest needs {format_seconds(soonest.candidate.block_seconds)}: "
        "give more time, fewer tokens, or more memory"
    )


def _try(tried: TriedPlans, chosen: Sequence[BestShares], further: Sequence[BestShares]) -> None:
    """Simulates what is chosen, tries more buffers for the best of it, and simulates further ones that may still be better.
    Of all these, a few that may still be better than the best are tried with as many buffers as that has."""
    for answer in chosen:
        tried.simulated(answer)
    best = next(map(tried.refine, tried.in_time), None)
    for answer in further:
        if tried.could_be_better(answer, best):
            tried.simulated(answer)
    for trial in tried.in_time[:WITH_BUFFERS] if tried.problem.buffers else ():
        best = tried.in_time[0]
        buffers = max(best.answer.plan.buffers, tried.problem.buffers[0])
        if trial.answer.plan.buffers < buffers and tried.could_be_better(trial.answer, best):
            tried.with_buffers(trial, buffers, best)


def _settle(tried: TriedPlans) -> None:
    """Tries more buffers for the plan that is chosen, until one is chosen for which they were tried."""
    while _block_of(tried.problem, tried.chosen.answer.plan) not in tried.refined:
        tried.refine(tried.chosen)


# -- what is tried ---------------------------------------------------------------------------------------------------------


def _answers(problem: SearchProblem) -> tuple[list[BestShares], int]:
    """The program's answers for a grid of sizes, then for all sizes near the best of these; and the number of cases."""
    cases = list(_cases(problem))
    grid = [case for case in cases if problem.batch_sizes or _is_on_grid(case)]
    answers, asked = solve(grid) if grid else [], len(grid)
    best = sorted(answers, key=lambda answer: _rank(problem, answer))[:REFINED]
    met = set(map(id, grid))
    finer = [case for case in cases if id(case) not in met and (not best or any(_is_near(case, one.case) for one in best))]
    if finer:
        answers, asked = [*answers, *solve(finer)], asked + len(finer)
    best = sorted(answers, key=lambda answer: _rank(problem, answer))[:REFINED]
    better = {id(one.case): one for one in solve_thoroughly([answer.case for answer in best])}
    answers = [_faster(answer, better.get(id(answer.case), answer)) for answer in answers]
    return [answer for answer in answers if not _keeps_nothing(problem, answer.plan)], asked


def _faster(one: BestShares, other: BestShares) -> BestShares:
    return other if order(other) < order(one) else one


def _cases(problem: SearchProblem) -> Iterator[Case]:
    for base in _bases(problem):
        spec = problem.model(base)
        for size, batches in _blocks(problem, base):
            yield _case(problem, spec, replace(base, gpu_batch_size=size, num_gpu_batches=batches))


def _case(problem: SearchProblem, spec: ModelSpec, plan: Plan) -> Case:
    block = problem.measured(plan).blocks(plan.gpu_batch_size, plan.num_gpu_batches)[0]
    return Case(spec, plan, block, problem.machine, problem.limits, problem.site)


def _is_on_grid(case: Case) -> bool:
    """Whether a size is a power of two, or one that the workload or the memory asks for."""
    size, batches = case.plan.gpu_batch_size, case.plan.num_gpu_batches
    return size not in BETWEEN and batches not in BETWEEN


def _is_near(case: Case, other: Case) -> bool:
    """Whether a size lies between its neighbours on the grid, and all else is the same."""
    size, batches = other.plan.gpu_batch_size, other.plan.num_gpu_batches
    if replace(case.plan, gpu_batch_size=size, num_gpu_batches=batches) != other.plan:
        return False
    pairs = ((case.plan.gpu_batch_size, size), (case.plan.num_gpu_batches, batches))
    return all(its < 2 * mine and mine < 2 * its for mine, its in pairs)


def _bases(problem: SearchProblem) -> Iterator[Plan]:
    codecs = dict.fromkeys(((problem.plan.weight_codec, problem.plan.kv_codec), *problem.codecs))
    computes = dict.fromkeys((problem.plan.compute, *problem.computes))  # of equally fast ones the plan's own wins
    attended = problem.attend_on if problem.accelerator else (DEVICE,)
    for (weights, kv), compute, attend_on in product(codecs, computes, attended):
        if problem.can_compute(compute, weights):
            base = replace(problem.plan, weight_codec=weights, kv_codec=kv, compute=compute, attend_on=attend_on)
            yield base
            for share in problem.recalls:
                if not why_not_to_recall(problem, base, share):
                    yield from _recalling(problem, base, share)


def _recalling(problem: SearchProblem, base: Plan, share: float) -> Iterator[Plan]:
    """The plan with decode steps that attend a share. What was read may stay in memory where KV may lie on disk and all of it
    is kept: that changes no token."""
    plan = base.recalling(share, base.kv_options.kv_recall_reuse)
    yield from () if plan == base else (plan,)
    reusing = base.recalling(share, reuse=True)
    if plan.policy.keeps_all and not plan.policy.reuses_read and DISK in reusing.tiers_of_kv(problem.site):
        yield reusing


def why_not_to_recall(problem: SearchProblem, base: Plan, share: float) -> str:
    """Why decode steps cannot attend a share; nothing where they can."""
    try:
        plan = base.recalling(share)
        plan.refuse_recall(problem.model(plan), problem.site)
    except ValueError as refused:
        return str(refused).partition(";")[0]
    return ""


def _keeps_nothing(problem: SearchProblem, plan: Plan) -> bool:
    """Whether what was read would stay in memory without being asked for, and nothing is read: the same plan without is another
    answer."""
    return plan.policy.reuses_read and not problem.plan.policy.reuses_read and plan.kv.disk <= LEAST_PLACED


def _blocks(problem: SearchProblem, base: Plan) -> Iterator[tuple[int, int]]:
    """Sizes that fit with as much as possible on the slowest tier: with more on faster tiers nothing more fits."""
    prompts = problem.workload.num_prompts if problem.workload else None
    reach = MOST_ROWS
    for batches in sorted(problem.batches or NUMBERS_OF_BATCHES):
        most = min(MOST_ROWS, reach + -(-reach // 8))  # with more batches hardly any larger ones fit
        most = most if prompts is None else min(most, -(-prompts // batches))
        if not problem.batches and prompts is not None and any(prompts <= fewer < batches for fewer in NUMBERS_OF_BATCHES):
            continue  # too few prompts for this size

        def fits(size: int, batches: int = batches) -> bool:
            plan = replace(base, gpu_batch_size=size, num_gpu_batches=batches)
            return any(map(problem.fits, _offloaded(problem, plan)))

        if problem.batch_sizes:  # a chosen size may exceed the number of prompts
            yield from ((size, batches) for size in problem.batch_sizes if fits(size))
            continue
        reach = largest(fits, most)
        if not reach:
            return
        yield from ((size, batches) for size in sorted({size for size in (*SIZES, reach) if size <= reach}))


def _offloaded(problem: SearchProblem, plan: Plan) -> Iterator[Plan]:
    return offloaded(problem.model(plan), plan, problem.site)


# -- which is best ---------------------------------------------------------------------------------------------------------


def _rank(problem: SearchProblem, answer: BestShares) -> tuple[float, float]:
    """The order of candidates; less is better."""
    for_a_row = answer.seconds / answer.case.rows
    return (answer.seconds, for_a_row) if problem.prefer == LATENCY else (for_a_row, answer.seconds)


def _order(problem: SearchProblem, candidate: Candidate) -> tuple[float, float]:
    rate, latency = -candidate.tokens_per_second, candidate.block_seconds
    return (latency, rate) if problem.prefer == LATENCY else (rate, latency)


def _promise(problem: SearchProblem, answer: BestShares) -> float:
    """The program's promise, in the terms that candidates are ordered by."""
    if problem.prefer == LATENCY:
        return answer.seconds
    return -answer.case.tokens / answer.seconds


def _promising(problem: SearchProblem, ranked: Sequence[BestShares]) -> list[BestShares]:
    """The first, and those with the shortest blocks among all that are near it: simulations may differ where bounds do not."""
    first = _rank(problem, ranked[0])[0]
    near = {answer.plan: answer for answer in ranked if _rank(problem, answer)[0] <= (1 + 2 * NEAR) * first}
    shortest = sorted(near.values(), key=lambda answer: answer.seconds)
    best, others = ranked[: SIMULATED // 2], [answer for answer in shortest if answer not in ranked[: SIMULATED // 2]]
    return [*best, *others[: SIMULATED - len(best)]]


def rule_of(problem: SearchProblem) -> str:
    """The rule by which the plan is chosen, in words: what `TriedPlans.near` and `TriedPlans.chosen` do."""
    last = ", without a recall that was not asked for if one of them has none" if problem.recalls else ""
    if problem.prefer == LATENCY:
        near, taken = f"with a latency within {NEAR:.0%} of the lowest", "most tokens/s"
    else:
        near, taken = f"within {NEAR:.0%} of the most tokens/s", "the lowest latency"
    return f"of plans {near}, which count as equal, the one with {taken}{last}"


def told_recall(problem: SearchProblem, found: SearchResult) -> str:
    """What became of a recall that the search may have taken, in words; nothing where it may not."""
    if not problem.recalls:
        return ""
    plan, unlike, asked = found.best.plan, found.unlike, problem.plan.policy.recall
    if plan.policy.recall in problem.recalls:
        kept = ", and what they have read stays in memory (--kv-recall-reuse)" if plan.policy.reuses_read else ""
        taken = f"steps attend {plan.policy.recall:g} of what is kept{kept}"
        if asked in problem.recalls:  # no other share was tried
            return taken
        other = f"the best has {unlike.tokens_per_second:.3f} tokens/s" if unlike else "no plan is near it"
        return f"{taken}; of those that attend {'all' if asked == ALL else f'{asked:g}'}, {other}"
    if unlike is not None:
        return f"none is taken: the best plan with it has {unlike.tokens_per_second:.3f} tokens/s"
    refused = filter(None, (why_not_to_recall(problem, problem.plan, share) for share in problem.recalls))
    return f"none is taken: {next(refused, 'no plan with it promises as much, or none fits')}"


def _in_larger_parts(problem: SearchProblem, answer: BestShares) -> BestShares:
    """The same shares, with so many tokens of prompts computed at once that an expert of a mixture meets as many of them as
    other matrices do, or as many as there is room for: a product with few rows costs its matrix nearly as much. An accelerator
    waits for the launches of small parts, whatever the matrices. Nothing waits for a part, since a prompt's layer is over when
    all its parts are; and a size other than the usual one stays."""
    spec = problem.model(answer.plan)
    if answer.plan.prefill_tokens != Plan.prefill_tokens:
        return answer
    fewer_rows = 1 / min(share for layer in spec.layers for _, share in layer.products)
    doublings = round(log2(LARGER_PARTS if problem.accelerator else min(LARGER_PARTS, fewer_rows)))
    larger = (answer.plan.prefill_tokens << power for power in range(doublings, 0, -1))
    plan = next((plan for tokens in larger if problem.fits(plan := replace(answer.plan, prefill_tokens=tokens))), None)
    if plan is None:
        return answer
    case = _case(problem, spec, plan)
    return min(answer, BestShares(case, plan, seconds_at(case, plan)), key=lambda one: one.seconds)


def _front_answers(problem: SearchProblem, answers: Sequence[BestShares], known: Sequence[BestShares]) -> list[BestShares]:
    """More plans of the program's own front, from fast to large, that were not simulated yet."""
    by_latency = sorted(answers, key=lambda answer: answer.seconds)
    front: list[BestShares] = []
    for answer in by_latency:
        rate = answer.case.rows / answer.seconds
        if not front or rate > front[-1].case.rows / front[-1].seconds:
            front.append(answer)
    plans = {answer.plan for answer in known}
    rest = [answer for answer in front if answer.plan not in plans]
    if len(rest) <= ON_FRONT:
        return rest
    return [rest[round(place * (len(rest) - 1) / (ON_FRONT - 1))] for place in range(ON_FRONT)]


def _front(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    best: list[Candidate] = []
    for one in sorted(candidates, key=lambda one: (one.block_seconds, -one.tokens_per_second)):
        if not best or one.tokens_per_second > best[-1].tokens_per_second:
            best.append(one)
    return tuple(best)


# -- where nothing fits ----------------------------------------------------------------------------------------------------


def refuse_what_never_fits(problem: SearchProblem) -> None:
    """Refuses a problem for which even the smallest plan does not fit. Bytes alone decide; no rate of the machine is needed."""
    if not any(map(problem.fits, _smallest(problem))):
        raise NoPlan(nearest_miss(problem))


def _smallest(problem: SearchProblem) -> Iterator[Plan]:
    """One row, with everything on the slowest tier."""
    for base in _bases(problem):
        yield from _offloaded(problem, replace(base, gpu_batch_size=1, num_gpu_batches=1))


def nearest_miss(problem: SearchProblem) -> str:
    """What the smallest of all plans lacks."""
    misses = _misses(problem)
    if misses is None:
        return "no plan of the sizes asked for fits; let the batch sizes be searched, or give more memory"
    more, tier, need, limit = min(misses)
    larger = more_memory(problem.limits, tier, more, need)
    return (
        f"no plan fits: even one row with as much offloaded as helps needs {format_bytes(need)} {on_tier(tier)}, "
        f"and the limit is {format_bytes(limit)}; {larger}{_told_less(problem, need, tier)}"
    )


def _misses(problem: SearchProblem) -> list[tuple[int, str, int, int]] | None:
    """What each of the smallest plans lacks on a tier, the tier, what it needs there, and its limit; None where one fits."""
    misses = []
    for plan in _smallest(problem):
        needed = problem.largest(plan).footprint
        tier = problem.limits.first_exceeded(needed)
        if tier is None:
            return None
        need, limit = problem.limits.needs(needed, tier), problem.limits.of(tier)
        assert limit is not None
        misses.append((need - limit, tier, need, limit))
    return misses


def _told_less(problem: SearchProblem, need: int, tier: str) -> str:
    """What is enough where steps keep nothing of what they have read, if they would and that is more."""
    if not problem.plan.policy.reuses_read:
        return ""
    misses = _misses(replace(problem, plan=problem.plan.without_reuse()))
    if misses is None:
        return ", or leave kv_recall_reuse out, and it fits"
    _, its_tier, least, _ = min(misses)
    is_less = its_tier == tier and least < need
    return f", or leave kv_recall_reuse out: then {format_bytes(enough(least))} are enough" if is_less else ""
