"""The context in which the clocked device is there and a checker listens."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from h2o_flexgen.engine.executor import Executor, _Pending
from h2o_flexgen.formats.kernel_table import TORCH
from h2o_flexgen.kernels import raw_memory
from h2o_flexgen.memory.device import Device, open_device
from h2o_flexgen.memory.disk import DiskFiles
from h2o_flexgen.schedule.ops import Task
from h2o_flexgen.session import loaded_model
from tests.clocked.checker import Checker, listening
from tests.clocked.device import ClockedDevice
from tests.clocked.tensor import NAME, Watched
from tests.kernels.variants import used


def open_clocked(name: str) -> Device:
    kind, _, number = name.partition(":")
    return ClockedDevice(int(number or 0)) if kind == NAME else open_device(name)


@contextmanager
def sound() -> Iterator[Checker]:
    """A context in which nothing may race. Kernels in C are off: references then come from the same functions of torch."""
    with used(TORCH), checked() as checker:
        yield checker
        gc.collect()  # whatever is dropped in a circle goes back now
    assert not checker.faults, "\n".join(checker.faults)
    assert not checker.locked_ranges, f"{checker.locked_ranges} ranges are still page-locked"


@contextmanager
def checked() -> Iterator[Checker]:
    """A context in which LLM(device="clocked") works, and in which all that happens is checked."""
    with ExitStack() as stack:
        checker = stack.enter_context(listening())
        for owner, name, replacement in (
            (loaded_model, "open_device", open_clocked),
            (raw_memory, "touched", checker.touched),
            (DiskFiles, "each", _each(checker, DiskFiles.each)),
            (Executor, "_act", _act(checker, Executor._act)),
        ):
            stack.enter_context(patch.object(owner, name, replacement))
        stack.enter_context(torch.inference_mode())
        stack.enter_context(Watched())
        yield checker


def _each(checker: Checker, each: Callable[..., None]) -> Callable[..., None]:
    """Threads of the disk act for the thread that gives them work, which waits until they are done."""

    def in_turn(files: DiskFiles, action: Callable[..., object], items: Sequence[object]) -> None:
        before, task, stream, behind = checker.snapshot(), checker.task, checker.stream, list[Any]()

        def act(item: object) -> None:
            with checker.lock:
                checker.host.join(before)
            with Watched(), checker.doing(task), checker.on(stream):
                action(item)
            behind.append(checker.snapshot())

        try:
            each(files, act, items)
        finally:
            with checker.lock:
                for clock in behind:
                    checker.host.join(clock)

    return in_turn


def _act(checker: Checker, act: Callable[..., None]) -> Callable[..., None]:
    """Faults name the task."""

    def named(executor: Executor, task: Task, pending: _Pending) -> None:
        with checker.doing(str(task)):
            act(executor, task, pending)

    return named
