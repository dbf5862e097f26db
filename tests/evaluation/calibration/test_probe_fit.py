"""A probe is the linear map that best says what tokens were worth, whatever order layers and texts are summed in."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from h2o_flexgen.calibration.calibration import LayerRead, ProbeFit, share_found

LAYERS, TEXTS, TOKENS, WIDTH, HEADS = 2, 4, 50, 6, 3


def read(x: torch.Tensor, scores: torch.Tensor) -> LayerRead:
    nothing = torch.zeros(0)
    return LayerRead(x, nothing, nothing, nothing, scores)


def test_a_map_that_exists_is_found() -> None:
    generator = torch.Generator().manual_seed(0)
    weights, biases = torch.randn(LAYERS, HEADS, WIDTH, generator=generator), torch.randn(LAYERS, HEADS, generator=generator)
    fit = ProbeFit(TEXTS)
    for weight, bias in zip(weights, biases - 8):
        for _ in range(TEXTS):
            x = torch.randn(2 * TOKENS, WIDTH, generator=generator)  # behind a text stands its copy
            fit.note(read(x, (x[:TOKENS] @ (0.3 * weight).T + bias).exp().T))
    probe = fit.probe("a model", "texts")
    np.testing.assert_allclose(probe.weights, 0.3 * weights.numpy(), atol=0.05)
    np.testing.assert_allclose(probe.biases, biases.numpy() - 8, atol=0.05)
    assert len(fit.found) == LAYERS and min(fit.found) > 0.9


def test_the_share_of_the_best_that_is_found() -> None:
    wanted = torch.arange(20.0)[:, None].repeat(1, 2)  # the best 4 are the last ones
    foretold = wanted.clone()
    foretold[[19, 18], 0] = -1  # of one head two of them are missed
    assert share_found(foretold, wanted) == pytest.approx(6 / 8)
