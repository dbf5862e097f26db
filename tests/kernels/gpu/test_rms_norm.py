"""RMS norm in Triton is torch's up to the last bits."""

from __future__ import annotations

import pytest
import torch

from h2o_flexgen.kernels.gpu.norms import rms_norm
from h2o_flexgen.kernels.row_functions import rms_norm_twin

# roundings: a dozen of fp32; else those of the type, and in the interpreter two towards zero
LAST_BITS = {torch.float32: 2e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}


@pytest.mark.parametrize("dtype", LAST_BITS)
@pytest.mark.parametrize("shape", [(3, 1, 64), (2, 2, 3, 5), (1, 1100), (0, 16), (4, 1)])
@pytest.mark.parametrize("weighing", ["usual", "from one", "wide", "none"])
def test_rows_are_normalised_as_torch_does_it(
    shape: tuple[int, ...], dtype: torch.dtype, weighing: str, gpu: torch.device
) -> None:
    from_one = weighing == "from one"
    draw = torch.Generator().manual_seed(sum(shape))
    x, drawn = torch.randn(shape, generator=draw).to(dtype), torch.randn(shape[-1], generator=draw)
    weight = None if weighing == "none" else drawn if weighing == "wide" else drawn.to(dtype)
    if len(shape) == 4:
        x[0, 0, 0, 1], x[0, 0, 1, 0], x[1, 1, 2] = torch.nan, torch.inf, 0.0
    found = rms_norm(x.to(gpu), None if weight is None else weight.to(gpu), 1e-6, from_one).cpu()
    expected = rms_norm_twin(x, weight, 1e-6, from_one)
    torch.testing.assert_close(found, expected, rtol=LAST_BITS[dtype], atol=1e-6, equal_nan=True)


def test_a_row_has_the_same_bits_in_any_company(gpu: torch.device) -> None:
    x, weight = torch.randn(5, 300), torch.randn(300)
    together = rms_norm(x.to(gpu), weight.to(gpu), 1e-5)
    assert torch.equal(together[3:4], rms_norm(x[3:4].to(gpu), weight.to(gpu), 1e-5))
