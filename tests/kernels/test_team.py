"""The team of threads of kernels in C: which takes which part of a work, and which waits for which."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from h2o_flexgen.kernels.int8_product import int8_rows
from h2o_flexgen.kernels.native import native_library, start_team
from tests.helpers.patience import PATIENCE_SECONDS
from tests.kernels.variants import VARIANTS, used

PARTS = 12  # so few are taken one by one
MANY = 200  # threads
ROOM_BYTES = 32 << 20  # for Python's own objects, and the stacks of a few threads
pytestmark = [
    pytest.mark.parametrize("variant", VARIANTS[:1]),
    pytest.mark.skipif(sys.platform == "win32", reason="there are no kernels in C"),
]
Action = Callable[[int, int], None]


def share_out(count: int, threads: int, action: Action) -> None:
    """As a kernel does it. The action is given a part's number and the member of the team which does it."""
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_long, ctypes.c_int)
    called = function(lambda _given, number, member: action(number, member))
    native_library().share_out(None, ctypes.c_long(count), ctypes.c_int(threads), called)


@pytest.fixture(autouse=True)
def library(variant: str) -> object:
    with used(variant):
        yield


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 1000])
def test_every_part_is_done_once_by_a_member(threads: int, count: int) -> None:
    done = Counter[int]()
    members = set[int]()

    def note(number: int, member: int) -> None:
        done[number] += 1
        members.add(member)

    for _ in range(3):
        share_out(count, threads, note)
    assert done == dict.fromkeys(range(count), 3) and members <= set(range(threads))


def test_a_member_that_is_slow_gets_few_parts_and_the_others_do_the_rest() -> None:
    """With equal shares for all, both would wait for ever."""
    others, by = threading.Event(), dict[int, int]()

    def act(number: int, member: int) -> None:
        if number == 0:
            assert others.wait(PATIENCE_SECONDS)
        by[number] = member
        if len(by) == PARTS - 1:
            others.set()

    share_out(PARTS, 2, act)
    assert sorted(by) == list(range(PARTS))
    assert all(member != by[0] for number, member in by.items() if number)


def test_a_caller_that_finds_the_team_at_work_computes_alone() -> None:
    """Nothing waits for a helper that has begun nothing of its work: here all of them are held."""
    held, over, members = threading.Barrier(3), threading.Event(), set[int]()

    def hold(number: int, member: int) -> None:
        held.wait(PATIENCE_SECONDS)
        assert over.wait(PATIENCE_SECONDS)

    first = threading.Thread(target=share_out, args=(2, 2, hold))
    first.start()
    held.wait(PATIENCE_SECONDS)
    share_out(PARTS, 2, lambda number, member: members.add(member))
    over.set()
    first.join()
    assert members == {0}


def test_works_of_many_callers_do_not_meet() -> None:
    found = dict[int, list[int]]()

    def call(caller: int) -> None:
        numbers = list[int]()
        for _ in range(20):
            share_out(PARTS, 3, lambda number, member: numbers.append(number))
        found[caller] = numbers

    callers = [threading.Thread(target=call, args=(caller,)) for caller in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert [sorted(found[caller]) for caller in range(4)] == [sorted([*range(PARTS)] * 20)] * 4


def in_fork(work: Callable[[], bool]) -> bool:
    """Whether a forked process finds the work right; one that hangs is ended."""
    child = os.fork()
    if not child:
        signal.alarm(int(PATIENCE_SECONDS))
        ok = False
        try:
            ok = work()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(0 if ok else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_has_a_team_of_its_own() -> None:
    """OpenMP would wait there for threads that only the parent has."""
    x = torch.randn(64, 256)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = int8_rows(x)
        assert in_fork(lambda: all(torch.equal(*both) for both in zip(int8_rows(x)[:2], expected[:2])))
        assert all(torch.equal(*both) for both in zip(int8_rows(x)[:2], expected[:2])), "the parent has its own still"
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(sys.platform != "linux", reason="an address space is limited so on Linux")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_where_there_is_no_room_for_threads_fewer_compute() -> None:
    own = len(os.listdir("/proc/self/task"))  # a fork starts as many in their stacks, without any room

    def limited() -> bool:
        done, before = list[int](), resource.getrlimit(resource.RLIMIT_AS)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, before[1]))
        start_team(MANY)
        resource.setrlimit(resource.RLIMIT_AS, before)  # what could not be started is not tried again
        share_out(PARTS, MANY, lambda number, member: done.append(number))
        started = len(os.listdir("/proc/self/task"))
        print(f"{started} threads did {sorted(done)}", file=sys.stderr)
        return sorted(done) == list(range(PARTS)) and started < own + MANY // 2

    assert in_fork(limited)
