"""A pipeline of layer ranges over several devices: the contract, what each holds and moves, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from h2o_flexgen.core.site import Site
from h2o_flexgen.core.tiers import DEVICE
from h2o_flexgen.core.workload import Batch, Workload
from h2o_flexgen.engine.parts_there import PartsThere
from h2o_flexgen.engine.rows import Part
from h2o_flexgen.kv.step import KVStep
from h2o_flexgen.llm import LLM
from h2o_flexgen.memory.device import Device
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.planning.footprint import footprint
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.sections import device_of_layers, only_layers
from h2o_flexgen.policies.policy import KVPolicy
from h2o_flexgen.quant.codec import PLAIN
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.schedule.check import check
from h2o_flexgen.schedule.ops import COMPUTE_LANE
from tests.contract import POLICIES, WEIGHTS, Case, Checkpoints, generate_with, hold_contract
from tests.pairwise import covering
from tests.planning.test_cost import assert_moved_as_predicted
from tests.planning.worlds import tiny_spec
from tests.test_contract import EQUAL, MANY, MIXES, RAGGED

CHOICES = {
    "kind": ("opt", "llama-gqa", "neox-parallel", "opt-350m"),
    "percent": MIXES,
    "lengths": (RAGGED, EQUAL, MANY),
    "gpu_batch_size": (1, 2, 3),
    "num_gpu_batches": (1, 2, 3),
    "slots": (1, 2, 3),
    "sep_layer": (True, False),
    "policy": POLICIES,
    "prefill_tokens": (1024, 12),
    ("weight_codec", "compute"): WEIGHTS,
    "kv_codec": (PLAIN, "group4", "group8"),
}
TWO = (("pipeline", 2),)


def on(devices: int, **values: Any) -> Case:
    policy = (*values.pop("policy", ()), ("pipeline", devices))
    return Case(policy=policy, device="pretended", **values)


@pytest.mark.parametrize("values", list(covering(CHOICES)))
def test_tokens_and_logits_equal_the_resident_loop_for_every_pair_of_choices(
    values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    hold_contract(on(2, **values), checkpoints, offload)


@pytest.mark.parametrize("percent", MIXES[:4])
def test_as_many_devices_as_decoder_layers(
    percent: tuple[int, ...], checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    case = on(BLOCKS, percent=percent, lengths=RAGGED, gpu_batch_size=1, num_gpu_batches=4, gen_len=5)
    hold_contract(case, checkpoints, offload)


def test_one_llm_generates_again_and_rows_may_end_early(checkpoints: Checkpoints, offload: Path, pretended: None) -> None:
    case = on(2, percent=MIXES[3], lengths=MANY, num_gpu_batches=3, gen_len=6)
    alone = replace(case, policy=())
    params = [SamplingParams(max_tokens=1 + row % 6, logprobs=2, prompt_logprobs=1) for row in range(len(MANY))]
    found = []
    for one in (case, alone):
        with one.open(checkpoints, offload) as llm:
            for _ in range(2):
                found.append([(each.token_ids, each.text) for each in llm.generate(one.prompts, params)])
    assert found[0] == found[1] == found[2] == found[3]


def test_listeners_are_called_in_the_callers_thread(checkpoints: Checkpoints, offload: Path, pretended: None) -> None:
    case, heard = on(2, num_gpu_batches=3), []
    with case.open(checkpoints, offload) as llm:
        llm.generate(case.prompts, SamplingParams(max_tokens=4), on_visit=lambda task, _: heard.append((task, get_ident())))
        visits = llm.planned(Workload(case.lengths, 4)).blocks.visits
    assert len(heard) == len({task.key for task, _ in heard if task.step == 0}) * 4 == visits
    assert {thread for _, thread in heard} == {get_ident()}


def test_an_error_on_any_device_comes_out_and_leaves_no_thread(
    checkpoints: Checkpoints, offload: Path, pretended: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, views = on(2, num_gpu_batches=2), WeightStore.views

    def failing(store: WeightStore, visit: Visit) -> Any:
        if visit.step == 1 and visit.layer == 1:
            raise ZeroDivisionError("seven")
        return views(store, visit)

    with case.open(checkpoints, offload) as llm:
        before = active_count()
        monkeypatch.setattr(WeightStore, "views", failing)
        with pytest.raises(TaskFailed, match=r"seven \(while running COMPUTE 1.1.0\)"):
            llm.generate(case.prompts, SamplingParams(max_tokens=4))
        monkeypatch.undo()
        with pretend():
            llm.generate(case.prompts, SamplingParams(max_tokens=4))
        assert not [one for one in enumerate_threads() if one.name.startswith("lane-")] and active_count() <= before + 8


# -- what each device holds and moves --------------------------------------------------------------------------------------


@pytest.mark.parametrize("percent", [(0, 0, 0, 0, 0, 0), (30, 30, 20, 30, 40, 30), (100, 0, 100, 0, 100, 0)])
def test_a_run_moves_the_bytes_that_are_predicted(
    percent: tuple[float, ...], checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    moved = assert_moved_as_predicted(on(2, percent=percent, lengths=RAGGED, num_gpu_batches=3), checkpoints, offload)
    assert ("pass" in moved) == (percent[-2:] != (0, 0))


@pytest.mark.parametrize("percent", MIXES)
def test_every_device_holds_what_its_footprint_says(
    percent: tuple[int, ...], checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    case = on(2, kind="llama-gqa", percent=percent, num_gpu_batches=3, lengths=(6,) * 6, weight_codec="group4")
    with case.open(checkpoints, offload) as llm:
        planned = llm.planned(Workload(case.lengths, case.gen_len)).blocks.first
        generate_with(llm, case)
        assert llm._memories is not None
        for section, memories in zip(planned.sections, llm._memories.of_devices, strict=True):
            held = footprint(replace(planned, spec=section.spec, schedule=section.schedule), llm.site)
            laid_out = {"weights", "weight slots", "KV", "KV slots", "KV notes", "activation slots", "decoded weights"}
            assert memories.compute.meter.peak_bytes == held.parts[DEVICE]
