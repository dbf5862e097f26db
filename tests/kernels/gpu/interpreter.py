"""Triton's interpreter, mended, so that outcomes are those of a GPU to the last bit: it multiplies the bits of bfloat16 as if
they were whole numbers, cuts float32 off where a GPU rounds it to bfloat16, knows one thread, and warns of each NaN. It puts
its functions into the language anew for each function that a kernel calls, which takes almost half of the time. Of the rest a
quarter goes into sums of whole numbers that are made once more in 64 bits, for an assertion that is off, and into a table of
types that is made for each value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from inspect import ismodule
from threading import Lock
from typing import Any
from unittest.mock import patch

import numpy
import torch
from triton import language
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle


@contextmanager
def mended() -> Iterator[None]:
    create_dot, convert = InterpreterBuilder.create_dot, interpreter._convert_float
    launch, one_at_a_time = GridExecutor.__call__, Lock()
    put_into, has_been_put = interpreter._patch_lang, set[frozenset[str]]()
    type_of, types = interpreter._get_np_dtype, dict[str, Any]()
    builder = interpreter.interpreter_builder

    def widened_dot(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *rest: Any) -> TensorHandle:
        return create_dot(self, widened(a), widened(b), *rest)

    def converted(values: Any, source: Any, target: Any, mode: Any) -> Any:
        is_cut = (source, target) == (language.float32, language.bfloat16)
        return rounded(values) if is_cut else convert(values, source, target, mode)

    def type_once(of: Any) -> Any:
        """By the name of a value's type: all blocks of it have the same."""
        one = of.element_ty if isinstance(of, language.block_type) else of
        return types[one.name] if one.name in types else types.setdefault(one.name, type_of(one))

    def put_once(function: Callable[..., Any]) -> Any:
        """Once in a launch for all functions that see the same parts of the language."""
        seen = seen_by(function)
        if seen in has_been_put:
            return interpreter._LangPatchScope()
        has_been_put.add(seen)
        return put_into(function)

    def launched_alone(self: GridExecutor, *given: Any, **options: Any) -> None:
        with one_at_a_time, numpy.errstate(all="ignore"):
            has_been_put.clear()
            launch(self, *given, **options)

    with ExitStack() as patches:
        patches.enter_context(patch.object(InterpreterBuilder, "create_dot", widened_dot))
        patches.enter_context(patch.object(interpreter, "_convert_float", converted))
        patches.enter_context(patch.object(interpreter, "_patch_lang", put_once))
        patches.enter_context(patch.object(interpreter, "_get_np_dtype", type_once))
        patches.enter_context(patch.object(builder, "options", replace(builder.options, sanitize_overflow=False)))
        patches.enter_context(patch.object(GridExecutor, "__call__", launched_alone))
        yield


@cache
def seen_by(function: Callable[..., Any]) -> frozenset[str]:
    """The modules of the language among a function's names."""
    modules = filter(ismodule, function.__globals__.values())
    return frozenset(module.__name__ for module in modules if module in (language, language.core))


def widened(handle: TensorHandle) -> TensorHandle:
    if handle.get_element_ty() != language.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(numpy.uint32) << 16).view(numpy.float32), language.float32)


def rounded(values: Any) -> Any:
    """float32, given as its bits or as values, in the bits of bfloat16."""
    wide = torch.from_numpy(numpy.ascontiguousarray(values).view(numpy.float32).copy())
    return wide.bfloat16().view(torch.int16).numpy().view(numpy.uint16).reshape(values.shape)
