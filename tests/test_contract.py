"""The contract: whatever the plan, the tokens are those of the plain resident loop, and its logits bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_flexgen.memory.device import DeviceTier
from h2o_flexgen.memory.host import HostTier
from h2o_flexgen.quant.codec import PLAIN
from tests.contract import POLICIES, Case, Checkpoints, compare, generate_with, hold_contract
from tests.pairwise import in_turn, on_devices
from tests.reference import reference_generate
from tests.resident import resident_generate

RAGGED, EQUAL, MANY = (5, 9, 2, 7, 4), (6, 6, 6, 6), (3, 11, 8, 1, 6, 2, 9, 5, 4, 7)
MIXES = (
    (100, 0, 100, 0, 100, 0),
    (0, 100, 0, 100, 0, 100),
    (0, 0, 0, 0, 0, 0),
    (30, 30, 20, 50, 40, 30),
    (50, 0, 0, 100, 0, 0),
    (0, 40, 60, 0, 0, 50),
    (0, 0, 100, 0, 100, 0),
    (100, 0, 0, 0, 0, 100),
)
CHOICES = {
    "kind": ("opt", "llama-gqa", "neox-parallel", "opt-350m", "qwen3", "neox-sequential", "qwen2-wordy"),
    "percent": MIXES,
    "lengths": (RAGGED, EQUAL, MANY),
    "gpu_batch_size": (1, 2, 3),
    "num_gpu_batches": (1, 2, 4),
    "slots": (1, 2, 3),
    "sep_layer": (True, False),
    "overlap": (True, False),
    "schedule": ("zigzag", "flexgen_barrier", "row_by_row"),
    "policy": POLICIES,
    "prefill_tokens": (1024, 12, 1),
    "weight_codec": (PLAIN, "group4", "group8"),
    "kv_codec": (PLAIN, "group4", "group8"),
}


@pytest.mark.parametrize("values", on_devices(CHOICES))
def test_tokens_and_logits_equal_the_resident_loop_for_every_pair_of_choices(
    values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    hold_contract(Case(**values), checkpoints, offload)


TIERS = ((100, 0), (0, 100), (0, 0))


@pytest.mark.parametrize("values", in_turn({"weights": TIERS, "kv": TIERS, "hidden": TIERS}))
def test_every_tier_for_each_kind_of_data(
    values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    percent = (*values["weights"], *values["kv"], *values["hidden"])
    hold_contract(Case("llama-gqa", percent, RAGGED, num_gpu_batches=3, device=values["device"]), checkpoints, offload)


@pytest.mark.parametrize("values", in_turn({"slots": (1, 2, 3, 5), "num_gpu_batches": (1, 2, 4), "gen_len": (1, 2, 6)}))
def test_every_number_of_slots_batches_and_steps_with_all_on_disk(
    values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    hold_contract(Case(percent=(0, 0, 0, 0, 0, 0), lengths=MANY, gpu_batch_size=3, **values), checkpoints, offload)


TYPES = {
    "stored": ("float32", "float16", "bfloat16"),
    "dtype": ("float32", "bfloat16"),
    "percent": (MIXES[0], MIXES[2], MIXES[3]),
}


@pytest.mark.parametrize("values", on_devices(TYPES))
def test_every_stored_and_computed_type(
    values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    hold_contract(Case("neox-parallel", num_gpu_batches=3, **values), checkpoints, offload)


def test_a_single_prompt_of_a_single_token(any_device: str, checkpoints: Checkpoints, offload: Path) -> None:
    hold_contract(Case(percent=MIXES[2], lengths=(1,), gen_len=3, device=any_device), checkpoints, offload)


HELD = {"percent": (MIXES[2], MIXES[3], (0, 50, 0, 60, 0, 50)), "num_gpu_batches": (1, 3, 4), "slots": (1, 2, 3)}


@pytest.mark.parametrize("values", on_devices(HELD))
def test_nothing_depends_on_what_memory_held_before(
    values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regions are used again for other things. Here all are full of NaN when they are handed out."""
    for tier in (HostTier, DeviceTier):
        monkeypatch.setattr(tier, "alloc", poisoned(tier.alloc))
    hold_contract(Case("llama-gqa", lengths=MANY, **values), checkpoints, offload)


def poisoned(alloc: Callable[[Any, int], Tensor]) -> Callable[[Any, int], Tensor]:
    return lambda tier, nbytes: alloc(tier, nbytes).fill_(0xFF)


def test_one_engine_generates_again_with_other_shapes(checkpoints: Checkpoints, offload: Path, pretended: None) -> None:
    """Buffers are made for the first workload and used again for a larger and a smaller one."""
    for device in ("cpu", "pretended"):
        first = Case(percent=MIXES[3], device=device, lengths=(4, 6))
        others = (Case(percent=MIXES[3], device=device, lengths=MANY, gen_len=6), Case(percent=MIXES[3], device=device))
        with first.open(checkpoints, offload) as llm:
            for case in (first, *others, first):
                compare(case, checkpoints, *generate_with(llm, case))


# -- what the resident loop is held to -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CHOICES["kind"])
def test_the_resident_loop_equals_the_greedy_generate_of_transformers(kind: str, checkpoints: Checkpoints) -> None:
    case = Case(kind, lengths=RAGGED, gen_len=8)
    resident = checkpoints.resident_logits(case, range(len(RAGGED)))
    for row in range(len(RAGGED)):
        tokens, logits = checkpoints.greedy(case, row, 8)
        assert [int(step[row].argmax()) for step in resident] == tokens
        torch.testing.assert_close(torch.stack([step[row] for step in resident]), logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", CHOICES["kind"])
def test_the_resident_loop_equals_the_reference_that_shares_no_code_with_the_cache(kind: str, checkpoints: Checkpoints) -> None:
    case = Case(kind, lengths=RAGGED, gen_len=8)
    model, weights = checkpoints.model(kind, "float32", "float32")
    tokens, logits = reference_generate(model, weights, case.prompts, 8)
    resident = checkpoints.resident_logits(case, range(len(RAGGED)))
    assert torch.stack(resident).argmax(-1).T.tolist() == tokens
    torch.testing.assert_close(torch.stack(resident), torch.stack(logits), atol=1e-4, rtol=0)


def test_the_layout_of_a_cache_changes_no_token_of_the_resident_loop(checkpoints: Checkpoints) -> None:
    model, weights = checkpoints.model("llama-gqa", "float32", "float32")
    prompts = Case(lengths=RAGGED).prompts
    by_head, by_token = (torch.stack(resident_generate(model, weights, prompts, 6, layout)) for layout in (False, True))
    torch.testing.assert_close(by_head, by_token, atol=1e-5, rtol=0)
