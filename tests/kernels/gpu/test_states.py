"""States of rows in Triton are torch's up to the last bits, end behind the last real token, and a prompt has the bits of its
pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from h2o_flexgen.formats.kernel_table import CUDA, HALVES, TRITON, Processor
from h2o_flexgen.kernels import operations
from h2o_flexgen.kernels.gpu.norms import gated_norm
from h2o_flexgen.kernels.states import gated_norm_twin
from tests.helpers.samples import first_of
from tests.kernels.state_cases import (
    CASES,
    DELTA_CASES,
    LAST_BITS,
    Case,
    convolution_case,
    delta_case,
    near,
    scan_case,
    value_case,
)
from tests.kernels.variants import without

LENGTHS = (19, 1, 0, 3)
MadeCase = Callable[..., Case]


@contextmanager
def in_triton() -> Iterator[None]:
    twins = ("gated_delta_twin", "selective_scan_twin", "short_convolution_twin")
    with pytest.MonkeyPatch.context() as patch, without(twins[0]), without(twins[1]), without(twins[2]):
        patch.setattr(operations, "processor", lambda _: Processor(CUDA, TRITON, HALVES))
        yield


@pytest.mark.parametrize("dtype", first_of(LAST_BITS, 1))
@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize("made", CASES)
def test_states_are_passed_as_torch_does_it(made: MadeCase, tokens: int, dtype: torch.dtype, gpu: torch.device) -> None:
    case = made(2, tokens, dtype=dtype, device=gpu)
    twin = case.again()
    with in_triton():
        out = case()
    near(out, twin.by_twin(), dtype)
    near(case.state, twin.state)


@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize("made", [*DELTA_CASES, scan_case])
def test_a_state_in_bf16_is_rounded_behind_each_token(made: MadeCase, tokens: int, gpu: torch.device) -> None:
    case = made(2, tokens, device=gpu).in_bf16
    twin, one_by_one = case.again(), case.again()
    with in_triton():
        out = case()
        for at in range(tokens):
            one_by_one.part(at, at + 1)()
    near(out, twin.by_twin(), torch.bfloat16)
    near(case.state.float(), twin.state.float(), torch.bfloat16)
    assert torch.equal(case.state, one_by_one.state)


@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize("made", CASES)
def test_tokens_on_trial_leave_a_state_as_it_was(made: MadeCase, tokens: int, gpu: torch.device) -> None:
    case = made(2, tokens, device=gpu)
    before = case.again()
    with in_triton():
        tried = case(is_trial=True)
        assert torch.equal(case.state, before.state)
        assert torch.equal(tried, case()) and not torch.equal(case.state, before.state)


@pytest.mark.parametrize(
    "case_of",
    [
        lambda device: delta_case(1, 2, (2, 6), (5, 40), is_tiled=True, device=device),
        lambda device: value_case(1, 2, (1, 3), (5, 40), is_tiled=True, device=device),
        lambda device: scan_case(1, 2, are_logs=True, skips=False, device=device),
        lambda device: convolution_case(1, 20, 130, 3, has_bias=False, is_activated=False, device=device),
        lambda device: convolution_case(1, 2, 3, 1, device=device),
    ],
)
def test_odd_sizes_and_other_forms(case_of: Callable[[torch.device], Case], gpu: torch.device) -> None:
    case = case_of(gpu)
    twin = case.again()
    with in_triton():
        near(case(), twin.by_twin())
    near(case.state, twin.state)


@pytest.mark.parametrize("made", CASES)
def test_a_row_ends_with_its_last_token_and_has_the_bits_of_its_tokens(made: MadeCase, gpu: torch.device) -> None:
    case = made(len(LENGTHS), max(LENGTHS), device=gpu)
    filled = case.filled_up(LENGTHS, torch.nan)
    with in_triton():
        out = filled(torch.tensor(LENGTHS, device=gpu))
        for row, length in enumerate(LENGTHS):
            own = case.row(row, length)
            assert not out[row, length:].any()
            for at in range(length):
                assert torch.equal(out[row : row + 1, at : at + 1], own.part(at, at + 1)())
            assert torch.equal(filled.state[row : row + 1], own.state)


@pytest.mark.parametrize("dtype", LAST_BITS)
@pytest.mark.parametrize(("groups", "gate_first"), [(1, False), (1, True), (3, True), (3, False)])
def test_norms_with_a_gate_are_torchs(dtype: torch.dtype, groups: int, gate_first: bool, gpu: torch.device) -> None:
    draw = torch.Generator().manual_seed(4)
    x, gate = (torch.randn(2, 3, 2 * 30, generator=draw).to(gpu, dtype)[..., 30:] for _ in range(2))
    weight = torch.randn(30, generator=draw).to(gpu)
    found = gated_norm(x, gate, weight, 1e-6, groups, gate_first)
    near(found, gated_norm_twin(x, gate, weight, 1e-6, groups, gate_first), dtype)
