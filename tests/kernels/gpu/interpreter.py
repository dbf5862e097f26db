"""Triton's interpreter, mended, so that outcomes are those of a GPU to the last bit: it multiplies the bits of bfloat16 as if
they were whole numbers, cuts float32 off where a GPU rounds it to bfloat16, and warns of each NaN."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy
import torch
from triton import language
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


@contextmanager
def mended() -> Iterator[None]:
    create_dot, convert = InterpreterBuilder.create_dot, interpreter._convert_float

    def widened_dot(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *rest: Any) -> TensorHandle:
        return create_dot(self, widened(a), widened(b), *rest)

    def rounded(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (language.float32, language.bfloat16):
            return convert(values, source, target, mode)
        wide = torch.from_numpy(numpy.ascontiguousarray(values).view(numpy.float32).copy())
        return wide.bfloat16().view(torch.int16).numpy().view(numpy.uint16).reshape(values.shape)

    with (
        patch.object(InterpreterBuilder, "create_dot", widened_dot),
        patch.object(interpreter, "_convert_float", rounded),
        numpy.errstate(all="ignore"),  # NaN and infinity are meant
    ):
        yield


def widened(handle: TensorHandle) -> TensorHandle:
    if handle.get_element_ty() != language.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(numpy.uint32) << 16).view(numpy.float32), language.float32)
