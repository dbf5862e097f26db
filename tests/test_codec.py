"""The contract once more, with weights that have to be decoded: a codec is a line in a table that nothing else has to know."""

from __future__ import annotations

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
CASES = {name: choices for name, choices in CHOICES.items() if name not in ("overlap", "weight_codec", "kv_codec")} | {
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
        trailers = len(TRAILER) * sum(len(layer.matrices) for layer in llm.spec.layers)
        expected = case.gen_len * (4 * sum(tensor.numel for tensor in weights) + trailers)
    with opened_inverted(case, checkpoints, offload) as llm:
        llm.generate(case.prompts, SamplingParams(max_tokens=case.gen_len))
        assert llm.stats is not None and llm.stats.moved_bytes["read"] == expected
        assert any_device == "cpu" or llm.stats.moved_bytes["load"] == expected


@pytest.mark.parametrize(("schedule", "percent"), list(product(CHOICES["schedule"], (MIXES[6], IN_MEMORY[1]))))
def test_a_layer_is_decoded_once_for_all_batches(
    schedule: str, percent: tuple[float, ...], any_device: str, checkpoints: Checkpoints, offload: Path
) -> None:
    case, codec = Case("opt", percent, device=any_device, num_gpu_batches=3, schedule=schedule), Inverted()
    with opened_inverted(case, checkpoints, offload, codec=codec) as llm:
        llm.generate(case.prompts, SamplingParams(max_tokens=case.gen_len))
        matrices = sum(tensor.codec != PLAIN for layer in llm.spec.layers for _, tensor in layer.tensors)
    passes = case.gen_len * (3 if schedule == "row_by_row" else 1)
    assert codec.decoded == passes * matrices


def test_room_for_the_largest_layer_decoded_is_promised_and_held(
    any_device: str, checkpoints: Checkpoints, offload: Path
) -> None:
    case = Case("llama-gqa", device=any_device)
    workload, compute = Workload(case.lengths, case.gen_len), HOST if any_device == "cpu" else DEVICE
    with case.open(checkpoints, offload) as llm:
        assert llm.check(workload).parts[compute]["decoded weights"] == 0
    with opened_inverted(case, checkpoints, offload) as llm:
        promised = llm.check(workload).parts[compute]["decoded weights"]
        llm.generate(case.prompts, SamplingParams(max_tokens=1))
        assert llm._engine is not None and llm._engine._weights._decoded is not None
        assert promised == llm._engine._weights._decoded.nbytes >= max(layer.decoded_nbytes for layer in llm.spec.layers)
