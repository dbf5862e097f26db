"""Search: the best plan for a workload on a machine, within budgets.

The linear program finds the shares for every size of batches and blocks and every codec that may be taken; what promises most
is then simulated with real tensors, and the best of that wins. What decides over quality - a KV budget, codecs - is searched
only where somebody allows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from h2o_flexgen.planning.fit import largest
from h2o_flexgen.planning.footprint import Budgets, DoesNotFit, Request
from h2o_flexgen.planning.linear import Answer, Case, solve
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.model_spec import ModelSpec
from h2o_flexgen.planning.plan import DEVICE, Plan, Shares
from h2o_flexgen.planning.planned import plan_blocks
from h2o_flexgen.planning.predict import Prediction, predict
from h2o_flexgen.planning.units import format_bytes
from h2o_flexgen.planning.workload import Workload

THROUGHPUT, LATENCY = "throughput", "latency"
PREFERENCES = (THROUGHPUT, LATENCY)
SIZES = tuple(sorted({factor * 2**power for power in range(11) for factor in (1, 3)}))  # of batches: 1 2 3 4 6 8 12 ...
MOST_ROWS = 1024  # of a batch
NUMBERS_OF_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16)  # in a block
SIMULATED, SIMULATED_AT_MOST, ON_FRONT = 3, 12, 6  # of what the program puts first; of its front from small blocks to large
NEAR = 0.05  # two plans this near to each other are equal: then the one whose block is over sooner


@dataclass(frozen=True)
class Problem:
    """What is asked. `plan` has all that is not searched: schedule, KV policy and its budget, slots, codecs."""

    model: Callable[[Plan], ModelSpec]  # its sizes under a plan: codecs and layers apart or together change them
    workload: Workload | None  # all prompts; or none, and then as many as a block has room for
    prompt_len: int
    gen_len: int
    plan: Plan
    machine: Machine
    budgets: Budgets
    kernel_threads: int = 0
    writes_weights: bool = False
    codecs: tuple[tuple[str, str], ...] = ()  # of weights and KV that may be taken instead of the plan's
    attend_on: tuple[str, ...] = (DEVICE,)
    batch_sizes: tuple[int, ...] = ()  # only these, where somebody has chosen
    batches: tuple[int, ...] = ()
    latency_limit: float | None = None  # seconds from the first prompt of a block to its last token
    prefer: str = THROUGHPUT

    @property
    def accelerator(self) -> bool:
        return self.machine.has_accelerator

    def prompts(self, plan: Plan) -> Workload:
        """What a plan is measured by."""
        return self.workload or Workload.uniform(plan.block_size, self.prompt_len, self.gen_len)

    def first_block(self, plan: Plan) -> Workload:
        """The prompts of the first block, which has the longest."""
        if self.workload is None:
            return self.prompts(plan)
        longest = sorted(self.workload.prompt_lens, reverse=True)[: plan.block_size]
        return Workload(tuple(longest), self.gen_len)

    def request(self, plan: Plan) -> Request:
        spec, workload = self.model(plan), self.first_block(plan)
        return Request(spec, plan, workload, self.accelerator, self.writes_weights, self.kernel_threads)

    def fits(self, plan: Plan) -> bool:
        return self.budgets.first_exceeded(self.request(plan).footprint()) is None

    def predict(self, plan: Plan) -> Prediction:
        blocks = plan_blocks(self.model(plan), plan, self.prompts(plan), self.accelerator)
        return predict(blocks, self.machine, self.kernel_threads, self.writes_weights)


@dataclass(frozen=True)
class Candidate:
    """A plan, and what is to be expected of it."""

    plan: Plan
    prediction: Prediction

    @property
    def tokens_per_second(self) -> float:
        return self.prediction.tokens_per_second

    @property
    def block_seconds(self) -> float:
        """The latency: how long a block takes from its first prompt to its last token."""
        return self.prediction.total_seconds * min(1.0, self.plan.block_size / self.prediction.num_prompts)


@dataclass(frozen=True)
class Found:
    best: Candidate
    runners_up: tuple[Candidate, ...]
    front: tuple[Candidate, ...]  # fastest block first: none has both more tokens per second and less latency than another
    cases: int  # that the program has solved
    seconds_at_least: float  # what the program says of the best

    @property
    def all(self) -> tuple[Candidate, ...]:
        return (self.best, *self.runners_up)


class NoPlan(DoesNotFit):
    """Nothing fits, or nothing is fast enough."""


def search(problem: Problem) -> Found:
    cases = list(_cases(problem))
    if not cases:
        raise NoPlan(nearest_miss(problem))
    answers = solve(cases, problem.latency_limit)
    if not answers:
        raise NoPlan(nearest_miss(problem))
    ranked = sorted(answers, key=lambda answer: _rank(problem, answer))
    in_time = [answer for answer in ranked if problem.latency_limit is None or answer.seconds <= problem.latency_limit]
    if not in_time:
        least = min(answer.seconds for answer in answers)
        raise NoPlan(_too_slow(problem, least))
    candidates = _simulated(problem, in_time)
    known = {one.plan for one in candidates}
    others = [answer.plan for answer in _front_answers(problem, answers) if answer.plan not in known]
    candidates += [Candidate(plan, problem.predict(plan)) for plan in others]
    ordered = sorted(_in_time(problem, candidates), key=lambda one: _order(problem, one))
    best = _soonest_of_the_best(problem, ordered)
    return Found(
        best=best,
        runners_up=tuple(one for one in ordered if one is not best),
        front=_front(candidates),
        cases=len(cases),
        seconds_at_least=next(answer.seconds for answer in answers if answer.plan == best.plan),
    )


def _simulated(problem: Problem, ranked: Sequence[Answer]) -> list[Candidate]:
    """In the order of what the program promises, until no promise is better than what was simulated: it never promises less
    than can be had. Where promises are much alike, only some of them."""
    candidates: list[Candidate] = []
    for answer in ranked[:SIMULATED_AT_MOST]:
        best = min((_order(problem, one)[0] for one in candidates), default=inf)
        if len(candidates) >= SIMULATED and _promise(problem, answer) >= best:
            break
        candidates.append(Candidate(answer.plan, problem.predict(answer.plan)))
    return candidates


def _in_time(problem: Problem, candidates: Sequence[Candidate]) -> list[Candidate]:
    limit = problem.latency_limit
    in_time = [one for one in candidates if limit is None or one.block_seconds <= limit]
    if not in_time:
        raise NoPlan(_too_slow(problem, min(one.block_seconds for one in candidates)))
    return in_time


def _too_slow(problem: Problem, least: float) -> str:
    return (
        f"no plan ends a block within {problem.latency_limit:g} s; the fastest needs {least:.3g} s: "
        "give more time, fewer tokens, or more memory"
    )


# -- what is tried ---------------------------------------------------------------------------------------------------------


def _cases(problem: Problem) -> Iterator[Case]:
    for base in _bases(problem):
        spec = problem.model(base)
        for size, batches in _blocks(problem, base):
            plan = replace(base, gpu_batch_size=size, num_gpu_batches=batches)
            block = problem.first_block(plan).blocks(size, batches)[0]
            budgets, threads = problem.budgets, problem.kernel_threads
            yield Case(spec, plan, block, problem.machine, budgets, threads, problem.writes_weights)


def _bases(problem: Problem) -> Iterator[Plan]:
    own = (problem.plan.weight_codec, problem.plan.kv_codec)
    for weight_codec, kv_codec in dict.fromkeys((own, *problem.codecs)):
        for attend_on in problem.attend_on if problem.accelerator else (DEVICE,):
            yield replace(problem.plan, weight_codec=weight_codec, kv_codec=kv_codec, attend_on=attend_on)


def _blocks(problem: Problem, base: Plan) -> Iterator[tuple[int, int]]:
    """Sizes that fit with everything on the slowest tier: with more on faster ones nothing more fits."""
    prompts = problem.workload.num_prompts if problem.workload else None
    offloaded = replace(base, weights=Shares(0, 0), kv=Shares(0, 0), hidden=Shares(0, 0))
    for batches in problem.batches or NUMBERS_OF_BATCHES:
        most = MOST_ROWS if prompts is None else min(MOST_ROWS, -(-prompts // batches))
        if not problem.batches and batches > 1 and prompts is not None and prompts <= batches // 2:
            continue

        def fits(size: int, batches: int = batches) -> bool:
            plan = replace(offloaded, gpu_batch_size=size, num_gpu_batches=batches)
            return any(problem.fits(one) for one in _offloaded(plan, problem.accelerator))

        if problem.batch_sizes:  # whoever chose a size may have fewer prompts
            yield from ((size, batches) for size in problem.batch_sizes if fits(size))
            continue
        reach = largest(fits, most)
        if not reach:
            return
        yield from ((size, batches) for size in sorted({size for size in (*SIZES, reach) if size <= reach}))


def _offloaded(plan: Plan, accelerator: bool) -> Iterator[Plan]:
    """Hidden values, and so KV, may be better off where they are computed with: rings of buffers take room too."""
    yield plan
    yield replace(plan, hidden=Shares(0, 1))
    if accelerator:
        yield replace(plan, weights=Shares(0, 1), kv=Shares(0, 1), hidden=Shares(0, 1))


# -- which is best ---------------------------------------------------------------------------------------------------------


def _rank(problem: Problem, answer: Answer) -> tuple[float, float]:
    """Less is better."""
    for_a_row = answer.seconds / answer.case.block.num_rows
    return (answer.seconds, for_a_row) if problem.prefer == LATENCY else (for_a_row, answer.seconds)


def _order(problem: Problem, candidate: Candidate) -> tuple[float, float]:
    rate, latency = -candidate.tokens_per_second, candidate.block_seconds
    return (latency, rate) if problem.prefer == LATENCY else (rate, latency)


def _promise(problem: Problem, answer: Answer) -> float:
    """What the program says, in the terms that candidates are ordered by."""
    if problem.prefer == LATENCY:
        return answer.seconds
    block = answer.case.block
    return -block.num_rows * block.gen_len / answer.seconds


def _soonest_of_the_best(problem: Problem, ordered: Sequence[Candidate]) -> Candidate:
    first = _order(problem, ordered[0])[0]
    near = [one for one in ordered if abs(_order(problem, one)[0] - first) <= NEAR * abs(first)]
    return min(near, key=lambda one: (one.block_seconds, _order(problem, one)))


def _front_answers(problem: Problem, answers: Sequence[Answer]) -> list[Answer]:
    """Of the program's own front some, from fast to large."""
    by_latency = sorted(answers, key=lambda answer: answer.seconds)
    front: list[Answer] = []
    for answer in by_latency:
        rate = answer.case.block.num_rows / answer.seconds
        if not front or rate > front[-1].case.block.num_rows / front[-1].seconds:
            front.append(answer)
    if len(front) <= ON_FRONT:
        return front
    return [front[round(place * (len(front) - 1) / (ON_FRONT - 1))] for place in range(ON_FRONT)]


