"""The contract once more, with weights that have to be decoded: a codec is a line in a table that nothing else has to know."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from h2o_flexgen.planning.cost import predicted_bytes
from h2o_flexgen.planning.plan import DEVICE, HOST
from h2o_flexgen.planning.planned import plan_blocks
from h2o_flexgen.planning.workload import Workload
from h2o_flexgen.quant.codec import PLAIN
from h2o_flexgen.runtime.sampling_params import SamplingParams
from tests.contract import Case, Checkpoints, compare, generate_with
from tests.inverted import TRAILER, Inverted, opened_inverted
from tests.test_contract import CHOICES, EQUAL, MANY, MIXES, RAGGED, covering

ON_DISK, IN_MEMORY = (MIXES[2], MIXES[3], MIXES[6]), ((100, 0, 0, 0, 0, 0), (0, 100, 0, 50, 0, 50), (40, 60, 100, 0, 100, 0))
CASES = {name: choices for name, choices in CHOICES.items() if name != "overlap"} | {
    "kind": ("opt", "llama-gqa", "neox-parallel"),
    "percent": ON_DISK + IN_MEMORY,
    "lengths": (RAGGED, EQUAL),
}


@pytest.mark.parametrize("values", list(covering(CASES)))
def test_tokens_and_logits_equal_the_resident_loop_when_weights_come_from_a_packed_file(
    values: dict[str, object], any_device: str, checkpoints: Checkpoints, offload: Path
) -> None:
    case = Case(device=any_device, **values)  # type: ignore[arg-type]
    with opened_inverted(case, checkpoints, offload) as llm:
        compare(case, checkpoints, *generate_with(llm, case))


@pytest.mark.parametrize("percent", IN_MEMORY)
@pytest.mark.parametrize(("stored", "dtype"), [("float32", "float32"), ("bfloat16", "float32"), ("float32", "bfloat16")])
def test_plain_weights_are_encoded_while_they_are_loaded(
    percent: tuple[float, ...], stored: str, dtype: str, any_device: str, checkpoints: Checkpoints, offload: Path
) -> None:
    case = Case("qwen3", percent, num_gpu_batches=3, device=any_device, stored=stored, dtype=dtype)
    with opened_inverted(case, checkpoints, offload, packed=False) as llm:
        compare(case, checkpoints, *generate_with(llm, case))


@pytest.mark.parametrize("percent", [*ON_DISK, IN_MEMORY[1]])
@pytest.mark.parametrize("schedule", CHOICES["schedule"])
def test_a_run_moves_the_bytes_of_the_codec(
    percent: tuple[float, ...], schedule: str, any_device: str, checkpoints: Checkpoints, offload: Path
) -> None:
    case = Case("llama-gqa", percent, MANY, device=any_device, schedule=schedule)
    with opened_inverted(case, checkpoints, offload) as llm:
        llm.generate(case.prompts, SamplingParams(max_tokens=case.gen_len))
        workload = Workload(case.lengths, case.gen_len)
        predicted = predicted_bytes(plan_blocks(llm.spec, llm.plan, workload, llm.device.accelerator))
        assert llm.stats is not None
        assert {lane: nbytes for lane, nbytes in llm.stats.moved_bytes.items() if nbytes} == predicted


def test_bytes_of_the_codec_by_hand(any_device: str, checkpoints: Checkpoints, offload: Path) -> None:
    case = Case("llama-gqa", MIXES[6], device=any_device, num_gpu_batches=3)
    with case.open(checkpoints, offload) as llm:
        weights = [tensor for layer in llm.spec.layers for _, tensor in layer.tensors]
        trailers = len(TRAILER) * sum(len(tensor.shape) == 2 for tensor in weights)
        expected = case.gen_len * (4 * sum(tensor.numel for tensor in weights) + trailers)
    with opened_inverted(case, checkpoints, offload) as llm:
        llm.generate(case.prompts, SamplingParams(max_tokens=case.gen_len))
        assert llm.stats is not None and llm.stats.moved_bytes["read"] == expected
        assert any_device == "cpu" or llm.stats.moved_bytes["load"] == expected


@pytest.mark.parametrize(("schedule", "percent"), list(product(CHOICES["schedule"], (MIXES[6], IN_MEMORY[1]))))
def test_a_layer_is_decoded_once_for_all_batches_and_let_go_of_before_the_next(
    schedule: str, percent: tuple[float, ...], any_device: str, checkpoints: Checkpoints, offload: Path
) -> None:
    case, codec = Case("opt", percent, device=any_device, num_gpu_batches=3, schedule=schedule), Inverted()
    with opened_inverted(case, checkpoints, offload, codec=codec) as llm:
        llm.generate(case.prompts, SamplingParams(max_tokens=case.gen_len))
        matrices = sum(tensor.codec != PLAIN for layer in llm.spec.layers for _, tensor in layer.tensors)
        largest = max(layer.decoded_nbytes for layer in llm.spec.layers)
    passes = case.gen_len * (3 if schedule == "row_by_row" else 1)
    assert codec.decoded == passes * matrices
    assert codec.peak_bytes == largest > 0


def test_decoded_values_count_as_working_space(any_device: str, checkpoints: Checkpoints, offload: Path) -> None:
    case = Case("llama-gqa", device=any_device)
    workload, compute = Workload(case.lengths, case.gen_len), HOST if any_device == "cpu" else DEVICE
    with case.open(checkpoints, offload) as llm:
        plain = llm.check(workload).parts[compute]
    with opened_inverted(case, checkpoints, offload) as llm:
        inverted = llm.check(workload).parts[compute]
        largest = max(layer.decoded_nbytes for layer in llm.spec.layers)
    assert inverted["working space"] == plain["working space"] + largest


def test_plain_weights_on_disk_are_refused_before_anything_is_loaded(checkpoints: Checkpoints, offload: Path) -> None:
    case = Case("opt", (0, 50, 0, 100, 0, 100))
    message = r"^tensor \S+ is to be read from disk as inverted but is stored plain; make a checkpoint packed as inverted first"
    with (
        opened_inverted(case, checkpoints, offload, packed=False) as llm,
        pytest.raises(ValueError, match=message),
    ):
        llm.generate(case.prompts)
    assert not offload.exists()


def test_packed_weights_are_kept_as_they_are_stored_or_not_at_all(checkpoints: Checkpoints, offload: Path) -> None:
    case = Case("opt", (0, 100, 0, 100, 0, 100))
    with opened_inverted(case, checkpoints, offload) as llm:
        llm._model.spec = llm.spec.map_tensors(lambda tensor: replace(tensor, codec=PLAIN))
        with pytest.raises(ValueError, match=r"^tensor \S+ is stored as inverted and cannot be kept as plain; ask for it"):
            llm.generate(case.prompts)
