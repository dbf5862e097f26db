"""What a command says: its status, what it prints, and what it writes beside its progress."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from h2o_flexgen.cli.report.summary import INDENT
from h2o_flexgen.cli.slow import SLOW

PROGRESS = ("opening ", "run: ", "evaluate: ", "batch: ", "planning for ", "calibrating ")
OF_MACHINE = f"{SLOW}: "  # what a command says of the machine that the tests run on


@dataclass(frozen=True)
class Result:
    status: int
    out: list[str]
    err: list[str]

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out[-1])

    @property
    def texts(self) -> list[str]:
        """The completions as `run` prints them: of each an entry, and one with its tokens where they were asked for."""
        found: list[str] = []
        inside = False
        for line in self.out:
            if line.startswith(("prompt ", "  logprobs")):
                found, inside = [*found, line], True
            elif inside := inside and line.startswith(INDENT):
                found[-1] += f"\n{line}"
        return found

    @property
    def said(self) -> list[str]:
        return [line for line in self.err if not line.startswith((*PROGRESS, OF_MACHINE))]

    @property
    def error(self) -> str:
        """The one line that a failed command writes, beside progress."""
        assert self.status == 2 and len(self.said) == 1 and self.said[0].startswith("error: "), (self.status, self.err)
        return self.said[0]


def called(main: Callable[[list[str]], int], capfd: pytest.CaptureFixture[str], *argv: object) -> Result:
    capfd.readouterr()  # what a test wrote before
    status = main([*map(str, argv)])
    captured = capfd.readouterr()
    return Result(status, captured.out.splitlines(), captured.err.splitlines())
