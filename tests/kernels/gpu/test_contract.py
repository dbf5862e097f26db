"""The contract with the kernels for GPUs, carried out by Triton's interpreter: what a plan generates is what the resident loop
generates with the same kernels, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from h2o_flexgen.kernels import operations
from h2o_flexgen.kernels.table import CUDA, INT8, TRITON, Processor
from tests.contract import Case, Checkpoints, hold_contract

SMALL = Case(lengths=(4,), gen_len=2, gpu_batch_size=1, num_gpu_batches=1, device="pretended")
BOTH_PACKED = replace(SMALL, percent=(0, 100, 0, 100, 0, 100), weight_codec="group8", kv_codec="group4")
OTHERS = (
    replace(SMALL, kind="llama-gqa", percent=(0, 0, 0, 100, 100, 0), weight_codec="group4", kv_codec="group8"),
    replace(SMALL, percent=(50, 50, 100, 0, 100, 0), weight_codec="group4", compute=INT8),
)


@pytest.fixture
def chosen_as_on_a_gpu(gpu: torch.device) -> Iterator[None]:
    """Kernels are chosen on a CPU as they are on a GPU."""
    if gpu.type == CUDA:
        yield
        return
    with patch.object(operations, "processor", lambda kind: Processor(CUDA, TRITON)):
        yield


@pytest.mark.parametrize("case", [BOTH_PACKED, *(pytest.param(case, marks=pytest.mark.slow) for case in OTHERS)], ids=str)
def test_plans_keep_to_the_contract(
    case: Case, gpu: torch.device, chosen_as_on_a_gpu: None, checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    hold_contract(case if gpu.type != CUDA else replace(case, device=CUDA), checkpoints, offload)
