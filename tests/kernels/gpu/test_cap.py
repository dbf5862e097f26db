"""Scores that come near a cap and no further, in Triton: near to tanh from the smallest score to the largest."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from h2o_flexgen.kernels.gpu.attention_parts import capped
from tests.kernels import test_cap

CAPS = None, 0.02, 2.0  # of attention whose scores are about 1


@triton.jit
def cap_all(scores: tl.tensor, COUNT: tl.constexpr, CAP: tl.constexpr) -> None:
    place = scores + tl.arange(0, COUNT)
    tl.store(place, capped(tl.load(place), CAP))


def found(scores: torch.Tensor, cap: float) -> torch.Tensor:
    out = scores.clone()
    cap_all[(1,)](out, COUNT=len(out), CAP=cap)
    return out.cpu()


@pytest.mark.parametrize("cap", [0.02, 50.0])
def test_scores_of_any_size_keep_their_digits(gpu: torch.device, cap: float) -> None:
    scores = torch.logspace(-30, 30, 1024).mul_(cap)
    scores[::2] *= -1.0
    torch.testing.assert_close(found(scores.to(gpu), cap).double(), test_cap.capped(scores.double(), cap), rtol=2e-6, atol=0.0)
    scores = torch.linspace(0.0, 4 * cap, 4096)
    out, turned = found(scores.to(gpu), cap), found(-scores.to(gpu), cap)
    torch.testing.assert_close(out.double(), test_cap.capped(scores.double(), cap), rtol=2e-6, atol=0.0)
    assert torch.equal(turned, -out) and out[0] == 0.0 and out.max() <= cap


def test_infinity_is_capped_and_what_is_no_number_stays_none(gpu: torch.device) -> None:
    scores = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e38], device=gpu)
    torch.testing.assert_close(found(scores, 2.0), torch.tensor([2.0, -2.0, torch.nan, 2.0]), equal_nan=True, rtol=0, atol=0)
    assert torch.equal(found(scores[:2], 0.0), scores[:2].cpu())
