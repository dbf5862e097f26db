"""Kept: keys or values of slots, in the form that they are kept in."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from h2o_flexgen.quant.codec import PLAIN


class Kept(NamedTuple):
    """(rows, kv_heads, slots, width): plain values, or the bytes of a codec."""

    data: Tensor
    codec: str = PLAIN
