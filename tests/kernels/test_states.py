"""States of rows: twins do what transformers' functions do, kernels in C what the twins do. In C what becomes of a row depends
on nothing else, and a prompt has the bits of its tokens one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import pytest
import torch
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next

from h2o_flexgen.formats.kernel_sizes import STATE_CHUNK, shared
from h2o_flexgen.formats.kernel_table import TORCH
from h2o_flexgen.kernels import native, states
from h2o_flexgen.kernels.recording import CallRecording, WorkingRoom
from tests.helpers.all_of import all_of
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
from tests.kernels.variants import VARIANTS, used, without

LENGTHS = (70, 1, 0, STATE_CHUNK, 5)
DELTA_RULES = [
    getattr(file, name)
    for file in (modeling_qwen3_next, modeling_qwen3_5)
    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
]
RULES_BY_VALUE = [getattr(modeling_kimi_linear, f"{way}_kimi_delta_attention") for way in ("chunk", "recurrent")]
MadeCase = Callable[..., Case]
Rule = Callable[..., tuple[Tensor, Tensor]]


@contextmanager
def in_c(variant: str) -> Iterator[None]:
    twins = ("gated_delta_twin", "selective_scan_twin", "short_convolution_twin")
    with used(variant), without(twins[0]), without(twins[1]), without(twins[2]):
        yield


# -- twins -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 3, STATE_CHUNK, 2 * STATE_CHUNK + 7])
@pytest.mark.parametrize("rule", DELTA_RULES)
def test_the_delta_rule_is_that_of_transformers(rule: Rule, tokens: int, made: MadeCase = delta_case) -> None:
    case = made(2, tokens)
    given = {"initial_state": case.state.clone(), "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    out, state = rule(*case.tokens, **given)
    near(case.by_twin(), out)
    near(case.state, state)


@pytest.mark.parametrize("tokens", [1, 3, STATE_CHUNK, STATE_CHUNK + 7])
@pytest.mark.parametrize("rule", RULES_BY_VALUE)
def test_the_delta_rule_by_values_of_keys_is_that_of_transformers(rule: Rule, tokens: int) -> None:
    test_the_delta_rule_is_that_of_transformers(rule, tokens, partial(value_case, heads=(4, 4)))


@pytest.mark.parametrize("by", [Case.__call__, Case.by_twin])
def test_a_number_for_each_value_of_a_key_may_be_one_for_all(by: Callable[[Case], Tensor]) -> None:
    """The rule by which a head fades as a whole is this rule with equal numbers."""
    case = delta_case(2, STATE_CHUNK + 9)
    *tokens, decay, beta = case.tokens
    each = replace(case.again(), tokens=[*tokens, decay[..., None].expand(-1, -1, -1, 16).contiguous(), beta])
    near(by(each), by(case))
    near(each.state, case.state)


@pytest.mark.parametrize("tokens", [3, STATE_CHUNK, STATE_CHUNK + 7])
def test_the_scan_of_a_prompt_is_that_of_transformers(tokens: int) -> None:
    case = scan_case(2, tokens)
    x, steps, b, c = case.tokens
    rates, skip = case.of_heads
    given = {"initial_states": case.state.transpose(2, 3).contiguous(), "return_final_states": True}
    out, state = modeling_mamba2.mamba2_chunk_scan(x, steps, rates, b, c, 32, D=skip, **given)
    near(case.by_twin(), out)
    near(case.state, state.transpose(2, 3))


def test_the_scan_of_a_step_is_that_of_transformers() -> None:
    case = scan_case(3, 1)
    x, steps, b, c = (each[:, 0] for each in case.tokens)
    rates, skip = case.of_heads
    heads, width, state_width = *x.shape[1:], b.shape[-1]
    of_values = steps[..., None].expand(-1, -1, width), rates[:, None, None].expand(heads, width, state_width)
    state = case.state.transpose(2, 3).contiguous()
    out = modeling_mamba2.mamba2_selective_state_update(state, x, *of_values, b, c, skip[:, None].expand(-1, width))
    near(case.by_twin()[:, 0], out)
    near(case.state, state.transpose(2, 3))


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_short_convolutions_are_those_of_transformers(tokens: int, has_bias: bool) -> None:
    case = convolution_case(2, tokens, has_bias=has_bias)
    state = case.state.transpose(1, 2).contiguous()
    weight, *bias = case.of_heads
    x = case.tokens[0].transpose(1, 2)
    out = modeling_mamba2.causal_conv1d_update(x, state, weight[:, 0], bias[0] if bias else None, "silu")
    near(case.by_twin(), out.transpose(1, 2))
    assert torch.equal(case.state, state.transpose(1, 2))


@pytest.mark.parametrize("made", CASES)
def test_a_chunk_of_the_twin_is_its_tokens_one_by_one(made: MadeCase) -> None:
    case = made(2, STATE_CHUNK + 9)
    whole, single = case.again(), case.again()
    out = torch.cat([single.part(at, at + 1).by_twin() for at in range(STATE_CHUNK + 9)], dim=1)
    near(whole.by_twin(), out)
    near(whole.state, single.state)


@pytest.mark.parametrize("made", CASES)
def test_a_state_of_the_twin_is_that_behind_the_last_real_token(made: MadeCase) -> None:
    case = made(len(LENGTHS), max(LENGTHS))
    filled = case.filled_up(LENGTHS, 3.0)
    out = filled.by_twin(torch.tensor(LENGTHS))
    assert out.isfinite().all()
    for row, length in enumerate(LENGTHS):
        own = case.row(row, length)
        near(out[row : row + 1, :length], own.by_twin())
        near(filled.state[row : row + 1], own.state)


def test_tiled_heads_are_served_in_turn() -> None:
    """Heads 0, 1, 2 and 3 have the keys 0, 1, 0 and 1, and not 0, 0, 1 and 1."""
    tiled, grouped = delta_case(2, 5, is_tiled=True), delta_case(2, 5)
    order = torch.tensor([0, 2, 1, 3])
    q, k, *of_heads = tiled.tokens
    expected = grouped.twin([q, k, *(each[:, :, order] for each in of_heads)], grouped.state[:, order], None, False)
    near(tiled.by_twin()[:, :, order], expected)


# -- kernels in C --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@all_of(
    {
        "made": (*DELTA_CASES, scan_case),
        "dtype": LAST_BITS,
        "tokens": (1, 7, 70),
        "shape": [((2, 4), (16, 24)), ((1, 1), (3, 5)), ((2, 6), (128, 128)), ((4, 4), (40, 200))],
    }
)
def test_states_are_passed_as_torch_does_it(
    variant: str, made: MadeCase, dtype: torch.dtype, tokens: int, shape: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    case = made(2, tokens, *shape, dtype=dtype)
    twin = case.again()
    with in_c(variant):
        out = case()
    near(out, twin.by_twin(), dtype)
    near(case.state, twin.state)
    assert out.dtype == dtype


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"made": (*DELTA_CASES, scan_case), "form": (True, False)})
def test_both_forms_of_keys_and_of_rates(variant: str, made: MadeCase, form: bool) -> None:
    case = made(2, 5, **({"is_tiled": form} if made in DELTA_CASES else {"are_logs": form, "skips": form}))
    twin = case.again()
    with in_c(variant):
        near(case(), twin.by_twin())
    near(case.state, twin.state)


@pytest.mark.parametrize("variant", VARIANTS)
@all_of(
    {
        "dtype": LAST_BITS,
        "tokens": (1, 2, 50),
        "shape": [(36, 4), (5, 3), (300, 2), (130, 1), (1, shared().convolved)],
        "has_bias": (True, False),
        "is_activated": (True, False),
    }
)
def test_channels_are_convolved_as_torch_does_it(
    variant: str, dtype: torch.dtype, tokens: int, shape: tuple[int, int], has_bias: bool, is_activated: bool
) -> None:
    case = convolution_case(2, tokens, *shape, dtype, has_bias, is_activated)
    twin = case.again()
    with in_c(variant):
        near(case(), twin.by_twin(), dtype)
    assert torch.equal(case.state, twin.state)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("made", [*DELTA_CASES, scan_case])
def test_copies_of_values_that_lie_apart_are_kept_until_they_are_read(
    variant: str, made: MadeCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, copies = made(2, 5), list[ReferenceType[Tensor]]()
    apart = replace(case.again(), tokens=[each.transpose(1, -1).contiguous().transpose(1, -1) for each in case.tokens])

    def noted(x: Tensor, keep: Callable[[Tensor], Tensor] = states.with_neighbours) -> Tensor:
        near_ones = keep(x)
        copies.append(ref(near_ones))
        return near_ones

    def checked(name: str, *given: Any) -> None:
        assert copies and all(copy() is not None for copy in copies)
        native.run(name, *given)

    with in_c(variant):
        expected = case()
        monkeypatch.setattr(states, "with_neighbours", noted)
        monkeypatch.setattr(states, "run", checked)
        assert torch.equal(apart(), expected) and torch.equal(apart.state, case.state)


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"made": CASES, "dtype": (torch.float32, torch.bfloat16)})
def test_a_prompt_has_the_bits_of_its_pieces(variant: str, made: MadeCase, dtype: torch.dtype) -> None:
    case, count = made(2, 77, dtype=dtype), 77
    for size in (1, 2, 30, STATE_CHUNK):
        whole, pieces = case.again(), case.again()
        with in_c(variant):
            out = torch.cat([pieces.part(at, at + size)() for at in range(0, count, size)], dim=1)
            assert torch.equal(whole(), out)
        assert torch.equal(whole.state, pieces.state)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("made", CASES)
def test_a_row_has_the_same_bits_in_any_company_and_ends_with_its_last_token(variant: str, made: MadeCase) -> None:
    """What stands behind a row's last token is not even read."""
    case = made(len(LENGTHS), max(LENGTHS))
    filled = case.filled_up(LENGTHS, torch.nan)
    with in_c(variant):
        out = filled(torch.tensor(LENGTHS))
        for row, length in enumerate(LENGTHS):
            own = case.row(row, length)
            assert torch.equal(out[row : row + 1, :length], own()) and not out[row, length:].any()
            assert torch.equal(filled.state[row : row + 1], own.state)


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"made": (*DELTA_CASES, scan_case), "tokens": (1, 5), "dtype": (torch.float32, torch.bfloat16)})
def test_a_state_in_bf16_is_rounded_behind_each_token(variant: str, made: MadeCase, tokens: int, dtype: torch.dtype) -> None:
    """A token works in fp32: what it finds is as of a state in fp32 with the same values, and what it leaves is rounded."""
    shapes = ((2, 4), (16, 24)), ((2, 6), (128, 128)), ((4, 4), (40, 200))
    for shape in shapes:
        case = made(2, tokens, *shape, dtype=dtype).in_bf16
        twin, together = case.again(), case.again()
        with in_c(variant):
            for at in range(tokens):
                token, alone = case.part(at, at + 1), replace(case.part(at, at + 1), state=case.state.float())
                near(token(), alone(), dtype)
                near(case.state.float(), alone.state, torch.bfloat16)
            together()
        assert torch.equal(together.state, case.state) and case.state.dtype == torch.bfloat16
        near(case.state.float(), _left_by(twin), torch.bfloat16)


