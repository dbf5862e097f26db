"""Every kernel in Triton under its name in kernels/table.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

KERNELS: Sequence[Callable[..., Any]] = ()
FUNCTIONS: Mapping[str, Callable[..., Any]] = {function.__name__: function for function in KERNELS}
