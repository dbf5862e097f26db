"""Lengths of vectors in C are torch's up to the last bits."""

from __future__ import annotations

import pytest
import torch

from h2o_flexgen.kernels.operations import lengths
from h2o_flexgen.kernels.row_functions import lengths_twin
from tests.helpers.all_of import all_of
from tests.kernels.variants import VARIANTS, used, without


@pytest.mark.parametrize("variant", VARIANTS)
@all_of(
    {
        "dtype": [torch.float32, torch.float16, torch.bfloat16],
        "shape": [(3, 1, 4, 64), (2, 5, 1, 7), (1, 1, 2, 130), (0, 1, 2, 8)],
    }
)
def test_vectors_are_measured_as_torch_does_it(variant: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)
    with used(variant), without("lengths_twin"):
        found = lengths(x)
    torch.testing.assert_close(found, lengths_twin(x), rtol=1e-6, atol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_length_has_the_same_bits_in_any_company(variant: str) -> None:
    """Also of vectors that lie between others."""
    x = torch.randn(3, 2, 4, 90)
    with used(variant):
        assert torch.equal(lengths(x[1:2, :, :, 30:60]), lengths(x[..., 30:60].contiguous())[1:2])
