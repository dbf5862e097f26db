"""What processes of one job and the one that looks after them say to each other, and how such a process begins and ends. What
it then does is imported when it is told, so that it can soon be ended."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from threading import Lock
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, TypeVar

from h2o_flexgen.cli.errors import BY_SIGNAL, INTERRUPTED
from h2o_flexgen.core.interrupted import raised_again
from h2o_flexgen.engine.job import BrokenRequest
from h2o_flexgen.engine.reports import Stage, Tick
from h2o_flexgen.sampling.completion import Completion

if TYPE_CHECKING:
    from h2o_flexgen.engine.stats import Stats  # needs torch

Message = TypeVar("Message")
GRACE_SECONDS = 60.0  # within which a process ends in order after its parent has gone


@dataclass(frozen=True)
class Loaded:
    """The weights in host memory are there: said by the process that reads them, and then to the others."""

    shared_bytes: int


@dataclass(frozen=True)
class Passing:
    """So many bytes of a device's weights lie ready to be taken."""

    nbytes: int


@dataclass(frozen=True)
class BytesTaken:
    """These bytes were taken: said by each process, and then to the one that gives."""


@dataclass(frozen=True)
class AtStage:
    stage: Stage
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Noted:
    """A line for people."""

    line: str


@dataclass(frozen=True)
class PartDone:
    """A process has done its part."""

    stats: Stats | None  # without blocks; the peak of the host includes what is shared. None: nothing was run


@dataclass(frozen=True)
class Failed:
    """Why a process cannot go on: a line for people, or of a bug where it was."""

    line: str | None
    trace: str


News = AtStage | Completion | Tick | BrokenRequest | Noted | PartDone  # what concerns the job


class ProcessLink:
    """One end of what two processes say to each other. Threads take turns in saying things."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._turn = Lock()

    def say(self, message: object) -> None:
        with self._turn:
            self.connection.send(message)

    def hear(self, kind: type[Message]) -> Message:
        message = self.connection.recv()
        assert isinstance(message, kind), message
        return message

    def stage(self, stage: Stage, done_bytes: int = 0, total_bytes: int = 0) -> None:
        self.say(AtStage(stage, done_bytes, total_bytes))


# -- the life of a process -------------------------------------------------------------------------------------------------


def begin(link: int, lifeline: int) -> int:
    """Begins with what is said first: what is called, and what it is given."""
    _end_with(lifeline)
    connection = Connection(link)
    try:
        work: Callable[..., int]
        work, given = connection.recv()
        with raised_again():
            return work(ProcessLink(connection), *given)
    except (EOFError, KeyboardInterrupt):
        return INTERRUPTED


def _end_with(lifeline: int) -> None:
    """Ends this process in order when it is told to, or when its parent has gone: then the other end of the lifeline is
    closed. Signals of a terminal go to the parent."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)  # once: what is cleaned up is not disturbed
        raise KeyboardInterrupt

    def watch() -> None:
        os.read(lifeline, 1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_SECONDS)
        os._exit(BY_SIGNAL + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    threading.Thread(target=watch, name="lifeline", daemon=True).start()
