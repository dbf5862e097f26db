"""The contract once more, with weights that have to be decoded: a codec is a line in a table that nothing else has to know."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen.core.buffer_layout import part_starts
from h2o_flexgen.core.site import DEVICE, HOST
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.planning.cost import by_lane, predicted_bytes
from h2o_flexgen.planning.pricing import Pricing
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.schedule.schedule import Key, Op
from tests.helpers.contract import POLICIES, Case, Checkpoints, compare, generate_with
from tests.helpers.inverted import TRAILER, Inverted, opened_inverted
from tests.helpers.pairwise import ELSEWHERE, on_devices
from tests.planning.test_machine import SMALL
from tests.whole.test_contract import CHOICES, EQUAL, MANY, MIXES, RAGGED

ON_DISK, IN_MEMORY = (MIXES[2], MIXES[3], MIXES[6]), ((100, 0, 0, 0, 0, 0), (0, 100, 0, 50, 0, 50), (40, 60, 100, 0, 100, 0))
LEFT_OUT = "overlap", "kv_codec", ("weight_codec", "compute")
CASES = {name: choices for name, choices in CHOICES.items() if name not in LEFT_OUT} | {
    "kind": ("opt", "llama-gqa", "neox-parallel"),
    "percent": ON_DISK + IN_MEMORY,
    "lengths": (RAGGED, EQUAL),
    "policy": (POLICIES[0], POLICIES[1], POLICIES[3]),  # what keeps KV knows nothing of how weights are stored
}


@pytest.mark.parametrize("values", on_devices(CASES, share=ELSEWHERE))
def test_tokens_and_logits_equal_the_resident_loop_when_weights_come_from_a_packed_file(
    values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    case = Case(**values)
    with opened_inverted(case, checkpoints, offload) as llm:
        compare(replace(case, weight_codec=Inverted.name), checkpoints, *generate_with(llm, case))


@pytest.mark.parametrize("values", on_devices({"schedule": CHOICES["schedule"], "percent": (*ON_DISK, IN_MEMORY[1])}))
def test_a_run_moves_the_bytes_of_the_codec(
    values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    case = Case("llama-gqa", lengths=MANY, **values)
    with opened_inverted(case, checkpoints, offload) as llm:
        llm.generate(case.prompts, SamplingParams(max_tokens=case.gen_len))
        workload = Workload(case.lengths, case.gen_len)
        predicted = by_lane(predicted_bytes(llm.planned(workload).blocks))
        assert llm.stats is not None
        assert {lane: nbytes for lane, nbytes in llm.stats.moved_bytes.items() if nbytes} == predicted


def test_bytes_of_the_codec_by_hand(any_device: str, checkpoints: Checkpoints, offload: Path) -> None:
    case = Case("llama-gqa", MIXES[6], device=any_device, num_gpu_batches=3)
    with case.open(checkpoints, offload) as llm:
        weights = [tensor for layer in llm.spec.layers for _, tensor in layer.tensors]
        rows = sum(tensor.shape[0] for layer in llm.spec.layers for name, tensor in layer.tensors if len(tensor.shape) == 2)
        expected = case.gen_len * (4 * sum(tensor.numel for tensor in weights) + len(TRAILER) * rows)
    with opened_inverted(case, checkpoints, offload) as llm:
        llm.generate(case.prompts, SamplingParams(max_tokens=case.gen_len))
        assert llm.stats is not None and llm.stats.moved_bytes["read"] == expected
        assert any_device == "cpu" or llm.stats.moved_bytes["load"] == expected


@pytest.mark.parametrize(("schedule", "percent"), list(product(CHOICES["schedule"], (MIXES[6], IN_MEMORY[1]))))
def test_a_layer_is_decoded_once_for_all_batches(
    schedule: str, percent: tuple[float, ...], any_device: str, checkpoints: Checkpoints, offload: Path
) -> None:
    case, format = Case("opt", percent, device=any_device, num_gpu_batches=3, schedule=schedule), Inverted()
    with opened_inverted(case, checkpoints, offload, format=format) as llm:
        llm.generate(case.prompts, SamplingParams(max_tokens=case.gen_len))
        matrices = sum(tensor.numel for layer in llm.spec.layers for tensor in layer.matrices)
        looked_up = llm.spec.width * sum(length + case.gen_len - 1 for length in padded(case))
    passes = case.gen_len * (3 if schedule == "row_by_row" else 1)
    assert format.decoded == passes * matrices + looked_up


@pytest.mark.parametrize(("sep_layer", "held"), [(True, 0), (False, 1)])
def test_of_a_head_as_much_as_fits_is_decoded_once_for_all_batches(
    sep_layer: bool, held: int, any_device: str, checkpoints: Checkpoints, offload: Path
) -> None:
    """The room is that of the largest layer; what does not fit takes turns in the last place of it."""
    case, format = Case("qwen2-wordy", device=any_device, num_gpu_batches=3, sep_layer=sep_layer), Inverted()
    with opened_inverted(case, checkpoints, offload, format=format) as llm:
        llm.generate(case.prompts, SamplingParams(max_tokens=case.gen_len))
        *layers, head = llm.spec.layers
        matrices = sum(tensor.numel for layer in layers for tensor in layer.matrices)
        rows = [part.stop - part.start for part in head.logit_parts]
        assert len(rows) == 9 and len(part_starts(llm.spec, head)) - 1 == held
        looked_up = llm.spec.width * sum(length + case.gen_len - 1 for length in padded(case))
    decoded_rows = sum(rows) + 2 * sum(rows[held:])
    assert format.decoded == case.gen_len * (matrices + llm.spec.width * decoded_rows) + looked_up


def test_a_codec_multiplies_few_rows_with_its_bytes_and_is_priced_so(
    any_device: str, checkpoints: Checkpoints, offload: Path
) -> None:
    """Steps have two rows at most, prompts more. What computes and what predicts take the same kernel."""
    case, format = Case("opt", lengths=EQUAL, device=any_device), Inverted(few_rows=2)
    machine = replace(SMALL, flops_per_s={"float32": ((1, 1e9),)}, packed_flops_per_s={format.name: ((1, 7e9),)})
    with opened_inverted(case, checkpoints, offload, format=format) as llm:
        completions, logits = generate_with(llm, case)
        decoded, multiplied = format.decoded, format.multiplied
        anew = replace(checkpoints, resident={})  # what other tests have had computed was multiplied in another way
        compare(replace(case, weight_codec=format.name), anew, completions, logits)
        inner, parts, batches = llm.spec.layers[1:-1], len(llm.spec.layers[-1].logit_parts), case.batches()
        matrices, values = sum(len(one.matrices) for one in inner), sum(one.numel for layer in inner for one in layer.matrices)
        (block,) = llm.planned(Workload(case.lengths, case.gen_len)).blocks
        prompt, step = (Pricing(block, machine).compute_parts(Key(Op.COMPUTE, step, 1, 0)) for step in (0, 1))
        looked_up = llm.spec.width * sum(length + case.gen_len - 1 for length in padded(case))
        assert step["products"] == pytest.approx(2 * block.block.batches[0].size * inner[0].matmul_values / 7e9)
    steps = case.gen_len - 1
    assert multiplied == len(batches) * (steps * matrices + case.gen_len * max(1, parts))
    assert decoded == values + looked_up
    assert prompt["decoding"] > 0 == step["decoding"]


def padded(case: Case) -> list[int]:
    """Of every row, the tokens of its prompt and the pads behind them."""
    blocks = Workload(case.lengths, case.gen_len).blocks(case.gpu_batch_size, case.num_gpu_batches)
    return [batch.prompt_len for block in blocks for batch in block.batches for _ in batch.rows]


def test_room_for_the_largest_layer_decoded_is_promised_and_held(
    any_device: str, checkpoints: Checkpoints, offload: Path
) -> None:
    case = Case("llama-gqa", device=any_device)
    workload, compute = Workload(case.lengths, case.gen_len), HOST if any_device == "cpu" else DEVICE
    with case.open(checkpoints, offload) as llm:
        assert llm.check(workload).footprint.parts[compute]["decoded weights"] == 0
    with opened_inverted(case, checkpoints, offload) as llm:
        promised = llm.check(workload).footprint.parts[compute]["decoded weights"]
        llm.generate(case.prompts, SamplingParams(max_tokens=1))
        assert llm.loaded._engine is not None and llm.loaded._engine._weights[0]._decoded is not None
        assert promised == llm.loaded._engine._weights[0]._decoded.nbytes
