"""What a person is told when a command fails: one line for what can be mended from outside. Anything else is a bug."""

from __future__ import annotations

USERS = (ValueError, MemoryError, OSError)


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
