"""Work aside: a signal is raised where the main thread waits, and the work ends by itself."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import closing, nullcontext
from threading import Event

import pytest

from h2o_flexgen.cli.aside import Aside


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def test_what_the_work_says_comes_in_order_and_then_its_error() -> None:
    def work(ending: Event) -> Iterator[int]:
        assert threading.current_thread().name == "aside"
        yield from range(3)
        raise ValueError("mend this")

    heard: list[int] = []
    with pytest.raises(ValueError, match="mend this"):
        for one in Aside(work, nullcontext).said():
            heard.append(one)  # the error comes after these
    assert heard == [0, 1, 2]
    assert "aside" not in threads()


def test_a_signal_is_raised_in_the_wait_and_never_in_the_work() -> None:
    """The signal comes while the work is in the middle of a call, which has to return before its thread ends."""
    main, steps = threading.main_thread().ident, list[str]()
    assert main is not None and threading.current_thread() is threading.main_thread()

    def work(ending: Event) -> Iterator[int]:
        yield 0
        steps.append("a call begins")
        signal.pthread_kill(main, signal.SIGINT)
        assert ending.wait(60)
        steps.append("it has returned")

    with pytest.raises(KeyboardInterrupt), closing(Aside(work, nullcontext).said()) as said:
        for one in said:
            steps.append(f"heard {one}")
    assert steps[-1] == "it has returned" and "a call begins" in steps
    assert "aside" not in threads()


def test_closing_ends_the_work() -> None:
    ended = Event()

    def work(ending: Event) -> Iterator[int]:
        while not ending.is_set():
            yield 1
        ended.set()

    with closing(Aside(work, nullcontext).said()) as said:
        assert next(said) == 1
    assert ended.is_set() and "aside" not in threads()
