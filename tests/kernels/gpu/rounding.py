"""The interpreter of Triton cuts float32 off where a GPU rounds it to bfloat16. In this context it rounds, so that outcomes are
those of a GPU to the last bit."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from triton import language
from triton.runtime import interpreter


@contextmanager
def rounded_as_on_a_gpu() -> Iterator[None]:
    convert = interpreter._convert_float

    def rounded(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (language.float32, language.bfloat16):
            return convert(values, source, target, mode)
        wide = torch.from_numpy(np.ascontiguousarray(values).view(np.float32).copy())
        return wide.bfloat16().view(torch.int16).numpy().view(np.uint16).reshape(values.shape)

    with patch.object(interpreter, "_convert_float", rounded), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NaN and infinity are meant
        yield
