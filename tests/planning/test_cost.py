"""Cost: the bytes that it predicts are the bytes that a run moves; seconds follow from them and from a machine."""

from __future__ import annotations

import os
from collections import Counter
from math import ceil
from pathlib import Path
from random import Random
from typing import Any

import pytest

from h2o_flexgen.core.site import Site
from h2o_flexgen.core.workload import Block, Workload
from h2o_flexgen.llm import LLM
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.planning.cost import Cost, by_lane
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.policies.recall import FIRST, NEWEST, RECENT, Choosing
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.schedule import SCHEDULES
from h2o_flexgen.schedule.ops import Op, Task
from tests.helpers.contract import POLICIES, UNLIKE, Case, Checkpoints
from tests.helpers.pairwise import ELSEWHERE, in_turn, on_devices
from tests.helpers.samples import every_nth, spread
from tests.planning.worlds import block_of, last_block_of, tiny_spec

ALL_ON_DISK, MIXED, WEIGHTS_ON_DISK = (0, 0, 0, 0, 0, 0), (30, 30, 20, 30, 40, 30), (0, 0, 100, 0, 100, 0)
RAGGED = (5, 9, 2, 7, 4, 11, 3)


def cost_of(llm: LLM, block: Block) -> Cost:
    return Cost(BlockPlan.of(llm.spec, llm.plan, block, llm.loaded.site))


def predicted(llm: LLM, case: Case) -> Counter[str]:
    total: Counter[str] = Counter()
    for block in Workload(case.lengths, case.gen_len).blocks(case.gpu_batch_size, case.num_gpu_batches):
        total.update(by_lane(cost_of(llm, block).op_bytes()))
    return total


def assert_moved_as_predicted(case: Case, checkpoints: Checkpoints, offload: Path) -> Counter[str]:
    with case.open(checkpoints, offload) as llm:
        llm.generate(case.prompts, SamplingParams(max_tokens=case.gen_len))
        assert llm.stats is not None
        moved = Counter({lane: nbytes for lane, nbytes in llm.stats.moved_bytes.items() if nbytes})
        assert moved + Counter(llm.stats.skipped_bytes) == predicted(llm, case), case
    return moved


RUNS = {"schedule": tuple(SCHEDULES), "percent": (ALL_ON_DISK, MIXED, WEIGHTS_ON_DISK)}


@pytest.mark.parametrize("values", on_devices(RUNS, share=ELSEWHERE))
def test_a_run_moves_the_bytes_that_are_predicted_lane_by_lane(
    values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    case = Case("llama-gqa", lengths=RAGGED, num_gpu_batches=3, **values)
    moved = assert_moved_as_predicted(case, checkpoints, offload)
    assert moved["read"] > 0


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("kind", "policy"),
    every_nth(
        spread([("gpt-oss", POLICIES[1]), ("gpt-oss", POLICIES[0]), ("llama-gqa", POLICIES[16]), ("llama-gqa", POLICIES[3])]), 2
    ),
)
def test_what_the_host_attends_moves_questions_answers_and_prompts(
    kind: str,
    policy: tuple[tuple[str, object], ...],
    schedule: str,
    checkpoints: Checkpoints,
    offload: Path,
    pretended: None,
) -> None:
    how = {"schedule": schedule, "policy": policy, "attend_on": "host"}
    case = Case(kind, MIXED, RAGGED, num_gpu_batches=3, device="pretended", **how)  # type: ignore[arg-type]
    assert assert_moved_as_predicted(case, checkpoints, offload)["attend"] > 0


@pytest.mark.parametrize(
    ("kind", "sep_layer"),
    [
        ("opt", True),
        ("opt", False),
        ("opt-350m", True),
        ("qwen2", False),
        ("neox-parallel", True),
        ("gpt-oss", False),
        ("deepseek-v3", True),
    ],
)
def test_tied_and_projected_models_too(kind: str, sep_layer: bool, checkpoints: Checkpoints, offload: Path) -> None:
    assert_moved_as_predicted(Case(kind, ALL_ON_DISK, RAGGED, sep_layer=sep_layer), checkpoints, offload)


