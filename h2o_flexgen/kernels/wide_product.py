"""The product of rows and a transposed plain matrix, which is widened to float32 piece by piece: for float32, and where the
processor has no instructions that multiply the matrix's type. Sums are in float32; C and torch sum in different orders. With C
what becomes of a row depends on nothing but the row and the matrix."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional

from h2o_flexgen.formats.kernel_sizes import TWIN_VALUES
from h2o_flexgen.formats.plain import PlainFormat
from h2o_flexgen.kernels.factor import Factor, Meeting
from h2o_flexgen.kernels.native import KINDS
from h2o_flexgen.kernels.panels import ARRANGED, PLAIN_BITS, panel_products


def wide_product(format: PlainFormat, x: Factor, data: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
    """x (..., inputs), data (outputs, inputs), bias (outputs,) -> (..., outputs)"""
    out = x.values.new_empty(*x.values.shape[:-1], outputs)
    wide_products(format, x, Meeting.of_all(x, data.contiguous(), bias), out)
    return out


def wide_products(format: PlainFormat, x: Factor, meetings: Sequence[Meeting], out: Tensor) -> None:
    """The same of rows that meet matrices of their own and of one type, into out (..., outputs)."""
    shape = out.shape[-1], x.values.shape[-1]
    assert all(meeting.data.shape == shape for meeting in meetings)
    if meetings:
        panel_products("wide_product", x, ARRANGED[PLAIN_BITS], meetings, out, told=KINDS[meetings[0].data.dtype])


def wide_product_twin(format: PlainFormat, x: Factor, data: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
    wide = x.made(Tensor.float)
    out = x.values.new_empty(*x.values.shape[:-1], outputs)
    step = max(1, TWIN_VALUES // max(1, data.shape[1]))
    for first in range(0, outputs, step):
        part = slice(first, first + step)
        added = None if bias is None else bias[part].float()
        out[..., part] = functional.linear(wide, data[part].float(), added)
    return out
