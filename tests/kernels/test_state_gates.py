"""Sizes of steps and norms with a gate: transformers' layers, the twins in torch, and kernels in C."""

from __future__ import annotations

from contextlib import nullcontext
from math import inf

import pytest
import torch
from torch import Tensor
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from h2o_flexgen.formats.kernel_table import TORCH
from h2o_flexgen.kernels.operations import gated_norm, step_sizes
from h2o_flexgen.kernels.recording import CallRecording, WorkingRoom
from h2o_flexgen.kernels.states import gated_norm_twin, step_sizes_twin
from tests.helpers.all_of import all_of
from tests.kernels.variants import VARIANTS, used, without

LAST_BITS = {torch.float32: 4e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}
WIDTH, EPS = 60, 1e-5


def norm_inputs(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(sum(shape))
    x, gate = (torch.randn(shape, generator=draw).to(dtype) for _ in range(2))
    return x, gate, torch.randn(shape[-1], generator=draw)


# -- gated norms -------------------------------------------------------------------------------------------------------------


def test_norms_are_those_of_transformers() -> None:
    x, gate, weight = norm_inputs(2, 3, WIDTH)
    layers = {
        (1, False): Qwen3NextRMSNormGated(WIDTH, EPS),
        (1, True): MambaRMSNormGated(WIDTH, WIDTH, EPS),
        (4, True): MambaRMSNormGated(WIDTH, WIDTH // 4, EPS),
        (3, False): FalconH1RMSNormGated(WIDTH, EPS, 3, True),
    }
    for (groups, gate_first), layer in layers.items():
        layer.weight.data.copy_(weight)
        found = gated_norm_twin(x, gate, weight, EPS, groups, gate_first)
        torch.testing.assert_close(found, layer(x, gate), rtol=4e-6, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
@all_of(
    {
        "dtype": LAST_BITS,
        "shape": [(2, 3, WIDTH), (1, 4), (0, 16), (3, 5, 4, 128)],
        "groups": (1, 4),
        "gate_first": (True, False),
        "is_wide": (True, False),
    }
)
def test_rows_are_normalised_as_torch_does_it(
    variant: str, dtype: torch.dtype, shape: tuple[int, ...], groups: int, gate_first: bool, is_wide: bool
) -> None:
    x, gate, weight = norm_inputs(*shape, dtype=dtype)
    weight = weight if is_wide else weight.to(dtype)
    expected = gated_norm_twin(x, gate, weight, EPS, groups, gate_first)
    with used(variant), without("gated_norm_twin"):
        found = gated_norm(x, gate, weight, EPS, groups, gate_first)
    torch.testing.assert_close(found, expected, rtol=LAST_BITS[dtype], atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_normalised_row_has_the_same_bits_in_any_company_and_apart(variant: str) -> None:
    x, gate, weight = norm_inputs(50, 2 * WIDTH)
    x, gate, weight = x[:, WIDTH:], gate[:, WIDTH:], weight[WIDTH:]
    with used(variant):
        own = gated_norm(x[3:4].contiguous(), gate[3:4].contiguous(), weight, EPS, 2)
        assert torch.equal(gated_norm(x, gate, weight, EPS, 2)[3:4], own)


# -- step sizes --------------------------------------------------------------------------------------------------------------


def test_steps_are_those_of_transformers() -> None:
    """They are the decay of Qwen3-Next, and the sizes of Mamba-2."""
    x, bias, logs = torch.randn(2, 3, 5), torch.randn(5), torch.randn(5)
    decay = -logs.exp() * torch.nn.functional.softplus(x + bias)
    torch.testing.assert_close(step_sizes_twin(x, bias, logs, are_logs=True), decay)
    torch.testing.assert_close(step_sizes_twin(x, bias, -logs.exp()), decay)
    sizes = torch.nn.functional.softplus(x + bias).clamp(0.3, 0.8)
    assert torch.equal(step_sizes_twin(x, bias, least=0.3, most=0.8), sizes)


@pytest.mark.parametrize("variant", VARIANTS)
@all_of(
    {
        "dtype": LAST_BITS,
        "has_bias": (True, False),
        "rated": ("no", "by rates", "by logarithms"),
        "bounds": [(0.0, inf), (0.4, 0.9)],
    }
)
def test_steps_are_sized_as_torch_does_it(
    variant: str, dtype: torch.dtype, has_bias: bool, rated: str, bounds: tuple[float, float]
) -> None:
    draw = torch.Generator().manual_seed(3)
    x = (8 * torch.randn(3, 4, 2 * 7, generator=draw)).to(dtype)[..., 7:]
    x[0, 0, 0], x[0, 0, 1], x[0, 0, 2] = torch.nan, 100.0, -100.0
    bias, rates = torch.randn(7, generator=draw).to(dtype), torch.randn(7, generator=draw)
    given = x, bias if has_bias else None, None if rated == "no" else rates, rated == "by logarithms", *bounds
    with used(variant), without("step_sizes_twin"):
        found = step_sizes(*given)
    torch.testing.assert_close(found, step_sizes_twin(*given), rtol=2e-6, atol=1e-7, equal_nan=True)
    assert found.dtype == torch.float32


@pytest.mark.parametrize("variant", [*VARIANTS, TORCH])
@all_of({"dtype": LAST_BITS, "neighbours": (2, 5, 16, 40), "are_logs": (True, False), "bounds": [(0.0, inf), (0.4, 0.9)]})
def test_a_rate_may_be_that_of_neighbours(
    variant: str, dtype: torch.dtype, neighbours: int, are_logs: bool, bounds: tuple[float, float]
) -> None:
    draw = torch.Generator().manual_seed(neighbours)
    x = (8 * torch.randn(3, 4, 2 * 3 * neighbours, generator=draw)).to(dtype)[..., 3 * neighbours :]
    x[0, 0, 0], x[0, 0, 1], x[0, 0, 2], x[0, 0, 3] = torch.nan, 100.0, -100.0, 0.0
    rates = torch.randn(3, generator=draw)
    bias = torch.randn(3 * neighbours, generator=draw).to(dtype) if are_logs else None
    with nullcontext() if variant == TORCH else without("step_sizes_twin"), used(variant):
        found = step_sizes(x, bias, rates, are_logs, *bounds)
    expected = step_sizes_twin(x, bias, rates.repeat_interleave(neighbours), are_logs, *bounds)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-7, equal_nan=True)
    assert found.shape == x.shape and found.dtype == torch.float32


@pytest.mark.skipif(not VARIANTS, reason="there are no kernels in C")
def test_steps_and_norms_are_recorded() -> None:
    x, gate, weight = norm_inputs(2, 1, WIDTH)
    out = torch.zeros(2, 2, 1, WIDTH)

    def work() -> None:
        out[0].copy_(step_sizes(x, weight, weight, are_logs=True))
        out[1].copy_(gated_norm(x, gate, weight, EPS))

    program = CallRecording.of(work, WorkingRoom())
    x.copy_(torch.randn(2, 1, WIDTH))
    program()
    found = out.clone()
    work()
    assert found.any() and torch.equal(found, out)
