"""One product as a run makes it: rows times the bytes of a matrix in some form, by the kernel that is chosen for them. All that
measures products measures them here."""

from __future__ import annotations

from torch import Tensor

from h2o_flexgen.formats.table import CODECS, PLAIN
from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.operations import packed_product, plain_product


def multiplied(op: str, form: str, x: Tensor, data: Tensor, outputs: int) -> Tensor:
    """x (..., inputs), the bytes of a matrix (outputs, inputs) -> (..., outputs). There must be a kernel for so many rows."""
    if form == PLAIN:
        return plain_product(Factor(x), data.view(x.dtype).view(outputs, -1), None)
    out = packed_product(op, form, Factor(x), in_units(form, data, outputs), outputs, None)
    assert out is not None, f"no kernel does {op} of {form} with {x.shape[:-1].numel()} rows"
    return out


def in_units(form: str, data: Tensor, outputs: int) -> Tensor:
    """(units of rows, bytes of a unit)"""
    return data.view(-(-outputs // CODECS[form].rows_together), -1)
