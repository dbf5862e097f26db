"""Every kernel in Triton under its name in kernels/table.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from h2o_flexgen.kernels.gpu.decode_attention import decode_attention

KERNELS: Sequence[Callable[..., Any]] = (decode_attention,)
FUNCTIONS: Mapping[str, Callable[..., Any]] = {function.__name__: function for function in KERNELS}
