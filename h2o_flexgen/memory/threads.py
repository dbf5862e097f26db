"""Threads: started while there is memory for them, with clear errors if there is not.

A thread needs a stack in the address space (`ulimit -v`) and a place among the user's processes (`ulimit -u`). The threads that
compute for torch are OpenMP's, which ends the process when it cannot start one. Those of kernels are a team of our own, which
can run with fewer threads. All are started before other memory is used.
"""

from __future__ import annotations

import _thread
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from h2o_flexgen.kernels.native import start_team

CANNOT_START = "can't start new thread"  # in Python's error
ADVICE = "a thread could not be started: raise the limit on memory or address space (ulimit -v), or on processes (ulimit -u)"
VALUES_OF_A_THREAD = 1 << 16  # more than torch processes in one thread alone


class Event(Protocol):
    """Something that happens once."""

    def set(self) -> None: ...

    def is_set(self) -> bool: ...

    def wait(self) -> object: ...


class Latch:
    """An event that is only a lock: a run makes one for every task, and that of Python's library costs ten times as much."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = _thread.allocate_lock()
        self._lock.acquire()

    def set(self) -> None:
        """Lets all pass. It may be set several times, and by several threads."""
        with suppress(RuntimeError):  # it was open
            self._lock.release()

    def is_set(self) -> bool:
        return not self._lock.locked()

    def wait(self) -> None:
        if self._lock.locked():
            with suppress(RuntimeError), self._lock:  # a Ctrl-C at any moment does not leave it locked for other threads
                pass


class Handover:
    """The events, queues and threads with which a run's threads wait for each other and exchange tasks. A device provides them,
    so that a device which checks the order of operations sees all that decides it."""

    def event(self) -> Event:
        return Latch()

    def queue(self) -> SimpleQueue[Any]:
        return SimpleQueue()

    def thread(self, work: Callable[..., None], given: tuple[object, ...], name: str) -> threading.Thread:
        return threading.Thread(target=work, args=given, name=name, daemon=True)

    def unfinished(self) -> dict[Any, Any]:
        """The tasks that are not over yet, by key: a key that is missing here means that its task is over."""
        return {}


class SharedWork:
    """An action on every item, for several threads that each take the next item until there is none. The one that waits for all
    is woken once, not for every item."""

    def __init__(self, action: Callable[..., object], items: Sequence[object]) -> None:
        self._action = action
        self._left = enumerate(items)  # each next step is taken by one thread, never by two
        self._count = len(items)
        self._done: list[int] = []
        self._errors: dict[int, BaseException] = {}
        self._over = Latch()

    def do(self) -> None:
        """The work of one thread: it takes items until none is left."""
        for place, item in self._left:
            try:
                self._action(item)
            except BaseException as error:
                self._errors[place] = error
            self._done.append(place)
        if len(self._done) == self._count:
            self._over.set()

    def finish(self) -> None:
        """Waits until all is done, and raises the error of the first item that has one."""
        self._over.wait()
        if self._errors:
            raise self._errors[min(self._errors)]


@contextmanager
def starting() -> Iterator[None]:
    """A context in which a thread that cannot be started is a MemoryError."""
    try:
        yield
    except RuntimeError as error:
        if CANNOT_START not in str(error):
            raise
        raise MemoryError(ADVICE) from error


def started_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """A pool with all its threads started and waiting."""
    pool, all_there = ThreadPoolExecutor(threads, thread_name_prefix=name), threading.Event()
    try:
        with starting():
            waiting = [pool.submit(all_there.wait) for _ in range(threads)]
    except BaseException:
        all_there.set()
        pool.shutdown(wait=True, cancel_futures=True)
        raise
    all_there.set()
    for one in waiting:
        one.result()
    return pool


FORKED = "this process was forked from one that computes, and has none of its threads"
SPAWN = 'start processes with multiprocessing.get_context("spawn") instead'


@cache
def _first_to_compute() -> int:
    """The first process. A forked process inherits the answer; a spawned one has none."""
    return os.getpid()


def do_without_lost_threads() -> None:
    """Computes with one thread after a fork: OpenMP would wait for ever for threads that only the parent has."""
    is_known = _first_to_compute.cache_info().currsize > 0
    if is_known and _first_to_compute() != os.getpid() and torch.get_num_threads() > 1:
        torch.set_num_threads(1)
        warnings.warn(f"{FORKED}: it computes with one thread; {SPAWN}", RuntimeWarning, stacklevel=3)


class TakingTurns:
    """Lets threads use something one at a time: each waits for its turn. A thread would wait for itself for ever, so it is
    refused instead."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.Lock()
        self._holder: int | None = None  # the thread that has the turn

    @contextmanager
    def taken(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            if self._holder == threading.get_ident():
                advice = "read its stream to the end, or close it, before the next one"
                raise ValueError(f"{self._what} is in the middle of another generation of this thread: {advice}")
            self._lock.acquire()
        self._holder = threading.get_ident()
        try:
            yield
        finally:
            self._holder = None
            self._lock.release()


def refuse_forked(process: int, what: str) -> None:
    """Refuses what belongs to another process: threads, files and device memory do not survive a fork."""
    if process != os.getpid():
        advice = f"make another one here, or {SPAWN}"
        raise ValueError(f"{what} was made in process {process}, from which this one was forked: {advice}")


def start_computing_threads(teams: int = 1) -> None:
    """Starts the OpenMP threads of the calling thread, after a trial with threads that can fail: as many as all `teams` have,
    for every thread that calls functions of torch has one of its own. Then starts those that kernels have in common."""
    do_without_lost_threads()
    _first_to_compute()
    threads = torch.get_num_threads()
    if threads > 1:
        started_pool(teams * threads, "trial").shutdown(wait=True)
        torch.zeros(threads * VALUES_OF_A_THREAD).add_(1.0)
        start_team(threads)
