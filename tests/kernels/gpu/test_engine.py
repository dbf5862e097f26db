"""The contract, held by the engine on kernels for GPUs: on a GPU, or on a pretended one whose processor has Triton.

What is interpreted is slow: several rows of packed weights take more than a minute here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from h2o_flexgen.formats.kernel_table import CUDA, INT8, TRITON, Processor
from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.kernels import operations
from h2o_flexgen.kernels.gpu import functions
from tests.delayed.declared import WRITTEN, only_read
from tests.helpers.contract import Case, Checkpoints, hold_contract
from tests.helpers.samples import slow


@pytest.fixture(scope="module")
def own_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Other kernels, other last bits: results of the resident loop are not shared with other tests."""
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture
def called(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The names of the kernels in Triton that were called, with a processor that has them."""
    names: set[str] = set()

    def noted(name: str) -> object:
        def call(*given: object) -> object:
            names.add(name)
            function = functions.FUNCTIONS[name]
            before = [(one, one.nan_to_num()) for one in only_read(name, function, given)]
            outcome = function(*given)
            is_as_before = (torch.equal(one.nan_to_num(), was) for one, was in before)
            assert all(is_as_before), f"{name} writes what it is said to read"
            return outcome

        return call

    if gpu.type != CUDA:
        monkeypatch.setattr(operations, "processor", lambda _: Processor(CUDA, TRITON))
    monkeypatch.setattr("h2o_flexgen.kernels.functions._for_gpus", lambda: {name: noted(name) for name in functions.FUNCTIONS})
    yield names


SHORT = {"lengths": (4, 2), "gen_len": 3, "gpu_batch_size": 1, "device": "pretended"}
ONE_ROW = SHORT | {"lengths": (4,), "gen_len": 2, "num_gpu_batches": 1}
H2O, STREAMING = (("kv_policy", "h2o"), ("heavy", 1), ("recent", 2)), (("kv_policy", "streaming"), ("sinks", 1), ("recent", 2))
CASES = (
    Case(**SHORT, percent=(0, 100, 0, 100, 0, 100), policy=H2O),
    slow(Case("llama-gqa", **SHORT, percent=(0, 100, 50, 0, 100, 0), kv_codec="group4", weight_codec="group4")),
    slow(Case("llama-gqa", **SHORT, percent=(100, 0, 0, 100, 100, 0), kv_codec="group8", policy=STREAMING)),
    Case("opt", **ONE_ROW, percent=(0, 100, 0, 100, 0, 100), weight_codec="group8", kv_codec="group4"),
    slow(Case("olmoe", **ONE_ROW, percent=(50, 50, 100, 0, 100, 0), weight_codec="group4")),
    slow(Case("olmoe", **ONE_ROW, percent=(50, 50, 100, 0, 100, 0))),
    slow(Case("opt", **ONE_ROW, percent=(50, 50, 100, 0, 100, 0), weight_codec="group4", compute=INT8)),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_engine_gives_what_the_resident_loop_gives(
    case: Case, own_checkpoints: Checkpoints, offload: Path, pretended: None, gpu: torch.device, called: set[str]
) -> None:
    hold_contract(replace(case, device=CUDA) if gpu.type == CUDA else case, own_checkpoints, offload)
    of_experts = f"counted_{'plain' if case.weight_codec == PLAIN else 'tile'}_products"
    assert "decode_attention" in called and (of_experts in called) == (case.kind == "olmoe")


def test_a_step_attends_what_it_chooses(
    own_checkpoints: Checkpoints, offload: Path, pretended: None, gpu: torch.device, called: set[str]
) -> None:
    case = Case("llama-gqa", **ONE_ROW | {"lengths": (26,)}, policy=(("kv_recall", 0.5),))
    hold_contract(replace(case, device=CUDA) if gpu.type == CUDA else case, own_checkpoints, offload)
    assert {"choose_slots", "take_slots"} <= called


@pytest.mark.parametrize("of_host", [100, 0])
def test_a_step_brings_what_it_chooses_from_the_host_or_from_a_disk(
    of_host: int, own_checkpoints: Checkpoints, offload: Path, pretended: None, gpu: torch.device, called: set[str]
) -> None:
    percent = (100, 0, 0, of_host, 100, 0)
    case = Case("llama-gqa", **ONE_ROW | {"lengths": (26,)}, policy=(("kv_recall", 0.5),), percent=percent)
    hold_contract(replace(case, device=CUDA) if gpu.type == CUDA else case, own_checkpoints, offload)
    assert {"choose_slots", "bring_slots"} <= called


def test_it_is_said_of_each_kernel_what_it_writes() -> None:
    assert WRITTEN.keys() == functions.FUNCTIONS.keys()
