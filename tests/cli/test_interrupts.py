"""Signals while a job runs: the first asks, the second ends, and what is ignored stays ignored. Where work is done aside, a
signal is raised where the main thread waits, and the work ends by itself."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, nullcontext
from threading import Event

import pytest

from h2o_flexgen.cli.errors import EndedBySignal
from h2o_flexgen.cli.interrupts import Aside, Interrupts
from tests.helpers.patience import PATIENCE_SECONDS


@pytest.fixture(autouse=True)
def handlers_as_before() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in zip(numbers, before):
        signal.signal(number, handler)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_before_a_job_computes_a_signal_ends_it_at_once() -> None:
    interrupts = Interrupts(lambda: None)
    with interrupts.heard(), pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)
    assert not interrupts.are_asked


def test_the_first_signal_asks_and_the_second_ends() -> None:
    told: list[str] = []
    interrupts = Interrupts(lambda: told.append("asked"))
    with interrupts.heard():
        interrupts.listen()
        send(signal.SIGINT)
        assert interrupts.are_asked and told == ["asked"]
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    assert told == ["asked"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        interrupts.end()


def test_a_job_that_is_terminated_ends_as_one() -> None:
    def handle(number: int, frame: object) -> None:
        raise EndedBySignal(number)

    signal.signal(signal.SIGTERM, handle)
    interrupts = Interrupts(lambda: None)
    with interrupts.heard():
        interrupts.listen()
        send(signal.SIGTERM)
    with pytest.raises(EndedBySignal) as caught:
        interrupts.end()
    assert caught.value.status == 143


def test_what_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    interrupts = Interrupts(lambda: None)
    with interrupts.heard():
        interrupts.listen()
        send(signal.SIGHUP)
    assert not interrupts.are_asked


# -- work aside ------------------------------------------------------------------------------------------------------------


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
        assert ending.wait(PATIENCE_SECONDS)
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