def _left_by(twin: Case) -> Tensor:
    twin.by_twin()
    return twin.state.float()


@pytest.mark.parametrize("variant", [*VARIANTS, TORCH])
@all_of({"made": CASES, "tokens": (1, 5), "is_rounded": (False, True)})
def test_tokens_on_trial_leave_a_state_as_it_was(variant: str, made: MadeCase, tokens: int, is_rounded: bool) -> None:
    case = made(len(LENGTHS), tokens)
    case = case.in_bf16 if is_rounded and made is not convolution_case else case
    before, lengths = case.again(), torch.tensor(LENGTHS).clamp(max=tokens)
    with nullcontext() if variant == TORCH else in_c(variant):
        run = case.by_twin if variant == TORCH else case
        tried = run(lengths, is_trial=True)
        assert torch.equal(case.state, before.state)
        kept = run(lengths)
    assert all(torch.equal(tried[row, :length], kept[row, :length]) for row, length in enumerate(lengths.tolist()))
    assert not torch.equal(case.state, before.state)


@pytest.mark.parametrize("made", CASES)
def test_a_row_has_the_same_bits_with_any_number_of_threads(made: MadeCase, monkeypatch: pytest.MonkeyPatch) -> None:
    case, found = made(5, 33), list[Tensor]()
    for threads in (1, 2, 7):
        monkeypatch.setattr("h2o_flexgen.kernels.states.threads_for", lambda _, threads=threads: threads)
        own = case.again()
        found += own(), own.state
    assert all(torch.equal(each, found[place % 2]) for place, each in enumerate(found))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("made", CASES)
