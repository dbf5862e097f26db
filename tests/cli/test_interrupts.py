"""Signals while a job runs: the first asks, the second ends, and what is ignored stays ignored."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from h2o_flexgen.cli.errors import EndedBySignal
from h2o_flexgen.cli.interrupts import Interrupts


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
