"""What a person is told of a failure during the work: one line if memory ran out, or if a task failed for a reason that the
user can mend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from h2o_flexgen.cli.errors import USERS, Mendable, line_of
from h2o_flexgen.engine.executor import TaskFailed
from h2o_flexgen.memory.host import shortage_of


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
    """The line for an error that a user can mend; None for any other."""
    if isinstance(error, USERS):
        return line_of(error)
    if isinstance(error, RuntimeError) and (shortage := shortage_of(error)) is not None:
        return shortage.reason
    if isinstance(error, TaskFailed) and isinstance(error.cause, USERS):
        return f"{line_of(error.cause)} (while running {error.doing})"
    return None