@pytest.mark.parametrize(("stored", "dtype"), [("float16", "float32"), ("bfloat16", "float32"), ("float32", "bfloat16")])
def test_reads_are_as_large_as_what_is_stored_and_loads_as_what_is_computed_with(
    stored: str, dtype: str, any_device: str, checkpoints: Checkpoints, offload: Path
) -> None:
    case = Case("llama-gqa", WEIGHTS_ON_DISK, RAGGED, device=any_device, stored=stored, dtype=dtype)
    moved = assert_moved_as_predicted(case, checkpoints, offload)
    if "load" in moved:
        assert moved["load"] / moved["read"] == (2 if dtype == "float32" else 0.5)


def test_the_bytes_really_go_over_the_disk(checkpoints: Checkpoints, offload: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted where the system is called: a run that kept things in memory would say the same and read less."""
    went: Counter[str] = Counter()
    read, write = os.preadv, os.pwrite

    def counted_read(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = read(descriptor, buffers, offset)
        went["read"] += count
        return count

    def counted_write(descriptor: int, source: memoryview, offset: int) -> int:
        count = write(descriptor, source, offset)
        went["write"] += count
        return count

    monkeypatch.setattr(os, "preadv", counted_read)
    monkeypatch.setattr(os, "pwrite", counted_write)
    case = Case("opt", ALL_ON_DISK, (60, 50, 40, 30), gpu_batch_size=4, num_gpu_batches=1)
    moved = assert_moved_as_predicted(case, checkpoints, offload)
    assert went["read"] >= moved["read"] + moved["load"]  # hidden states are loaded from disk
    assert went["write"] >= moved["write"] + moved["store"]


@pytest.mark.parametrize("values", in_turn({"policy": UNLIKE}, nth=3))
def test_the_budget_of_a_policy_is_what_is_moved(
    values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    assert_moved_as_predicted(Case("llama-gqa", ALL_ON_DISK, (12, 9, 2), gen_len=6, **values), checkpoints, offload)


def test_nothing_is_moved_when_all_rests_where_it_is_computed_with(checkpoints: Checkpoints, offload: Path) -> None:
    assert assert_moved_as_predicted(Case(percent=(0, 100, 0, 100, 0, 100)), checkpoints, offload) == {}


# -- without a run -------------------------------------------------------------------------------------------------------


def tiny_cost(block: Block, accelerator: bool = True, **options: object) -> Cost:
    spec, plan = tiny_spec(), Plan.create(**options).with_percent((0, 50, 0, 0, 0, 50))
    return Cost(BlockPlan.of(spec, plan, block, Site(accelerator)))


def test_kv_bytes_by_hand() -> None:
    cost = tiny_cost(block_of([[4, 2], [3, 3]]))
    per_slot = cost.spec.kv_bytes_per_slot
    layer = cost.spec.kv_layers[0]
    assert cost.nbytes(Task(Op.STORE_KV, 0, layer, 0)) == 2 * 4 * per_slot  # the whole padded prompt of two rows
    assert (
        cost.nbytes(Task(Op.WRITE_KV, 1, layer, 0)) == 2 * (5 - 2) * per_slot
    )  # from the shortest row's token to the longest's
    assert cost.nbytes(Task(Op.WRITE_KV, 1, layer, 1)) == 2 * 1 * per_slot  # equal rows: one token
    assert cost.nbytes(Task(Op.READ_KV, 1, layer, 0)) == 2 * 4 * per_slot
    assert cost.nbytes(Task(Op.LOAD_KV, 2, layer, 0)) == 2 * 5 * per_slot


def test_hidden_bytes_by_hand() -> None:
    cost = tiny_cost(block_of([[4, 2]]))
    assert cost.nbytes(Task(Op.STORE_H, 0, 1, 0)) == 2 * 4 * cost.spec.width * 4
    assert cost.nbytes(Task(Op.LOAD_H, 1, 1, 0)) == 2 * 1 * cost.spec.width * 4


def test_slices_of_a_layer_add_up_to_what_it_stores() -> None:
    cost = tiny_cost(block_of([[4, 2], [3, 3], [1, 1]]))
    reads = [task for task in cost.schedule.tasks() if task.op is Op.READ_W and task.step == 0]
    assert sum(cost.nbytes(task) for task in reads) == pytest.approx(sum(cost.stored_bytes(0)))
    assert 0 < sum(cost.stored_bytes(0)) < sum(cost.loaded_bytes(0))  # half of the model rests in host memory


@pytest.mark.parametrize("accelerator", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("heavy", [None, 3])
@pytest.mark.parametrize("block", [block_of([[4, 2], [3, 3], [5]]), last_block_of(20, (4, 1, 7))], ids=["new", "lives on"])
def test_the_sums_of_a_block_are_those_of_its_tasks(schedule: str, accelerator: bool, heavy: int | None, block: Block) -> None:
    policy = {"kv_policy": "h2o", "heavy": heavy} if heavy else {}
    cost = tiny_cost(block, accelerator, schedule=schedule, **policy)
    moved: Counter[Op] = Counter()
    for task in cost.schedule.tasks():
        moved[task.op] += cost.nbytes(task)  # type: ignore[assignment]
    assert +cost.op_bytes() == {op: round(nbytes) for op, nbytes in moved.items() if nbytes}
    assert cost.op_bytes() == cost.op_bytes_until(lambda task: False)


# -- tokens that steps choose ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recent", [RECENT, NEWEST])
@pytest.mark.parametrize(("share", "heads"), [(0.1, 8), (0.2, 1), (0.02, 4), (0.5, 4)])
@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 30])
def test_page_groups_that_come_are_those_with_any_chosen_token(tokens: int, share: float, heads: int, recent: int) -> None:
    """Counted for tokens that are drawn."""
    held, random, found, choosing = 2001, Random(1), list[int](), Choosing(share, heads, in_order=recent == RECENT)
    others = round(choosing.usually_brought(held)) - (FIRST + recent - 1)
    for _ in range(20):
        chosen = [*range(FIRST), *random.sample(range(FIRST, held - recent), others), *range(held - recent, held - 1)]
        found.append(len({token // tokens for token in chosen}))
    assert choosing.page_groups_brought(held, tokens) == pytest.approx(sum(found) / len(found), rel=0.02, abs=0.5)


def test_heads_that_hold_other_tokens_bring_what_any_of_them_draws() -> None:
    choosing, random, found = Choosing(0.1, 8, in_order=False), Random(2), list[int]()
    for _ in range(20):
        drawn = (random.sample(range(FIRST, 2000), 201 - FIRST - NEWEST) for _ in range(8))
        found.append(FIRST + len({token for own in drawn for token in own}))
    assert choosing.usually_brought(2001) == pytest.approx(sum(found) / len(found), rel=0.02)
    assert max(found) < choosing.most_brought(2001) == 4 + 8 * 196


def test_of_what_steps_want_a_sixth_comes_where_what_was_read_stays() -> None:
    every, others = Choosing(0.1, 3), Choosing(0.1, 3, reuses=True)
    always = FIRST + RECENT - 1
    assert others.usually_brought(2001) == pytest.approx((every.usually_brought(2001) - always) / 6)
    assert others.most_brought(2001) == every.most_brought(2001), "the first step has nothing"
    assert others.page_groups_brought(2001, 1) == pytest.approx(others.usually_brought(2001))
    assert 0.1 < others.page_groups_brought(2001, 8) / every.page_groups_brought(2001, 8) < 0.5
    assert [others.page_groups_brought(*asked) for asked in ((1, 8), (2, 8), (2, 1))] == [0, 7 / 8, 0]
    assert [others.usually_brought(held) for held in (1, 2)] == [0, 0], "newest tokens are where steps have made them"
    assert others.kept(2001) == ceil(2 * every.usually_brought(2001)) + 1 and others.kept(12) == 12


def test_one_page_group_comes_at_least_and_all_at_most() -> None:
    tenth = Choosing(0.1, 2)
    assert [tenth.page_groups_brought(*asked) for asked in ((1, 8), (6, 8), (40, 80))] == [0, 1, 1]
    assert Choosing(0.9, 8).page_groups_brought(401, 4) == pytest.approx(100, rel=1e-3)
