"""A pipeline of layer ranges over several devices: the contract, what each holds and moves, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from threading import active_count, get_ident
from threading import enumerate as enumerate_threads
from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_flexgen.core.site import DEVICE, Site
from h2o_flexgen.core.workload import Batch, Workload
from h2o_flexgen.engine.executor import TaskFailed
from h2o_flexgen.engine.rows import PartsThere, RowsPart
from h2o_flexgen.engine.stores.weights import WeightStore
from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.kv.step import KVStep
from h2o_flexgen.memory.device import Device
from h2o_flexgen.planning.placement import device_of_layers, layers_of, only_layers
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.predict import predict
from h2o_flexgen.planning.workload_plan import WorkloadPlan
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.schedule.ops import Visit
from tests.helpers.contract import UNLIKE, WEIGHTS, Case, Checkpoints, generate_with, hold_contract
from tests.helpers.pairwise import ELSEWHERE, most_of
from tests.helpers.pretended import pretend
from tests.helpers.tiny import BLOCKS
from tests.planning.test_cost import assert_moved_as_predicted
from tests.planning.test_footprint import NOT_IN_ARENAS, PAGE
from tests.planning.test_pricing import MACHINE
from tests.planning.test_pricing import on as on_machine
from tests.planning.worlds import tiny_spec
from tests.whole.test_contract import EQUAL, MANY, MIXES, RAGGED, has_code_elsewhere

CHOICES = {
    "kind": ("opt", "llama-gqa", "opt-350m", "gpt-oss", "qwen2-near", "deepseek-v3"),
    "percent": MIXES,
    "lengths": (RAGGED, EQUAL, MANY),
    "gpu_batch_size": (1, 2, 3),
    "num_gpu_batches": (1, 2, 3),
    "buffers": (1, 2, 3),
    "sep_layer": (True, False),
    "policy": UNLIKE[:8],
    "prefill_tokens": (1024, 12),
    ("weight_codec", "compute"): WEIGHTS,
    "kv_codec": (PLAIN, "group4", "group8"),
}


def on(devices: int, **values: Any) -> Case:
    policy = (*values.pop("policy", ()), ("pipeline", devices))
    return Case(policy=policy, device="pretended", **values)


@pytest.mark.parametrize("values", most_of(CHOICES, has_code_elsewhere, ELSEWHERE))
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
        parts = llm.planned(Workload(case.lengths, case.gen_len)).footprint
        generate_with(llm, case)
        assert llm.loaded._memories is not None
        for held, memories in zip(parts.devices, llm.loaded._memories.of_devices, strict=True):
            predicted = sum(nbytes for name, nbytes in held.items() if name not in (*NOT_IN_ARENAS, "activations"))
            peak = memories.compute.meter.peak_bytes
            assert 0 < peak <= predicted <= 1.3 * peak + PAGE * 40, held
        assert parts.total(DEVICE) == max(sum(held.values()) for held in parts.devices)


def test_layers_are_cut_in_front_of_attentions_and_weigh_about_the_same() -> None:
    spec = tiny_spec(blocks=6)
    for devices in (2, 3, 6):
        device_of = device_of_layers(spec, devices)
        starts = [device_of.index(device) for device in range(devices)]
        assert list(device_of) == sorted(device_of) and all(start in (0, *spec.kv_layers) for start in starts)
        values = [0.0] * devices
        for layer, device in zip(spec.layers, device_of, strict=True):
            values[device] += layer.matmul_values
        block = sum(layer.matmul_values for layer in spec.layers[1:3])
        assert max(values) - min(values) <= block, devices
    assert device_of_layers(spec, 1) == ()


def test_sections_have_all_tensors_between_them_and_a_tied_one_twice() -> None:
    spec = tiny_spec(blocks=3)
    device_of = device_of_layers(spec, 3)
    sections = [only_layers(spec, layers_of(device_of, device)) for device in range(3)]
    names = [name for section in sections for name in section.tensors]
    assert set(names) == set(spec.tensors) and sorted(names) == sorted([*spec.tensors, "embed"])
    assert [layer for section in sections for layer in section.kv_layers] == list(spec.kv_layers)


def test_two_devices_are_predicted_to_be_faster_than_one() -> None:
    """With as many batches; and with one they are not."""
    spec, machine = tiny_spec(blocks=8, width=256), on_machine(MACHINE, True)
    for batches, least, most in ((4, 1.4, 2.1), (1, 0.8, 1.05)):
        workload = Workload((16,) * 4 * batches, 12)
        one, two = (
            predict(WorkloadPlan(spec, Plan(4, batches, pipeline=devices), workload, Site(accelerator=True)), machine)
            for devices in (1, 2)
        )
        assert least < one.total_seconds / two.total_seconds < most, batches


# -- what another device has of a step -------------------------------------------------------------------------------------


def test_what_a_step_has_is_brought_to_another_device_once() -> None:
    now = KVStep.of(Plan().policy.occupancy(Batch((0, 1), (3, 2)), 4).at(1), 8, torch.device("cpu"))
    part = RowsPart(slice(None), (now,), torch.zeros(2, 1, dtype=torch.long))
    parts = PartsThere(FarDevice())
    brought = parts.of(0, part)
    assert brought.tokens.device.type == brought.now.counts.device.type == "meta"
    assert parts.of(0, part) is brought and parts.of(1, part) is not brought
    assert parts.of(0, replace(part)) is not brought


class FarDevice(Device):
    """A device with memory of its own, where values are of no interest."""

    def __init__(self) -> None:
        super().__init__()
        self.torch_device = torch.device("meta")

    def upload(self, values: Tensor, device: torch.device) -> Tensor:
        return values.to(device)


# -- what is refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": "row_by_row"}, "order of its own"),
        ({"attend_on": "host"}, "attends where it computes"),
        ({"graphs": "on"}, "for a single GPU"),
        ({"pipeline": 0}, "pipeline"),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused_in_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        Plan.create(**{"pipeline": 2, **options})
    assert "\n" not in str(caught.value)


def test_more_devices_than_decoder_layers_are_refused(checkpoints: Checkpoints, offload: Path, pretended: None) -> None:
    with on(BLOCKS + 1).open(checkpoints, offload) as llm, pytest.raises(ValueError, match="has 3 decoder layers"):
        llm.generate([[1, 2]])


def test_rows_that_come_and_go_and_conversations_are_refused(checkpoints: Checkpoints, offload: Path, pretended: None) -> None:
    with on(2).open(checkpoints, offload) as llm:
        with pytest.raises(ValueError, match="not for rows that come and go"):
            list(llm.generate_stream([[1, 2]]))
        with pytest.raises(ValueError, match="not for a text that continues turn by turn"):
            llm.converse()


def test_a_machine_without_so_many_devices_refuses(checkpoints: Checkpoints, offload: Path, pretended: None) -> None:
    with pytest.raises(ValueError, match="a pipeline of 2 devices was asked for, and there is no GPU"):
        replace(on(2), device="cpu").open(checkpoints, offload)
    with pytest.raises(ValueError, match="none is searched for it"):
        on(2, percent="auto").open(checkpoints, offload)
