"""Every kernel in Triton under its name in kernels/table.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from h2o_flexgen.kernels.gpu.append import append, rotate
from h2o_flexgen.kernels.gpu.evict import evict
from h2o_flexgen.kernels.gpu.move_slots import gather_slots, take_slots
from h2o_flexgen.kernels.gpu.prompt_attention import prompt_attention
from h2o_flexgen.kernels.gpu.rms_norm import rms_norm

KERNELS: Sequence[Callable[..., Any]] = (append, rotate, evict, gather_slots, take_slots, prompt_attention, rms_norm)
FUNCTIONS: Mapping[str, Callable[..., Any]] = {function.__name__: function for function in KERNELS}
