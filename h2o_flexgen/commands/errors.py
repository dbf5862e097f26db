"""What a person is told when a command fails: one line for what can be mended from outside. Anything else is a bug."""

from __future__ import annotations

import sys
import traceback
from argparse import Namespace
from collections.abc import Callable

from h2o_flexgen.commands.flags import TRACEBACK

FAILED, INTERRUPTED = 2, 130
USERS = (ValueError, MemoryError, OSError)


def exit_status(parse: Callable[[], Namespace], run: Callable[[Namespace], None]) -> int:
    """Of a command. Wrong flags end the process with 2, as argparse does it."""
    level = 0
    try:
        args = parse()
        level = args.verbose
        run(args)
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
