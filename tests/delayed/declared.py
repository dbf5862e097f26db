"""What a sanitizer is told that sees functions of torch alone: what kernels in Triton read and write, and which parts of a
buffer are used at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from inspect import signature
from typing import Any
from unittest.mock import patch

from torch import Tensor

from h2o_flexgen.engine.rows import BatchRows
from h2o_flexgen.engine.stores.kv import KVStore
from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.schedule.ops import Task
from tests.delayed.sanitizer import StreamSanitizer

# The arguments that a function writes to. It also writes what it returns, and only reads all others.
WRITTEN: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("group_encode", "group_decode", "tile_encode", "tile_decode", "tile_decode_rows"), ("out",)),
    **dict.fromkeys(("stored_decode", "take_slots", "gather_slots"), ("out",)),
    **dict.fromkeys(("append", "append_coded", "evict"), ("image", "notes")),
    "gather_counted": (),
    **dict.fromkeys(("counted_plain_products", "counted_tile_products", "counted_stored_products"), ("out",)),
    "add_counted": ("sums",),
    **dict.fromkeys(("rotate", "rms_norm", "decode_attention", "prompt_attention", "shared_attention"), ()),
    "choose_slots": (),
    "bring_slots": ("target",),
    **dict.fromkeys(("tile_product", "tile_products", "tile_dots", "int8_product", "stored_product", "gated_norm"), ()),
    **dict.fromkeys(("gated_delta", "selective_scan", "short_convolution"), ("state",)),
}


@contextmanager
def declared(sanitizer: StreamSanitizer) -> Iterator[None]:
    """A context in which the sanitizer is told of each call of a kernel for GPUs."""
    functions: dict[str, Callable[..., Any]] = import_module("h2o_flexgen.kernels.gpu.functions").FUNCTIONS
    told = {name: _telling(name, function, sanitizer) for name, function in functions.items()}
    with patch.dict(functions, told):
        yield


@contextmanager
def parts_told(sanitizer: StreamSanitizer) -> Iterator[None]:
    """A context in which it is told of the places of prompts that go home part by part: one is computed in one place while
    another one is read."""
    begin = KVStore.begin_parts

    def told(store: KVStore, task: Task, rows: BatchRows) -> None:
        begin(store, task, rows)
        places, buffer = store._places[task.layer, task.batch], store._buffer(task)
        for number in range(places.count):
            sanitizer.part(store._device_ring[buffer][places.start(number) :])
            if store._note_ring:
                sanitizer.part(store._note_ring[buffer][places.start_of_notes(number, store._note_bytes) :])

    with patch.object(KVStore, "begin_parts", told):
        yield


def _telling(name: str, function: Callable[..., Any], sanitizer: StreamSanitizer) -> Callable[..., Any]:
    parameters = list(signature(function).parameters)

    @wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        outcome = function(*given, **named)
        arguments = {**dict(zip(parameters, given)), **named}
        written = [value for one, value in arguments.items() if one in WRITTEN[name]]
        sanitizer.declare(name, tensors_of(list(arguments.values())), tensors_of([*written, outcome]))
        return outcome

    return call


def only_read(name: str, function: Callable[..., Any], given: tuple[Any, ...]) -> list[Tensor]:
    """The tensors in the arguments of a call that it does not write to."""
    named = zip(signature(function).parameters, given)
    return list(tensors_of([value for one, value in named if one not in WRITTEN[name]]))


def tensors_of(value: object) -> Iterator[Tensor]:
    """The tensors in an argument, which may be made of several."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Factor):
        yield value.values
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_of(one)
