"""Triton's interpreter, mended: it multiplies the bits of bfloat16 as if they were whole numbers, knows one thread, and warns of
each NaN."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any
from unittest.mock import patch

import numpy
from triton import language
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle


def widened(handle: TensorHandle) -> TensorHandle:
    if handle.get_element_ty() != language.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(numpy.uint32) << 16).view(numpy.float32), language.float32)


@contextmanager
def mended() -> Iterator[None]:
    create_dot, launch, one_at_a_time = InterpreterBuilder.create_dot, GridExecutor.__call__, Lock()

    def widened_dot(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *rest: Any) -> TensorHandle:
        return create_dot(self, widened(a), widened(b), *rest)

    def launched_alone(self: GridExecutor, *given: Any, **options: Any) -> None:
        with one_at_a_time, numpy.errstate(all="ignore"):
            launch(self, *given, **options)

    with patch.object(InterpreterBuilder, "create_dot", widened_dot), patch.object(GridExecutor, "__call__", launched_alone):
        yield
