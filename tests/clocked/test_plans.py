"""The contract on the clocked device: tokens and logits of the resident loop, and nothing races with anything else.

Every two values of any two choices meet, in blocks those that have code together, in texts as short as they can be. What
meets nothing new is the first of its choice: so that is what overlaps and offloads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen.core.site import DEVICE, HOST
from h2o_flexgen.formats.kernel_table import EXACT, FLOAT32
from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.planning.plan import BFLOAT16, JUDGED, PINNED
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.schedule.ops import STORE, Op
from tests.clocked.checker import Checker
from tests.clocked.tensor import NAME
from tests.helpers.contract import BY_HEAD, POLICIES, WEIGHTS, Case, Checkpoints, hold_contract
from tests.helpers.held_by_hand import HELD
from tests.helpers.pairwise import ELSEWHERE, most_of
from tests.whole import test_arriving_prefixes as arriving
from tests.whole import test_conversation as talks
from tests.whole import test_shared_prefixes as prefixes
from tests.whole import test_stream as stream
from tests.whole.test_contract import MIXES, TIERS, has_code

FEW = (5, 9, 2)
PLANS = {
    "kind": ("opt", "mixtral", "gpt-oss", "deepseek-v2"),  # all others launch and wait as one of these, so far as is known
    "percent": (MIXES[3], *MIXES[1:3], *MIXES[4:6]),
    "gpu_batch_size": (1, 2),
    "num_gpu_batches": (2, 1),
    "buffers": (2, 1, 3),
    "sep_layer": (True, False),
    "overlap": (True, False),
    "schedule": ("zigzag", "flexgen_barrier", "row_by_row"),
    "policy": (POLICIES[0], POLICIES[1], POLICIES[9], BY_HEAD[0]),
    "prefill_tokens": (1024, 12),
    ("weight_codec", "compute"): (WEIGHTS[0], WEIGHTS[1], WEIGHTS[4]),
    "kv_codec": (PLAIN, "group4"),
    "attend_on": (DEVICE, HOST),
    "held": ((), HELD),
    "streams_are_quick": (False, True),  # tasks are over when they are asked, and are forgotten then
}


@pytest.mark.parametrize("values", most_of(PLANS, has_code, ELSEWHERE))
def test_blocks(values: dict[str, Any], by_twins: Checkpoints, offload: Path, checker: Checker) -> None:
    values = dict(values)
    checker.streams_are_quick = values.pop("streams_are_quick")
    hold_contract(Case(lengths=FEW, gen_len=3, device=NAME, **values), by_twins, offload)


WITH_STATES = {
    ("kind", "state_dtype"): (("lfm2", FLOAT32), ("qwen3-5", FLOAT32), ("qwen3-5", BFLOAT16)),
    "percent": (MIXES[3], *MIXES[1:3]),
    "num_gpu_batches": (2, 1),
    "buffers": (2, 1),
    "schedule": ("zigzag", "row_by_row"),
    "prefill_tokens": (1024, 12),
    "policy": (POLICIES[0], POLICIES[11]),
    "attend_on": (DEVICE, HOST),
    "streams_are_quick": (False, True),
}


@pytest.mark.parametrize("values", most_of(WITH_STATES))
def test_rows_with_states(values: dict[str, Any], by_twins: Checkpoints, offload: Path, checker: Checker) -> None:
    values = dict(values)
    checker.streams_are_quick = values.pop("streams_are_quick")
    hold_contract(Case(lengths=FEW, gen_len=3, device=NAME, **values), by_twins, offload)


@pytest.mark.parametrize("values", most_of({"weights": TIERS, "kv": TIERS, "hidden": TIERS}))
def test_every_tier_for_each_kind_of_data(
    values: dict[str, Any], by_twins: Checkpoints, offload: Path, checker: Checker
) -> None:
    percent = (*values["weights"], *values["kv"], *values["hidden"])
    hold_contract(Case("opt", percent, FEW, 3, policy=POLICIES[1], device=NAME), by_twins, offload)


RUNNING = {
    "kind": ("opt", "llama-gqa"),
    "percent": (MIXES[3], *MIXES[1:3]),
    "num_gpu_batches": (2, 1),
    "buffers": (2, 1, 3),
    "schedule": ("zigzag", "flexgen_barrier"),
    "policy": (POLICIES[0], POLICIES[1], BY_HEAD[0]),
    "prefill_tokens": (1024, 12),
    ("weight_codec", "compute", "kv_codec"): ((*WEIGHTS[0], PLAIN), (*WEIGHTS[1], "group4")),
    "attend_on": (DEVICE, HOST),
    "held": ((), HELD),
}


@pytest.mark.parametrize("values", most_of(RUNNING, share=ELSEWHERE))
def test_rows_that_come_and_go(values: dict[str, Any], by_twins: Checkpoints, offload: Path, checker: Checker) -> None:
    case = Case(lengths=stream.LENGTHS[:5], device=NAME, **values)
    stream.hold_contract(case, (3, 1, 4, 2, 5), by_twins, offload)


SHARING = {
    **RUNNING,
    "percent": MIXES[2:4],
    "buffers": (1, 2),
    "policy": (POLICIES[0], POLICIES[1]),
    "prefix_policy": (PINNED, JUDGED),
}


@pytest.mark.parametrize("values", most_of(SHARING, share=ELSEWHERE))
def test_shared_prefixes(values: dict[str, Any], by_twins: Checkpoints, offload: Path, checker: Checker) -> None:
    case = prefixes.SharedCase(own=prefixes.OWN[:7], growth=(2, 1, 3, 1, 4, 2, 1), device=NAME, **values)
    prefixes.hold_contract(case, by_twins, offload)


ARRIVING = {
    "percent": MIXES[2:4],
    "num_gpu_batches": (1, 2),
    "prefix_policy": (PINNED, JUDGED),
    "attend_on": (DEVICE, HOST),
}


@pytest.mark.parametrize("values", most_of(ARRIVING, share=ELSEWHERE))
def test_prefixes_that_arrive(values: dict[str, Any], by_twins: Checkpoints, offload: Path, checker: Checker) -> None:
    policy = POLICIES[0] if values["prefix_policy"] == PINNED else POLICIES[2]
    case = arriving.ArrivingCase("llama-gqa", growth=(2, 1, 3, 1, 4, 2, 1, 3, 2, 1), policy=policy, device=NAME, **values)
    arriving.hold_contract(case, by_twins, offload, room=80, at_once=2)


TALKS = {
    "kind": ("opt", "llama-gqa"),
    "percent": (MIXES[1], MIXES[2], MIXES[3]),
    "buffers": (1, 2),
    "policy": (POLICIES[0], POLICIES[1], talks.ROLLING),
    "prefill_tokens": (1024, 4),
    ("weight_codec", "compute"): ((PLAIN, EXACT), WEIGHTS[1]),
    "attend_on": (DEVICE, HOST),
}


@pytest.mark.parametrize("values", most_of(TALKS, share=ELSEWHERE))
def test_conversations(values: dict[str, Any], by_twins: Checkpoints, offload: Path, checker: Checker) -> None:
    if values["policy"] == talks.ROLLING:
        values = {**values, "kind": "llama-gqa", "prefill_tokens": 6}
    talks.hold_contract(Case(device=NAME, **values), by_twins, offload)


PIPELINES = {
    "kind": ("opt", "llama-gqa"),
    "percent": MIXES,
    "num_gpu_batches": (1, 2, 3),
    "buffers": (1, 2, 3),
    "policy": (POLICIES[0], POLICIES[2]),
    "prefill_tokens": (1024, 12),
    ("weight_codec", "compute"): (WEIGHTS[0], WEIGHTS[1]),
}


@pytest.mark.parametrize("values", most_of(PIPELINES, share=ELSEWHERE))
def test_pipelines(values: dict[str, Any], by_twins: Checkpoints, offload: Path, checker: Checker) -> None:
    values = {**values, "policy": (*values["policy"], ("pipeline", 2))}
    hold_contract(Case(lengths=FEW, gpu_batch_size=1, gen_len=3, device=NAME, **values), by_twins, offload)
    assert any(task.startswith("PASS_H") for task in checker.tasks) == (values["percent"][4] > 0)


BESIDE_THE_KV = {
    "kind": ("opt", "llama-gqa"),
    "percent": ((0, 100, 0, 100, 0, 100), (100, 0, 0, 100, 100, 0), (30, 30, 20, 50, 40, 30)),
    "num_gpu_batches": (1, 2),
    "schedule": ("zigzag", "flexgen_barrier", "row_by_row"),
    "policy": [(("attend_on", "host"), *policy) for policy in (POLICIES[0], POLICIES[1])],
    "kv_codec": (PLAIN, "group4"),
}
BY_PART = {  # prompts of four rows in four parts, which wait for each other's places
    "percent": (*BESIDE_THE_KV["percent"], (0, 0, 0, 0, 0, 0)),
    "buffers": (2, 1, 3),
    "schedule": BESIDE_THE_KV["schedule"],
    "policy": (POLICIES[0], POLICIES[1], POLICIES[11], BY_HEAD[0]),
    "kv_codec": (PLAIN, "group4"),
    "gen_len": (3, 1),
}


@pytest.mark.parametrize("values", most_of(BESIDE_THE_KV))
def test_attention_on_the_host(values: dict[str, Any], by_twins: Checkpoints, offload: Path, checker: Checker) -> None:
    hold_contract(Case(lengths=FEW, gen_len=3, device=NAME, **values), by_twins, offload)
    assert any(task.startswith("ATTEND") for task in checker.tasks)


@pytest.mark.parametrize("values", most_of(BY_PART, share=ELSEWHERE))
def test_prompts_go_home_part_by_part(values: dict[str, Any], by_twins: Checkpoints, offload: Path, checker: Checker) -> None:
    how = {"gpu_batch_size": 4, "prefill_tokens": 3, "attend_on": HOST}
    hold_contract(Case("llama-gqa", lengths=(3, 2, 5, 1, 4), device=NAME, **how, **values), by_twins, offload)


@pytest.mark.parametrize("policy", [POLICIES[0], POLICIES[1]])
def test_a_device_has_room_for_two_parts_of_prompts_alone(
    policy: tuple[tuple[str, Any], ...], by_twins: Checkpoints, offload: Path, checker: Checker
) -> None:
    """Texts are so long that two parts take more than a page, which is the least that is allocated."""
    how: Any = {"gpu_batch_size": 4, "prefill_tokens": 40, "attend_on": HOST, "device": NAME, "policy": policy}
    hold_contract(Case("llama-gqa", (100, 0, 0, 100, 100, 0), (30, 24, 45, 38, 27), 3, **how), by_twins, offload)


def test_each_part_on_its_way_is_in_the_trace(by_twins: Checkpoints, offload: Path, checker: Checker) -> None:
    """Four parts of a batch: three go while the next one is computed, and the last when all are."""
    how = {"gpu_batch_size": 4, "num_gpu_batches": 1, "prefill_tokens": 1, "attend_on": HOST}
    case = Case("opt", (100, 0, 0, 100, 100, 0), (3, 2, 4, 2), 2, device=NAME, **how)  # type: ignore[arg-type]
    with case.open(by_twins, offload) as llm:
        llm.generate(case.prompts, SamplingParams(max_tokens=case.gen_len, ignore_eos=True))
        assert llm.stats is not None
        spans = [span for span in llm.stats.last_block.trace.spans if span.key.op is Op.STORE_KV]
        layers, slot = len(llm.spec.kv_layers), llm.spec.kv_bytes_per_slot
    assert len(spans) == 4 * layers and {span.lane for span in spans} == {STORE}
    assert {span.bytes for span in spans} == {5 * slot}, "all slots of a row"
