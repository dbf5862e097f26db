"""What a person is told when a command fails: one line for what can be mended from outside. Anything else is a bug."""

from __future__ import annotations

import signal
import sys
import threading
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from h2o_flexgen.commands.flags import TRACEBACK

FAILED, INTERRUPTED, TERMINATED = 2, 130, 143
USERS = (ValueError, MemoryError, OSError)


class Terminated(KeyboardInterrupt):
    """Somebody else ends the process: it goes the same way, so that no file stays behind."""


@contextmanager
def _ends_cleanly() -> Iterator[None]:
    def end(number: int, frame: FrameType | None) -> NoReturn:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def exit_status(parse: Callable[[], Namespace], run: Callable[[Namespace], None]) -> int:
    """Of a command. Wrong flags end the process with 2, as argparse does it."""
    level = 0
    try:
        args = parse()
        level = args.verbose
        with _ends_cleanly():
            run(args)
    except Terminated:
        print("terminated", file=sys.stderr)
        return TERMINATED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        line = one_line(error)
        if line is None:
            raise
        if level >= TRACEBACK:
            traceback.print_exc()
        print(f"error: {line}", file=sys.stderr)
        return FAILED
    return 0


def one_line(error: Exception) -> str | None:
    """None for an error that is no user's."""
    if isinstance(error, USERS):
        return _text(error)
    from h2o_flexgen.runtime.executor import TaskFailed  # imports torch, which an early error must not wait for

    if isinstance(error, TaskFailed) and isinstance(error.cause, USERS):
        return f"{_text(error.cause)} (while running {error.doing})"
    return None


def _text(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return " ".join(f"{error.strerror}{f': {error.filename}' if error.filename else ''}".split())
    return " ".join(str(error).split()) or type(error).__name__
