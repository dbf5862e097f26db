"""Requests that arrive share prefixes, which are computed once and outlast those requests; no answer shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest

from h2o_flexgen.core.site import DEVICE, HOST
from h2o_flexgen.engine.arrivals import Arrival, Arrivals
from h2o_flexgen.engine.job import Request
from h2o_flexgen.engine.reports import Tick
from h2o_flexgen.engine.restarted_run import Shrink
from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.llm import LLM
from h2o_flexgen.planning.footprint import MemoryLimits
from h2o_flexgen.planning.plan import JUDGED, PINNED
from h2o_flexgen.planning.workload_plan import DoesNotFit
from h2o_flexgen.sampling.completion import Completion
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.schedule.ops import Op
from h2o_flexgen.server.counts import ServerCounts
from h2o_flexgen.server.desks import Desks
from h2o_flexgen.text.prompts import Prompt
from tests.engine.test_shrink import OF_TORCH, fail_at
from tests.helpers import tiny
from tests.helpers.contract import POLICIES, WEIGHTS, Checkpoints
from tests.helpers.pairwise import Name, on_devices
from tests.helpers.resident import resident_behind
from tests.planning.allocations import peak_allocated
from tests.whole.test_shared_prefixes import ENOUGH, AsPrompted, SharedCase
from tests.whole.test_stream import MIXES, assert_alike_prompt_logprobs, nothing_runs_on, same

__all__ = ["nothing_runs_on"]

HEAD, MORE, OTHER = 19, 13, 15  # tokens that prompts begin with, that some go on with, and of a head that leaves the first one
OWN = (3, 1, 6, 2, 5, 1, 4, 8, 2, 3)
GROWTH = (4, 1, 5, 3, 6, 2, 4, 1, 5, 3)
LONGEST, MOST = HEAD + MORE + ENOUGH, max(GROWTH)


@dataclass(frozen=True)
class ArrivingCase(SharedCase):
    own: tuple[int, ...] = OWN
    growth: tuple[int, ...] = GROWTH

    @cached_property
    def prompts(self) -> list[list[int]]:
        """Headers within headers, prompts that come twice, and some that are like no other."""
        random = Random(3)
        head, more, other = ([random.randrange(tiny.VOCAB) for _ in range(count)] for count in (HEAD, MORE, OTHER))
        heads = (head, [*head, *more], [*head[:9], *other], [*head, *more], [])
        made = [
            [*heads[place % 5], *(random.randrange(tiny.VOCAB) for _ in range(max(self.least_own, length)))]
            for place, length in enumerate(self.own)
        ]
        return [*made[:8], made[2], made[9]]


@dataclass
class Guests:
    """The requests: the first few at once, and each other one when so many tokens were heard of."""

    prompts: Sequence[Sequence[int]]
    params: Sequence[SamplingParams]
    arrivals: Arrivals
    at_once: int = 1
    every: int = 3
    come: list[Arrival] = field(default_factory=list)
    shared: dict[int, int] = field(default_factory=dict)  # tokens of each request's prefix
    heard: int = 0

    def one_comes(self) -> None:
        place = len(self.come)
        if place < len(self.prompts):
            request = Request(Prompt(None, tuple(self.prompts[place])), self.params[place], place)
            self.come.append(self.arrivals.offer(request, self.hear))

    def hear(self, row: RowState, token: int, text: str | None) -> None:
        prefix = self.arrivals.need(row).prefix
        self.shared[row.index] = 0 if prefix is None else prefix.tokens
        self.heard += 1
        if self.heard % self.every == 0:
            self.one_comes()

    def all_served(self, llm: LLM, **options: Any) -> list[Arrival]:
        """Serves them in as many blocks as it takes: where none is left before the next comes, a block is over."""
        over = list[Arrival]()
        for _ in range(self.at_once):
            self.one_comes()
        while len(over) < len(self.prompts):
            over += llm.generate_arriving(self.arrivals, **options)
            self.one_comes()
        return over


def guests_of(case: ArrivingCase, llm: LLM, room: int | None = None, **options: Any) -> Guests:
    params = [SamplingParams(max_tokens=grown) for grown in case.growth]
    return Guests(case.prompts, params, llm.arrivals(LONGEST, MOST, prefix_room=room), **options)


KEPT = (
    *((policy, PINNED) for policy in (POLICIES[0], POLICIES[1])),
    *((policy, JUDGED) for policy in (POLICIES[2], POLICIES[9], POLICIES[12])),
)
CHOICES: dict[Name, Any] = {
    "kind": ("llama-gqa", "opt", "gpt-oss-far", "deepseek-v2"),
    "percent": (MIXES[3], MIXES[0], MIXES[2]),
    "gpu_batch_size": (1, 3),
    "num_gpu_batches": (1, 2, 3),
    "buffers": (1, 2, 3),
    "schedule": ("zigzag", "flexgen_barrier"),
    ("policy", "prefix_policy"): KEPT,
    "prefill_tokens": (1024, 12),
    "attend_on": ("device", "host"),
    ("weight_codec", "compute"): (WEIGHTS[0], WEIGHTS[1]),
    "room": (32, 80, 320),
    ("at_once", "every"): ((1, 1), (1, 5), (4, 2)),
}


def is_of_arrivals(pair: Mapping[Name, Any]) -> bool:
    """Whether two choices meet where prefixes arrive: how policies and models attend is held where all are known before."""
    (kept,) = [values for names, values in pair.items() if "prefix_policy" in names] or [None]
    return kept in (None, KEPT[0], KEPT[2]) or bool(pair.keys() & {"device", "prefill_tokens", "attend_on", "room"})


@pytest.mark.parametrize("values", on_devices(CHOICES, is_of_arrivals))
def test_each_row_says_what_it_says_alone_behind_whatever_it_shares(
    values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    values = dict(values)
    how = {name: values.pop(name) for name in ("room", "at_once", "every")}
    hold_contract(ArrivingCase(**values), checkpoints, offload, **how)


def hold_contract(
    case: ArrivingCase, checkpoints: Checkpoints, offload: Path, room: int, at_once: int, every: int = 3
) -> Guests:
    if case.plan.copies_prefixes and case.plan.policy.last_queries:
        case = replace(case, least_own=ENOUGH)
    with case.open(checkpoints, offload) as llm:
        guests = guests_of(case, llm, room, at_once=at_once, every=every)
        assert len(guests.all_served(llm)) == len(case.prompts)
    assert sum(tokens > 0 for tokens in guests.shared.values()) >= 2, f"hardly anything was shared: {case}"
    forms = case.weight_codec, case.compute, case.state_dtype
    model, weights = checkpoints.model(case.kind, case.stored, case.dtype, "cpu", *forms)
    for place, arrival in enumerate(guests.come):
        tokens = guests.shared[place]
        if not tokens or case.plan.copies_prefixes or case.plan.policy.keeps_all:
            alone = checkpoints.resident_logits(AsPrompted.of(case, place), (0,))  # as if nothing were shared
        else:
            how = (case.levels(model.spec), case.plan.copies_prefixes)
            alone = resident_behind(model, weights, case.prompts[place], tokens, case.growth[place], *how)
        wanted = [int(step[0].argmax()) for step in alone]
        assert list(arrival.completion.token_ids) == wanted, f"row {place}, behind {tokens} tokens: {case}, {room}"
    return guests


# -- what is computed --------------------------------------------------------------------------------------------------------

FOUR = SamplingParams(max_tokens=4)


def drawn(tokens: int, seed: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(tiny.VOCAB) for _ in range(tokens)]


@dataclass
class Counted:
    """One request after the other, each in a block of its own: what was computed for it, and what was not."""

    llm: LLM
    arrivals: Arrivals

    def asked(self, *prompts: Sequence[int], params: SamplingParams = FOUR) -> tuple[int, int, list[Arrival]]:
        ticks = list[Tick]()
        come = [self.arrivals.offer(Request(Prompt(None, tuple(prompt)), params)) for prompt in prompts]
        assert list(self.llm.generate_arriving(self.arrivals, seed=1, on_tick=ticks.append))
        engine = self.llm.loaded._engine
        assert engine is not None and engine._lasting is not None
        assert not any(prefix.users for prefix in engine._lasting), "none has a seat any more"
        read, spared = ticks[-1].prompt_tokens, ticks[-1].spared_tokens
        assert read + spared == sum(len(arrival.rows) * arrival.rows[0].prompt_len for arrival in come)
        return read, spared, come

    def spared(self, *prompts: Sequence[int]) -> int:
        return self.asked(*prompts)[1]


def test_what_two_requests_begin_with_is_kept_for_the_third_though_blocks_end(checkpoints: Checkpoints, offload: Path) -> None:
    case, head = ArrivingCase("llama-gqa", gpu_batch_size=4), drawn(40, 1)
    with case.open(checkpoints, offload) as llm:
        counted = Counted(llm, llm.arrivals(60, 4))
        assert counted.spared([*head, 1, 2]) == 0, "no other is known"
        assert counted.spared([*head, 3, 4]) == 0, "now it is computed as a prefix"
        assert counted.spared([*head, 5, 6]) == 40
        assert counted.spared([*head, 7, 8], [*head, 9], [*head, 10]) == 120
        assert counted.spared(drawn(30, 2)) == 0
        assert counted.spared([*head[:22], 9, 9, 9]) == 20, "the first tokens of it, in whole pieces"
        assert counted.spared([*head]) == 36, "the last token is its own"
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1))
        assert counted.spared([*head, 11]) == 0, "another workload has had the memory"
        assert counted.spared([*head, 12]) == 40


def test_requests_that_come_together_have_their_beginning_computed_once(checkpoints: Checkpoints, offload: Path) -> None:
    case, head = ArrivingCase("opt", gpu_batch_size=2, num_gpu_batches=3), drawn(40, 1)
    with case.open(checkpoints, offload) as llm:
        counted = Counted(llm, llm.arrivals(60, 4, prefix_room=48))
        assert counted.spared(*([*head, 1 + place, 2] for place in range(6))) == 5 * 40


def test_a_longer_prefix_begins_with_a_copy_of_what_is_kept(checkpoints: Checkpoints, offload: Path) -> None:
    case, head, one, two = ArrivingCase("qwen3", gpu_batch_size=4), drawn(24, 1), drawn(12, 2), drawn(12, 3)
    asked = [[*head, *one, 5], [*head, *one, 6], [*head, *two, 7], [*head, *two, 8]]
    with case.open(checkpoints, offload) as llm:
        counted = Counted(llm, llm.arrivals(60, 4, prefix_room=160))
        assert counted.spared(*asked) == 36 + 24 + 36, "of the second prefix only what stands behind the first's head"
        assert [counted.spared(one) for one in asked] == [36] * 4


def test_a_talk_that_grows_computes_what_is_new(checkpoints: Checkpoints, offload: Path) -> None:
    case, text = ArrivingCase("llama-gqa"), drawn(100, 1)
    with case.open(checkpoints, offload) as llm:
        counted = Counted(llm, llm.arrivals(100, 4, prefix_room=160))
        assert [counted.spared(text[:length]) for length in (20, 40, 60, 80)] == [0, 0, 20, 40]


def test_completions_of_one_prompt_have_it_computed_once(checkpoints: Checkpoints, offload: Path) -> None:
    case, prompt = ArrivingCase("neox-parallel", gpu_batch_size=3, num_gpu_batches=2), drawn(22, 1)
    params = SamplingParams(max_tokens=5, temperature=1.0, n=6, seed=9)
    with case.open(checkpoints, offload) as llm:
        (wanted,) = llm.generate([prompt], params)
        counted = Counted(llm, llm.arrivals(60, 5))
        read, _, (come,) = counted.asked(prompt, params=params)
    assert read == 21 + 6 and same([come.completion], [wanted])


def test_a_prefix_that_is_wanted_least_lately_makes_room_and_is_computed_again(checkpoints: Checkpoints, offload: Path) -> None:
    case = ArrivingCase("opt", gpu_batch_size=2, num_gpu_batches=1)
    heads = [drawn(32, seed) for seed in range(3)]
    with case.open(checkpoints, offload) as llm:
        counted, over, number = Counted(llm, llm.arrivals(40, 4, prefix_room=64)), list[Arrival](), count(1)

        def spared(*which: int) -> int:
            _, tokens, come = counted.asked(*([*heads[one], next(number), 7] for one in which))
            over.extend(come)
            return tokens

        assert [spared(0, 0), spared(1, 1), spared(0), spared(1)] == [32] * 4
        assert [spared(2, 2), spared(1), spared(0), spared(2)] == [32, 32, 0, 0], "each went for the next, and came back"
        assert spared(0, 2) == 64, "and these two are there"
        completions = [one.completion for one in over]
        assert [one.token_ids for one in llm.generate([[*one.prompt_token_ids] for one in completions], FOUR)] == [
            one.token_ids for one in completions
        ]


def test_seats_do_without_where_prefixes_in_use_take_all_room(checkpoints: Checkpoints, offload: Path) -> None:
    case, one, two = ArrivingCase("opt", gpu_batch_size=4, num_gpu_batches=1), drawn(32, 1), drawn(32, 2)
    with case.open(checkpoints, offload) as llm:
        counted = Counted(llm, llm.arrivals(40, 4, prefix_room=48))
        assert counted.spared([*one, 1], [*one, 2], [*two, 3], [*two, 4]) == 32 + 16, "the second's first half has room"


# -- whatever else may come in between ---------------------------------------------------------------------------------------


def asked_in_turn(llm: LLM, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], room: int) -> list[Completion]:
    guests = Guests(prompts, params, llm.arrivals(LONGEST, MOST, prefix_room=room), at_once=2, every=2)
    guests.all_served(llm, seed=7)
    assert room == 0 or sum(tokens > 0 for tokens in guests.shared.values()) >= 4
    return [arrival.completion for arrival in guests.come]


def test_log_probabilities_of_prompts_are_those_of_prompts_that_share_nothing(checkpoints: Checkpoints, offload: Path) -> None:
    case, random = ArrivingCase("qwen3", MIXES[3], gpu_batch_size=2, num_gpu_batches=2), Random(5)
    params = [
        SamplingParams(max_tokens=3, temperature=1.2, n=n, prompt_logprobs=random.choice((0, 3, 1)), logprobs=1)
        for n in (1, 1, 2, 1, 1, 3, 1, 1, 2, 1)
    ]
    with case.open(checkpoints, offload) as llm:
        wanted, found = (asked_in_turn(llm, case.prompts, params, room) for room in (0, 80))
    assert same(found, wanted)
    assert_alike_prompt_logprobs(found, wanted)


def test_a_request_that_is_given_up_leaves_the_prefix_to_the_others(checkpoints: Checkpoints, offload: Path) -> None:
    case, head = ArrivingCase("opt", gpu_batch_size=3, num_gpu_batches=1), drawn(40, 1)
    with case.open(checkpoints, offload) as llm:
        counted = Counted(llm, llm.arrivals(60, 4, prefix_room=48))
        come: list[Arrival] = []

        def hear(row: RowState, token: int, text: str | None) -> None:
            counted.arrivals.give_up(come[0])

        prompts = [[*head, 1 + place] for place in range(3)]
        come += [counted.arrivals.offer(Request(Prompt(None, tuple(one)), FOUR), hear) for one in prompts]
        list(llm.generate_arriving(counted.arrivals))
        assert [len(one.rows[0].token_ids) for one in come] == [1, 4, 4]
        assert counted.spared([*head, 9]) == 40
        assert [one.token_ids for one in llm.generate(prompts[1:], FOUR)] == [one.completion.token_ids for one in come[1:]]


def test_where_a_block_breaks_prefixes_are_computed_anew(checkpoints: Checkpoints, offload: Path) -> None:
    case, head = ArrivingCase("llama-gqa", gpu_batch_size=2, num_gpu_batches=2), drawn(40, 1)
    with case.open(checkpoints, offload) as llm:
        counted = Counted(llm, llm.arrivals(60, 4))
        assert counted.spared([1, 2, 3]) == 0 and llm.loaded._memories is not None
        host = llm.loaded._memories.host
        held = host.meter.used_bytes - host.spare_bytes

        def hear(row: RowState, token: int, text: str | None) -> None:
            if row.index == 1:
                raise RuntimeError("the second breaks")

        prompts = [[*head, 1 + place] for place in range(4)]
        asked = [Request(Prompt(None, tuple(one)), FOUR, place) for place, one in enumerate(prompts)]
        come = [counted.arrivals.offer(one, hear) for one in asked]
        with pytest.raises(RuntimeError, match="the second breaks"):
            list(llm.generate_arriving(counted.arrivals))
        assert counted.arrivals.drop(come[1].rows[0].row) == [come[1]]
        ticks = list[Tick]()
        assert len(list(llm.generate_arriving(counted.arrivals, on_tick=ticks.append))) == 3
        assert (ticks[-1].prompt_tokens, ticks[-1].spared_tokens) == (40 + 3, 2 * 40)
        assert counted.spared([*head, 9]) == 40 and host.meter.used_bytes - host.spare_bytes == held
        for place in (0, 2, 3):
            assert come[place].completion.token_ids == llm.generate([prompts[place]], FOUR)[0].token_ids


def test_where_memory_runs_out_all_go_on_in_a_smaller_block(
    checkpoints: Checkpoints, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(monkeypatch, Op.COMPUTE, step=3, most_rows=2, error=lambda: RuntimeError(OF_TORCH))
    case, shrinks = ArrivingCase("opt", gpu_batch_size=4, num_gpu_batches=1), list[Shrink]()
    with case.open(checkpoints, offload) as llm:
        guests = guests_of(case, llm, 80, at_once=6, every=2)
        guests.all_served(llm, on_shrink=shrinks.append)
    assert [shrink.size.batch_size for shrink in shrinks] == [2]
    assert sum(tokens > 0 for tokens in guests.shared.values()) >= 4
    for place, arrival in enumerate(guests.come):
        alone = checkpoints.resident_logits(AsPrompted.of(case, place), (0,))
        assert list(arrival.completion.token_ids) == [int(step[0].argmax()) for step in alone]


def test_threads_that_ask_share_what_they_ask_alike(checkpoints: Checkpoints, offload: Path) -> None:
    case, head, counts = ArrivingCase("llama-gqa", gpu_batch_size=4), drawn(40, 1), ServerCounts()
    prompts = [[*head, 1 + place] for place in range(8)]
    with case.open(checkpoints, offload) as llm:
        wanted = [one.token_ids for one in llm.generate(prompts, FOUR)]
        with Desks(llm, seconds=60, counts=counts) as desks:
            asked = [desks.ask(Request(prompt, FOUR)) for prompt in llm.read(prompts)]
        completions = [one.result() for one in asked]
    assert [one.token_ids for one in completions] == wanted and counts.totals()["shared_prompt_tokens"] == 7 * 40
    assert [one.cached_tokens for one in completions] == [0, *[40] * 7]


# -- the room for it ---------------------------------------------------------------------------------------------------------


def room_of(llm: LLM, asked: int | None = None, prompt_len: int = 60) -> int:
    return llm.arrivals(prompt_len, 4, prefix_room=asked).planned.workload.prefix_room


@pytest.mark.parametrize(
    ("options", "usual"),
    [
        ({}, 64),
        ({"gpu_batch_size": 24}, 6 * 64),
        ({"policy": POLICIES[1]}, 0),
        ({"policy": POLICIES[1], "prefix_policy": JUDGED}, 64),
        ({"kv_codec": "group4"}, 0),
    ],
)
def test_nothing_is_shared_by_itself_where_answers_would_depend_on_it(
    options: dict[str, Any], usual: int, checkpoints: Checkpoints, offload: Path
) -> None:
    with ArrivingCase(**options).open(checkpoints, offload) as llm:
        assert (room_of(llm), room_of(llm, 20), room_of(llm, 0), room_of(llm, prompt_len=4)) == (usual, 32, 0, 0)


def test_seats_come_first_and_prefixes_get_what_memory_leaves(checkpoints: Checkpoints, offload: Path) -> None:
    with ArrivingCase("llama-gqa", gpu_batch_size=4, prefill_tokens=1).open(checkpoints, offload) as llm:
        needs = [llm.arrivals(60, 4, prefix_room=room).planned.footprint.total(HOST) for room in (0, 32, 64)]
        assert needs[0] < needs[1] < needs[2]
        found = []
        for enough in needs:
            llm.loaded.limits = MemoryLimits(host=enough)
            found.append((room_of(llm), llm.arrivals(60, 4).load.seats))
        assert found == [(0, 8), (32, 8), (64, 8)]
        llm.loaded.limits = MemoryLimits(host=needs[1])
        with pytest.raises(DoesNotFit, match=r"shared prefixes .*; would fit: .*less than 64 tokens of prefix_room"):
            room_of(llm, 64)


def test_a_room_that_nothing_could_use_is_refused(checkpoints: Checkpoints, offload: Path) -> None:
    with ArrivingCase("opt").open(checkpoints, offload) as llm:
        for asked, said in ((3, "prefix_room is 3, and a prefix has 4 tokens at least"), (-1, "prefix_room is -1; allowed is")):
            with pytest.raises(ValueError, match=said):
                room_of(llm, asked)
    with ArrivingCase("opt").open(checkpoints, offload, shared_prefixes=False) as llm:
        assert room_of(llm) == 0
        with pytest.raises(ValueError, match=r"prefix_room is 64, but no prefixes are shared \(they are off, or"):
            room_of(llm, 64)
    with ArrivingCase("opt", schedule="row_by_row", num_gpu_batches=1).open(checkpoints, offload) as llm:
        assert room_of(llm) == 0
        with pytest.raises(ValueError, match=r"schedule='row_by_row' cannot"):
            room_of(llm, 64)


@pytest.mark.parametrize("device", ["cpu", "pretended"])
def test_no_pass_holds_more_than_is_predicted(device: str, checkpoints: Checkpoints, offload: Path, pretended: None) -> None:
    case = ArrivingCase("llama-gqa", MIXES[3], gpu_batch_size=2, num_gpu_batches=2, device=device, prefill_tokens=16)
    compute, held = DEVICE if device == "pretended" else HOST, list[tuple[int, int]]()

    def sample(*_: object) -> None:
        memories = llm.loaded._memories
        assert memories is not None
        held.append((memories.host.meter.used_bytes, memories.compute.meter.used_bytes))

    with case.open(checkpoints, offload) as llm:
        guests = guests_of(case, llm, 80, at_once=4)
        footprint = guests.arrivals.planned.footprint
        llm.loaded._load()
        passing = peak_allocated(lambda: guests.all_served(llm, on_tick=sample), ())
    assert footprint.parts[compute]["shared prefixes"] and held
    assert max(host for host, _ in held) <= footprint.total(HOST)
    assert max(own for _, own in held) <= footprint.total(compute)
    assert passing <= footprint.total(compute) + (footprint.total(HOST) if compute == DEVICE else 0)