def test_rows_of_a_state_may_lie_apart_and_others_stay(variant: str, made: MadeCase) -> None:
    case = made(3, 4)
    buffer = torch.full((5, 2, *case.state.shape[1:]), 7.0)
    own = buffer[1:4, 1].copy_(case.state)
    with in_c(variant):
        assert torch.equal(case.function(case.tokens, own, None, False), case())
    assert torch.equal(own, case.state)
    own.fill_(7.0)
    assert (buffer == 7.0).all()


@pytest.mark.skipif(not VARIANTS, reason="there are no kernels in C")
@pytest.mark.parametrize("made", CASES)
def test_a_recorded_step_goes_on_from_the_state_of_the_step_before(made: MadeCase) -> None:
    case = made(3, 1)
    out, expected = torch.zeros_like(case.by_twin()), case.again()
    program = CallRecording.of(lambda: out.copy_(case()), WorkingRoom())
    case.state.copy_(expected.state)
    for _ in range(3):
        program()
        assert torch.equal(out, expected()) and torch.equal(case.state, expected.state)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_too_wide_for_c_is_done_by_torch(variant: str) -> None:
    wide = shared().state_keys + 1
    with used(variant), pytest.raises(AssertionError, match="torch was asked"), without("gated_delta_twin"):
        delta_case(1, 1, widths=(wide, 4))()
    with used(variant), pytest.raises(AssertionError, match="torch was asked"), without("short_convolution_twin"):
        convolution_case(1, 1, width=shared().convolved + 1)()
