"""Prefixes that rows share are computed once, and it does not show: under any plan each row says what it says alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import pytest

from h2o_flexgen.core.prefix_groups import PrefixGroups
from h2o_flexgen.core.site import HOST
from h2o_flexgen.engine.generate import job_of
from h2o_flexgen.engine.job import Request, prefix_finder
from h2o_flexgen.engine.reports import Tick
from h2o_flexgen.formats.kernel_table import TORCH
from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.planning.cost import Cost, by_lane
from h2o_flexgen.planning.footprint import MemoryLimits
from h2o_flexgen.planning.plan import JUDGED, PINNED, Plan
from h2o_flexgen.planning.workload_plan import DoesNotFit
from h2o_flexgen.sampling.params import SamplingParams
from tests.helpers import tiny
from tests.helpers.contract import POLICIES, UNLIKE, WEIGHTS, Case, Checkpoints
from tests.helpers.pairwise import ELSEWHERE, on_devices
from tests.helpers.resident import resident_behind
from tests.kernels.variants import used
from tests.whole.test_contract import has_code_elsewhere
from tests.whole.test_stream import MIXES, apart, assert_alike_prompt_logprobs, same, streamed

HEADS = (11, 7, 19)  # tokens of what prompts begin with; the second one begins with a part of the first
OWN = (3, 1, 6, 2, 5, 1, 4, 8, 2, 3, 1, 5, 2, 7)
GROWTH = (4, 1, 9, 3, 6, 2, 7, 1, 5, 8, 3, 8, 2, 6)
LITTLE_GROWTH = (4, 1, 5, 3, 6, 2, 3, 1)
LEAST = 4
ENOUGH = 33  # tokens of a prompt behind a prefix that are judged by the last queries, all of which are then its own


@dataclass(frozen=True)
class SharedCase(Case):
    own: tuple[int, ...] = OWN
    growth: tuple[int, ...] = GROWTH
    least_own: int = 1
    prefix_policy: str = PINNED

    @cached_property
    def prompts(self) -> list[list[int]]:
        random = Random(3)
        first, behind, third = ([random.randrange(tiny.VOCAB) for _ in range(count)] for count in HEADS)
        heads = (first, [*first[:5], *behind], third, [])
        return [
            [*heads[place % 4], *(random.randrange(tiny.VOCAB) for _ in range(max(self.least_own, length)))]
            for place, length in enumerate(self.own)
        ]

    @property
    def plan_options(self) -> dict[str, Any]:
        return {"least_prefix": LEAST, "prefix_policy": self.prefix_policy, **super().plan_options}

    @property
    def plan(self) -> Plan:
        return Plan.create(**self.plan_options)

    @property
    def requests(self) -> list[Request]:
        return [Request(prompt, SamplingParams(max_tokens=grown)) for prompt, grown in zip(self.prompts, self.growth)]

    @property
    def groups(self) -> PrefixGroups:
        finder = prefix_finder(self.plan)
        assert finder is not None
        for prompt in self.prompts:
            finder.add(prompt)
        return finder.groups()


CHOICES = {
    "kind": ("opt", "llama-gqa", "gpt-oss-far", "deepseek-v3"),
    "percent": MIXES,
    "gpu_batch_size": (1, 2, 5),
    "num_gpu_batches": (1, 2, 3),
    "buffers": (1, 2, 3),
    "schedule": ("zigzag", "flexgen_barrier"),
    "policy": UNLIKE,
    "prefix_policy": (PINNED, JUDGED),
    "prefill_tokens": (1024, 12),
    ("weight_codec", "compute"): (WEIGHTS[0], WEIGHTS[1]),
    "kv_codec": (PLAIN, "group4"),
}


@pytest.mark.parametrize("values", on_devices(CHOICES, has_code_elsewhere, ELSEWHERE))
def test_each_row_says_what_it_says_alone_behind_its_prefix(
    values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    if ("kv_policy", "kvzip") in values["policy"]:  # whose prompts judge themselves, and nothing of a prefix
        values = values | {"prefix_policy": PINNED}
    hold_contract(SharedCase(own=OWN[:7], growth=LITTLE_GROWTH, **values), checkpoints, offload)


def hold_contract(case: SharedCase, checkpoints: Checkpoints, offload: Path) -> None:
    if case.device == "cuda":  # its products differ in the last bits by the number of rows, and 4 bits make a step of that
        case = replace(case, kv_codec=PLAIN)
    if case.plan.copies_prefixes and case.plan.policy.last_queries:
        case = replace(case, least_own=ENOUGH)
    with case.open(checkpoints, offload) as llm:
        completions = streamed(llm, case.requests)
        assert llm.loaded._memories is not None and llm.loaded._memories.disk.meter.used_bytes == 0
    groups = case.groups
    assert sorted(groups.lengths)[1:] == [12, 19]
    forms = case.weight_codec, case.compute, case.state_dtype
    model, weights = checkpoints.model(case.kind, case.stored, case.dtype, "cpu", *forms)
    for place, completion in enumerate(completions):
        shared = groups.of(place)
        if shared is None or (case.kv_codec == PLAIN and (case.plan.copies_prefixes or case.plan.policy.attends_all)):
            alone = checkpoints.resident_logits(AsPrompted.of(case, place), (0,))  # as if nothing were shared
        else:
            how = (case.levels(model.spec), case.plan.copies_prefixes, case.kv_codec)
            alone = resident_behind(model, weights, case.prompts[place], shared.tokens, case.growth[place], *how)
        assert list(completion.token_ids) == [int(step[0].argmax()) for step in alone], f"row {place}: {case}"


@dataclass(frozen=True)
class AsPrompted(Case):
    """One prompt, without what only plans of jobs know."""

    prompt: tuple[int, ...] = ()

    @classmethod
    def of(cls, case: SharedCase, place: int) -> AsPrompted:
        names = ("kind", "dtype", "stored", "policy", "prefill_tokens", "weight_codec", "kv_codec", "compute")
        options = {name: getattr(case, name) for name in names}
        return cls(**options, gen_len=case.growth[place], lengths=(1,), prompt=tuple(case.prompts[place]))

    @cached_property
    def prompts(self) -> list[list[int]]:
        return [list(self.prompt)]


PLAIN_CASES = [SharedCase("llama-gqa", MIXES[3], gpu_batch_size=3), SharedCase("opt", gpu_batch_size=5, policy=POLICIES[1])]


@pytest.mark.parametrize("case", PLAIN_CASES, ids=str)
def test_torch_does_without_kernels_what_they_do(case: SharedCase, checkpoints: Checkpoints, offload: Path) -> None:
    with case.open(checkpoints, offload) as llm:
        wanted = streamed(llm, case.requests)
    with used(TORCH), case.open(checkpoints, offload) as llm:
        assert same(streamed(llm, case.requests), wanted)


def test_a_prefix_is_computed_once_for_all_rows_with_a_seat(checkpoints: Checkpoints, offload: Path) -> None:
    case, ticks = SharedCase("llama-gqa", gpu_batch_size=4, num_gpu_batches=4, prefill_tokens=1), list[Tick]()
    with case.open(checkpoints, offload) as llm:
        streamed(llm, case.requests, on_tick=ticks.append)
    groups = case.groups
    spared = sum(shared.tokens for place in range(len(OWN)) if (shared := groups.of(place)) is not None)
    read = sum(map(len, case.prompts)) - spared + sum(groups.lengths)
    assert ticks[-1].prompt_tokens == read and spared > 2 * sum(groups.lengths)


@pytest.mark.parametrize("kind", ["llama-gqa", "gpt-oss-far"])
def test_what_the_host_attends_behind_a_prefix_moves_as_many_bytes_as_predicted(
    kind: str, checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    case = SharedCase(kind, (100, 0, 0, 100, 100, 0), gpu_batch_size=2, device="pretended", attend_on=HOST)
    with case.open(checkpoints, offload) as llm:
        streamed(llm, case.requests)
        assert llm.stats is not None
        (run,) = llm.stats.blocks
    foreseen = by_lane(Cost(run.planned).op_bytes())
    assert run.planned.block.batches[0].longest_prefix and run.moved_bytes["attend"] == foreseen["attend"] > 0


def sampled(case: SharedCase) -> list[Request]:
    """Samples, several completions of one prompt, and log-probabilities of prompts, of which some ask for more than others."""
    random, asked = Random(5), list[Request]()
    for prompt, grown in zip(case.prompts, GROWTH):
        params = SamplingParams(
            max_tokens=random.choice((0, grown)),
            temperature=1.2,
            n=random.choice((1, 3)),
            prompt_logprobs=random.choice((0, 3, 1)),
            logprobs=1,
        )
        asked.append(Request(prompt, replace(params, n=params.n if params.max_tokens else 1)))
    return asked


def test_samples_and_log_probabilities_are_those_of_prompts_that_share_nothing(checkpoints: Checkpoints, offload: Path) -> None:
    case = SharedCase("qwen3", MIXES[3], gpu_batch_size=3, num_gpu_batches=3)
    requests = sampled(case)
    with case.open(checkpoints, offload, shared_prefixes=False) as llm:
        wanted = streamed(llm, requests, seed=7)
    with case.open(checkpoints, offload) as llm:
        found = streamed(llm, requests, seed=7)
    assert same(found, wanted)
    assert_alike_prompt_logprobs(found, wanted)


def test_completions_of_one_prompt_share_it(checkpoints: Checkpoints, offload: Path) -> None:
    case, ticks = SharedCase("neox-parallel", own=(9,), gpu_batch_size=6), list[Tick]()
    asked = Request(case.prompts[0], SamplingParams(max_tokens=5, temperature=1.0, n=6))
    with case.open(checkpoints, offload, shared_prefixes=False) as llm:
        (wanted,) = streamed(llm, [asked], seed=1)
    with case.open(checkpoints, offload) as llm:
        (found,) = streamed(llm, [asked], seed=1, on_tick=ticks.append)
    assert [one.token_ids for one in apart([found])] == [one.token_ids for one in apart([wanted])]
    assert ticks[0].prompt_tokens == len(case.prompts[0]) - 1 + 6


def test_what_does_not_fit_is_not_shared_and_that_is_said_once(checkpoints: Checkpoints, offload: Path) -> None:
    case = SharedCase("llama-gqa", gpu_batch_size=4, policy=POLICIES[1], prefix_policy=JUDGED, prefill_tokens=1)
    with case.open(checkpoints, offload, shared_prefixes=False) as apart_from_others:
        wanted = streamed(apart_from_others, case.requests)
    limits = between_sharing_and_not(case, checkpoints, offload)
    with (
        case.open(checkpoints, offload) as llm,
        pytest.warns(RuntimeWarning, match="has 19 tokens, and there is no room") as told,
    ):
        llm.loaded.limits = limits
        assert same(streamed(llm, case.requests), wanted)
    assert len(told) == 1


def test_where_answers_depend_on_it_a_job_that_cannot_share_is_refused(checkpoints: Checkpoints, offload: Path) -> None:
    """It would say something else with less memory, and so when it goes on."""
    case = SharedCase("llama-gqa", gpu_batch_size=4, policy=POLICIES[1], prefill_tokens=1)
    limits = between_sharing_and_not(case, checkpoints, offload)
    with case.open(checkpoints, offload) as llm:
        llm.loaded.limits = limits
        with pytest.raises(DoesNotFit, match="shared prefixes"):
            streamed(llm, case.requests)


def between_sharing_and_not(case: SharedCase, checkpoints: Checkpoints, offload: Path) -> MemoryLimits:
    """A limit that is enough for a job only if it shares nothing."""
    needs = []
    for shares in (False, True):
        with case.open(checkpoints, offload, shared_prefixes=shares) as llm:
            footprint = llm.plan_job(job_of(case.requests, llm.row_maker)).footprint
        assert bool(footprint.parts[HOST]["shared prefixes"]) is shares
        needs.append(footprint.total(HOST))
    assert needs[0] < needs[1]
    return MemoryLimits(host=sum(needs) // 2)


def test_a_row_with_too_little_of_its_own_for_a_budget_shares_nothing(checkpoints: Checkpoints, offload: Path) -> None:
    share = (("kv_policy", "h2o"), ("kv_budget", 0.2))
    case, ticks = SharedCase("opt", own=(1, 9, 1, 9, 1, 9, 1, 9, 1), gpu_batch_size=9, policy=share), list[Tick]()
    requests = [Request(prompt, SamplingParams(max_tokens=1)) for prompt in case.prompts]
    with case.open(checkpoints, offload) as llm:
        assert len(streamed(llm, requests, on_tick=ticks.append)) == 9
    prompts, groups = case.prompts, case.groups
    apart_from_others = sum(len(prompts[place]) for place in range(0, 9, 2))
    behind = {groups.of(place) for place in range(1, 9, 2)} - {None}
    own = sum(len(prompts[place]) - getattr(groups.of(place), "tokens", 0) for place in range(1, 9, 2))
    assert ticks[-1].prompt_tokens == apart_from_others + own + sum(one.tokens for one in behind if one is not None)


def test_a_schedule_in_which_batches_wait_for_each_other_shares_nothing() -> None:
    assert prefix_finder(Plan(schedule="row_by_row")) is None and prefix_finder(Plan(shared_prefixes=False)) is None
    assert prefix_finder(Plan()) is not None
