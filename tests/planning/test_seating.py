"""Seating: which row has a seat in which pass is foreseen as it comes, and with it what is computed and moved."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from h2o_flexgen.core.seats import SeatNeed
from h2o_flexgen.core.site import Site
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.engine.generate import Stream, job_of
from h2o_flexgen.engine.job import Request
from h2o_flexgen.engine.reports import Tick
from h2o_flexgen.llm import LLM
from h2o_flexgen.planning.batch_pass import tokens_of
from h2o_flexgen.planning.block_plan import BlockPlan, BlockPlans
from h2o_flexgen.planning.cost import Cost
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.schedule import SCHEDULES
from h2o_flexgen.schedule.check import check
from h2o_flexgen.schedule.ops import Data, Key
from tests.helpers.contract import Case, Checkpoints, distinct_prompts
from tests.helpers.pairwise import on_devices
from tests.planning.worlds import tiny_spec

ALL_ON_DISK, MIXED, IN_MEMORY = (0, 0, 0, 0, 0, 0), (30, 30, 20, 30, 40, 30), (0, 100, 0, 100, 0, 100)
H2O = (("kv_policy", "h2o"), ("heavy", 3), ("recent", 4))
PROMPT_ONLY = (*H2O, ("hh_prompt_only", True))
BY_SHARE = (("kv_policy", "h2o"), ("hh_ratio", 0.5))
JUDGED = (*H2O, ("prefix_policy", "judged"))
KVZIP = (("kv_policy", "kvzip"), ("heavy", 3), ("recent", 4))


def requests(random: Random, header: int) -> list[Request]:
    """Prompts of many lengths, most of which begin alike if there is a header, and rows of which many end early."""
    lengths = [random.randint(2, 20) for _ in range(random.randint(1, 10))]
    own, common = distinct_prompts(lengths), [7] * header
    prompts = [common * (random.random() < 0.7) + ids for ids in own]
    growths = [random.choice([1, 2, 5, random.randint(1, 16)]) for _ in prompts]
    return [Request(ids, SamplingParams(max_tokens=most, ignore_eos=True)) for ids, most in zip(prompts, growths)]


def cost_of(llm: LLM, job: list[Request]) -> Cost:
    stream = Stream(job_of(job, llm.row_maker), llm.row_maker, streamed=False)
    return Cost(llm.planned(stream.workload).blocks.first)


JOBS = {
    "policy": [(), H2O, PROMPT_ONLY, BY_SHARE, JUDGED, KVZIP],
    "percent": [ALL_ON_DISK, MIXED, IN_MEMORY],
    "header": [0, 40],
}


@pytest.mark.parametrize("values", on_devices(JOBS))
def test_passes_tokens_and_bytes_are_those_of_a_run(
    values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    header = values["header"]
    random = Random(str((header, values["percent"], values["policy"])))
    shape = {"gpu_batch_size": random.randint(1, 4), "num_gpu_batches": random.randint(1, 3), "buffers": random.randint(1, 3)}
    plan = {name: values[name] for name in ("percent", "policy", "device")}
    case = Case("llama-gqa", prefill_tokens=random.choice([8, 4096]), **plan, **shape)
    job, ticks = requests(random, header), list[Tick]()
    with case.open(checkpoints, offload, trace=True) as llm:
        cost = cost_of(llm, job)
        assert len(list(llm.generate_stream(job, on_tick=ticks.append))) == len(job)
        assert llm.stats is not None
        spans = llm.stats.last_block.trace.spans
    batches = range(len(cost.block.batches))

    def is_there(key: Key) -> bool:
        return key.step < cost.passes and tokens_of(cost.batch_pass(key.step, key.batch)) > 0

    assert ticks[-1].number == cost.passes
    tokens = [sum(tokens_of(cost.batch_pass(number, batch)) for batch in batches) for number in range(cost.passes)]
    computed = [tick.computed_tokens for tick in ticks]
    assert tokens == [after - before for before, after in zip([0, *computed], computed)]
    assert {
        number for number, tick in enumerate(ticks) if tick.prompt_tokens > sum_before(ticks, number)
    } == cost.seating.reading
    last = {(key.step, key.batch) for key, *_ in spans if is_there(key) and not is_there(key._replace(step=key.step + 1))}
    for key, _, _, _, moved in spans:
        if is_there(key) and key.op.data in (Data.KV, Data.HIDDEN):
            # what the last pass of a batch stores is not wanted, but for those that do not know yet that it is the last
            wanted = (0, cost.nbytes(key)) if key.op.stores and (key.step, key.batch) in last else (cost.nbytes(key),)
            assert moved in wanted, key
        elif not is_there(key) and key.op.stores:  # before a batch has ended, some is fetched for one pass more
            assert moved == 0, key


def sum_before(ticks: list[Tick], number: int) -> int:
    return ticks[number - 1].prompt_tokens if number else 0


# -- schedules ---------------------------------------------------------------------------------------------------------------


def block_of(seed: int, schedule: str, batches: int) -> BlockPlan:
    random = Random(seed)
    needs = [SeatNeed(random.randint(1, 9), random.randint(0, 2)) for _ in range(random.randint(batches, 6))]
    shape = {"gpu_batch_size": random.randint(1, 2), "num_gpu_batches": batches, "buffers": random.randint(1, 3)}
    percent = tuple(share for _ in range(3) for share in random.choice([(0, 0), (30, 30), (0, 100), (100, 0)]))
    accelerator = random.random() < 0.5
    plan = Plan.create(schedule=schedule, **shape).with_percent(percent).at(Site(accelerator))
    return BlockPlans.of(tiny_spec(), plan, Workload.running(needs), Site(accelerator)).first


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(8))
def test_the_schedule_of_a_running_block_is_sound(seed: int, schedule: str) -> None:
    batches = 1 + seed % 3 if SCHEDULES[schedule].keeps_step else 1
    of = block_of(seed, schedule, batches)
    assert of.block.is_running and Cost(of).passes < of.schedule.traffic.steps
    check(of.schedule)


def test_rows_do_not_join_batches_that_run_one_after_the_other() -> None:
    with pytest.raises(ValueError, match=r"'row_by_row' runs one batch .* give num_gpu_batches=1, or schedule='zigzag'"):
        block_of(0, "row_by_row", 2)
