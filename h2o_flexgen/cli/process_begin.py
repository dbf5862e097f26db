"""How a process begins that another one starts and looks after, and how it ends when that one wants it to, or has gone. What it
then does is imported when it is told, so that it can soon be ended."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import FrameType
from typing import NoReturn

from h2o_flexgen.cli.errors import BY_SIGNAL, INTERRUPTED
from h2o_flexgen.cli.process_link import ProcessLink
from h2o_flexgen.core.interrupted import raised_again

GRACE_SECONDS = 60.0  # within which a process ends in order after its parent has gone


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
