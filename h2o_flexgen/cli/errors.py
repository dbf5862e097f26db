"""What a person is told when a command fails: one line for what the user can mend. Anything else is a bug."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeAlias

from h2o_flexgen.core.environment import let_threads_sleep_soon
from h2o_flexgen.core.hints import shortened
from h2o_flexgen.core.interrupted import causes, contexts, interrupt_behind, raised_again

FAILED, INTERRUPTED = 2, 130
TRACEBACK = 3  # the level of --verbose that shows where an error comes from
BY_SIGNAL = 128  # exit status of a process ended by a signal, less the signal's number
_Handler: TypeAlias = Any  # what `signal` takes and returns
UNREAD = 141  # status of a command with an output that is no longer read, as if SIGPIPE had ended it


class Mendable(RuntimeError):
    """An error that the user can mend; its line says how."""


USERS = (ValueError, MemoryError, OSError, Mendable)

# the terminal has gone, or another process ends this one
ENDING = {name: word for name, word in (("SIGTERM", "terminated"), ("SIGHUP", "hung up")) if hasattr(signal, name)}


class EndedBySignal(KeyboardInterrupt):
    """The command was ended by a signal. It is handled like Ctrl-C, so that no file stays behind."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.status = BY_SIGNAL + number
        self.word = ENDING[signal.Signals(number).name]


@contextmanager
def _ends_cleanly() -> Iterator[None]:
    """A context in which such signals raise EndedBySignal, once: a second one, which a shell and the system may both send when
    a terminal goes, does not disturb the cleaning up. A signal that is ignored, as under `nohup`, stays ignored."""
    before: dict[int, _Handler] = {}

    def end(number: int, frame: FrameType | None) -> None:
        if not _is_ending():
            raise EndedBySignal(number)

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
    """Whether an `except`, a `finally` or the end of a `with` is handling such a signal now. That one was raised is not enough:
    Python drops what is raised in a `__del__` and goes on, and the next signal must end it."""
    return any(isinstance(error, EndedBySignal) for error in contexts(sys.exc_info()[1]))


def exit_status(
    parse: Callable[[], Namespace],
    run: Callable[[Namespace], None],
    worded: Callable[[str, Collection[str]], str] = lambda line, _: line,
) -> int:
    """Runs a command and returns its exit status; 2 for wrong flags, as argparse has it. `worded`: how an error is told where
    these flags were given, by their names."""
    _open_what_is_closed()
    let_threads_sleep_soon()
    args = Namespace(verbose=0)
    try:
        args = parse()
        with _ends_cleanly(), raised_again():
            run(args)
        sys.stdout.flush()  # a reader that has gone shows here, and not when the interpreter ends
    except SystemExit as ended:  # raised by argparse for --help or a wrong flag
        return UNREAD if _is_unread() else int(ended.code or 0)
    except KeyboardInterrupt as interrupt:
        return _interrupted(interrupt)
    except Exception as error:
        if _is_about_output(error):
            _is_unread()
            return UNREAD
        line, behind = line_of(error), interrupt_behind(error)
        if line is None and behind is None:
            raise
        if args.verbose >= TRACEBACK:
            traceback.print_exc()
        if line is None and behind is not None:
            return _interrupted(behind)
        _say(f"error: {worded(str(line), vars(args).keys())}")
        return FAILED
    return 0


def _interrupted(interrupt: KeyboardInterrupt) -> int:
    if isinstance(interrupt, EndedBySignal):
        _say(interrupt.word)
        return interrupt.status
    _say("interrupted")
    return INTERRUPTED


def _open_what_is_closed() -> None:
    """Opens standard streams that a shell has closed, which Python has as None. Left closed, their numbers would go to the next
    files that are opened, and what a library writes to a stream would land in those files."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115  # for the process
            os.set_inheritable(stream.fileno(), True)  # true for a process that this one starts, too
            setattr(sys, name, stream)


def _say(line: str) -> None:
    with suppress(OSError, ValueError):  # the terminal has gone
        print(line, file=sys.stderr, flush=True)


def _is_about_output(error: BaseException) -> bool:
    """Whether the reader of our output has gone, as `head` does after its lines; the error may be behind a task's."""
    return any(isinstance(one, BrokenPipeError) for one in causes(error))


def _is_unread() -> bool:
    """Whether our output is no longer read. Then nothing more is written: the interpreter would complain at its end."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return True
    return False


def line_of(error: BaseException) -> str | None:
    """The line for an error that a user can mend; None for any other."""
    if isinstance(error, Mendable):
        return str(error)
    return _text(error) if isinstance(error, USERS) else None


def _text(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return shortened(" ".join(f"{error.strerror}{f': {error.filename}' if error.filename else ''}".split()))
    return shortened(" ".join(str(error).split())) or type(error).__name__
