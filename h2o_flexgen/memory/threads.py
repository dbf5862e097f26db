"""Threads that are started while there is room for them, and what is said where there is none.

A thread needs a stack in the address space (`ulimit -v`) and a place among the user's processes (`ulimit -u`). Those that
compute are OpenMP's, whose library ends the process when it cannot start one. So all are started before memory is spent.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

CANNOT_START = "can't start new thread"  # what Python says
ADVICE = "a thread could not be started: raise the limit on memory or address space (ulimit -v), or on processes (ulimit -u)"
VALUES_OF_A_THREAD = 1 << 16  # more than torch lets one thread do alone


@contextmanager
def starting() -> Iterator[None]:
    """Inside, want of room for a thread is a MemoryError."""
    try:
        yield
    except RuntimeError as error:
        if CANNOT_START not in str(error):
            raise
        raise MemoryError(ADVICE) from error


def started_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """Whose threads are all there when this returns, and wait."""
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


def start_computing_threads() -> None:
    """Those of OpenMP that work for the calling thread. Whether there is room for them is tried with threads that can fail."""
    threads = torch.get_num_threads()
    if threads > 1:
        started_pool(threads, "trial").shutdown(wait=True)
        torch.zeros(threads * VALUES_OF_A_THREAD).add_(1.0)
