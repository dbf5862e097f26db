"""What a person is told of a failure in mid-work: one line where memory ran out, or where a task failed for a reason that can
be mended from outside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from h2o_flexgen.cli.errors import USERS, Mendable, line_of
from h2o_flexgen.engine.executor import TaskFailed
from h2o_flexgen.memory.shortage import shortage_of


@contextmanager
def told_in_one_line() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        line = one_line(error)
        if line is None:
            raise
        raise Mendable(line) from error


def one_line(error: Exception) -> str | None:
    """None for an error that is no user's."""
    if isinstance(error, USERS):
        return line_of(error)
    if isinstance(error, RuntimeError) and (shortage := shortage_of(error)) is not None:
        return shortage.reason
    if isinstance(error, TaskFailed) and isinstance(error.cause, USERS):
        return f"{line_of(error.cause)} (while running {error.doing})"
    return None