def _front(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    best: list[Candidate] = []
    for one in sorted(candidates, key=lambda one: (one.block_seconds, -one.tokens_per_second)):
        if not best or one.tokens_per_second > best[-1].tokens_per_second:
            best.append(one)
    return tuple(best)


# -- where nothing fits ----------------------------------------------------------------------------------------------------


def nearest_miss(problem: Problem) -> str:
    """One row, everything on the slowest tier: what it needs more than there is."""
    misses = []
    for base in _bases(problem):
        smallest = replace(
            base, gpu_batch_size=1, num_gpu_batches=1, weights=Shares(0, 0), kv=Shares(0, 0), hidden=Shares(0, 0)
        )
        for plan in _offloaded(smallest, problem.accelerator):
            needed = problem.request(plan).footprint()
            tier = problem.budgets.first_exceeded(needed)
            if tier is not None:
                budget = problem.budgets.of(tier)
                assert budget is not None
                misses.append((problem.budgets.needs(needed, tier) - budget, tier, problem.budgets.needs(needed, tier), budget))
    if not misses:
        return "no plan of the sizes asked for fits; let the batch sizes be searched, or give more memory"
    more, tier, need, budget = min(misses)
    return (
        f"no plan fits: even one row with everything offloaded needs {format_bytes(need)} on {tier}, "
        f"and the budget is {format_bytes(budget)}; give {format_bytes(more)} more on {tier}"
    )
