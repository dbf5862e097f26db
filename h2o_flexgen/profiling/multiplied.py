"""One product as a run makes it: rows times the bytes of a matrix in some format, by the kernel that is chosen for them. All
that measures products measures them here."""

from __future__ import annotations

from torch import Tensor

from h2o_flexgen.formats.table import FORMATS, PLAIN
from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.operations import packed_product, plain_product


def multiplied(op: str, format: str, x: Tensor, data: Tensor, outputs: int) -> Tensor:
    """x (..., inputs), the bytes of a matrix (outputs, inputs) -> (..., outputs). There must be a kernel for so many rows."""
    if format == PLAIN:
        return plain_product(Factor(x), data.view(x.dtype).view(outputs, -1), None)
    out = packed_product(op, format, Factor(x), in_units(format, data, outputs), outputs, None)
    assert out is not None, f"no kernel does {op} of {format} with {x.shape[:-1].numel()} rows"
    return out


def in_units(format: str, data: Tensor, outputs: int) -> Tensor:
    """(units of rows, bytes of a unit)"""
    return data.view(-(-outputs // FORMATS[format].rows_together), -1)
