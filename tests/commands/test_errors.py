"""How commands end: quietly where nobody reads any more."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from types import ModuleType

import pytest

from h2o_flexgen import chat, evaluate, plan, profile, run
from h2o_flexgen.commands.errors import UNREAD, exit_status
from h2o_flexgen.planning.schedule import Key, Op
from h2o_flexgen.runtime.executor import TaskFailed

COMMANDS = (run, plan, profile, chat, evaluate)


@contextmanager
def unread() -> Iterator[StringIO]:
    """Standard output that nobody reads any more, and what goes to standard error meanwhile."""
    ours, theirs = os.pipe()
    os.close(ours)
    with os.fdopen(theirs, "w") as stream, redirect_stdout(stream), redirect_stderr(StringIO()) as errors:
        yield errors
        stream.flush()  # the interpreter does so at its end; it must not fail any more


def _args() -> Namespace:
    return Namespace(verbose=0)


def _print(_: Namespace) -> None:
    print("x" * 100_000)


def _print_little(_: Namespace) -> None:
    print("x")


def _in_a_task(_: Namespace) -> None:
    try:
        print("x", flush=True)
    except BrokenPipeError as error:
        raise TaskFailed(Key(Op.COMPUTE, 0, 0, 0), error) from error


@pytest.mark.parametrize("work", [_print, _print_little, _in_a_task])
def test_nobody_is_told_that_nobody_reads(work: Callable[[Namespace], None]) -> None:
    with unread() as errors:
        assert exit_status(_args, work) == UNREAD
    assert errors.getvalue() == ""


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__name__)
def test_help_that_nobody_reads_ends_every_command_quietly(command: ModuleType) -> None:
    with unread() as errors:
        assert command.main(["--help"]) in (0, UNREAD)  # argparse itself drops a long help
    assert errors.getvalue() == ""


def test_a_plan_that_nobody_reads_is_no_error() -> None:
    words = "--model facebook/opt-125m --dummy-weights --machine cpu-2core --evaluate --percent 0 50 0 100 0 100"
    with unread() as errors:
        assert plan.main(words.split()) == UNREAD
    assert "roken" not in errors.getvalue()


def test_a_long_value_is_shortened_in_the_line_that_ends_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--model", "m", "--machine", "x" * 5000]) == 2
    assert len(capsys.readouterr().err) < 600
