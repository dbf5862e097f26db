"""Plain values: encoding and decoding are copies, and a product is torch's."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from h2o_flexgen.formats.plain import PlainFormat
from h2o_flexgen.kernels.factor import Factor


def plain_encode(format: PlainFormat, values: Tensor, out: Tensor) -> None:
    out.view(values.dtype).view(values.shape).copy_(values)


def plain_decode(format: PlainFormat, data: Tensor, out: Tensor) -> None:
    out.copy_(data.view(out.dtype).view(out.shape))


def plain_product(format: PlainFormat, x: Factor, data: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
    return functional.linear(x.values, data, bias)
