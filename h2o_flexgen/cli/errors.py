"""What a person is told when a command fails: one line for what can be mended from outside. Anything else is a bug."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeAlias

from h2o_flexgen.cli.flags import TRACEBACK
from h2o_flexgen.core.hints import shortened

WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # whoever sets one of them has decided
SPINS = 2000  # of a thread that waits for work, before it sleeps
FAILED, INTERRUPTED = 2, 130
BY_SIGNAL = 128  # the status of a process that a signal has ended is this more than its number
_Handler: TypeAlias = Any  # what `signal` takes and returns
UNREAD = 141  # of a command whose output nobody reads any more: as if SIGPIPE had ended it


class Mendable(RuntimeError):
    """What failed can be mended from outside; the line says how."""


USERS = (ValueError, MemoryError, OSError, Mendable)

# the terminal has gone, or somebody else ends the process
ENDING = {name: word for name, word in (("SIGTERM", "terminated"), ("SIGHUP", "hung up")) if hasattr(signal, name)}


class Ended(KeyboardInterrupt):
    """A signal has ended the command. It is handled as Ctrl-C is, so that no file stays behind."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.status = BY_SIGNAL + number
        self.word = ENDING[signal.Signals(number).name]


@contextmanager
def _ends_cleanly() -> Iterator[None]:
    """A second such signal does not disturb the cleaning up: a shell and the system may both tell that a terminal has gone. One
    that is ignored, as `nohup` has it, stays so."""
    before: dict[int, _Handler] = {}

    def end(number: int, frame: FrameType | None) -> None:
        if not _is_ending():
            raise Ended(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    for number in (int(signal.Signals[name]) for name in ENDING):
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_ending() -> bool:
    """Is an `except`, a `finally` or the end of a `with` busy with such a signal? That one was raised is not enough: Python
    drops what is raised in a `__del__` and goes on, and the next signal must end it."""
    error = sys.exc_info()[1]
    while error is not None and not isinstance(error, Ended):
        error = error.__context__
    return error is not None


def exit_status(parse: Callable[[], Namespace], run: Callable[[Namespace], None]) -> int:
    """The exit status of a command; 2 for wrong flags, as argparse has it."""
    _open_what_is_closed()
    _let_threads_sleep_soon()
    level = 0
    try:
        args = parse()
        level = args.verbose
        with _ends_cleanly():
            run(args)
        sys.stdout.flush()  # where nobody reads any more, that shows here, and not when the interpreter ends
    except SystemExit as ended:  # of argparse: help, or a flag that is wrong
        return UNREAD if _is_unread() else int(ended.code or 0)
    except Ended as end:
        _say(end.word)
        return end.status
    except KeyboardInterrupt:
        _say("interrupted")
        return INTERRUPTED
    except Exception as error:
        if _is_about_output(error):
            _is_unread()
            return UNREAD
        line = line_of(error)
        if line is None:
            raise
        if level >= TRACEBACK:
            traceback.print_exc()
        _say(f"error: {line}")
        return FAILED
    return 0


def _open_what_is_closed() -> None:
    """Python has None for a standard stream that a shell has closed. Left closed, its number would go to the next file that is
    opened, and what a library writes there into that file."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115  # for the process
            os.set_inheritable(stream.fileno(), True)  # for a process that this one starts the same is true
            setattr(sys, name, stream)


def _let_threads_sleep_soon() -> None:
    """OpenMP's threads spin long for work before they sleep. Where a process beside them wants the core, each then waits for
    the other, and two threads are several times slower than one. Threads that sleep at once are slow where nobody else is
    there. So these spin a little (docs/log.md has the figures). OpenMP reads the variable when torch is imported: where that
    has happened already, nothing is changed."""
    if "torch" not in sys.modules and not any(name in os.environ for name in WAITING):
        os.environ[WAITING[0]] = str(SPINS)


def _say(line: str) -> None:
    with suppress(OSError, ValueError):  # the terminal has gone
        print(line, file=sys.stderr, flush=True)


def _is_about_output(error: BaseException) -> bool:
    """Whoever was reading has gone, as `head` does after its lines; a task may have written what was not read."""
    while not isinstance(error, BrokenPipeError) and error.__cause__ is not None:
        error = error.__cause__
    return isinstance(error, BrokenPipeError)


def _is_unread() -> bool:
    """Nothing more is written where nobody reads: the interpreter would complain of it at its end."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return True
    return False


def line_of(error: BaseException) -> str | None:
    """None for an error that is no user's."""
    if isinstance(error, Mendable):
        return str(error)
    return _text(error) if isinstance(error, USERS) else None


def _text(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return shortened(" ".join(f"{error.strerror}{f': {error.filename}' if error.filename else ''}".split()))
    return shortened(" ".join(str(error).split())) or type(error).__name__
