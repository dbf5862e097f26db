"""How a command begins: its request is made, and its model looked for on this machine, without torch, so that --help, wrong
flags and missing files are answered at once; then the module that does the work gets the request. The h2o-flexgen command,
which contains the others, is also here."""

from __future__ import annotations

import gc
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Protocol, runtime_checkable

from h2o_flexgen.cli.errors import exit_status
from h2o_flexgen.cli.flags import Parser, UnknownFlag
from h2o_flexgen.cli.worded_errors import as_typed
from h2o_flexgen.core.hints import did_you_mean, shown
from h2o_flexgen.session.open_request import ModelRequest

PROGRAM = "h2o-flexgen"
COMMANDS = {
    "run": "generates text under a plan, and measures",
    "batch": "runs a file of requests, and goes on where it was interrupted",
    "serve": "answers requests over HTTP, in the form of OpenAI's",
    "plan": "finds the fastest plan for a model on a machine",
    "profile": "measures this machine, for plans to be found",
    "chat": "talks with a model, turn by turn",
    "calibrate": "measures which share of a text each KV head needs",
    "evaluate": "measures how good the text is under each policy and budget",
}


@runtime_checkable
class OfModel(Protocol):
    """The request of a command that opens a model."""

    @property
    def model(self) -> ModelRequest: ...


def door(
    name: str,
    own: str,
    parse: Callable[[Sequence[str], str], Namespace],
    request_of: Callable[[Namespace], object],
    worker: str | None = None,
) -> Callable[..., int]:
    """The `main` of a command, which is called `own` where it is no word behind another one. The module `worker`, by its name
    below the package, does the work; without one that is `cli/<name>_work`."""

    def work(flags: Namespace) -> None:
        request = request_of(flags)
        if isinstance(request, OfModel):
            request.model.refuse_missing()
        with working_half("failures").told_in_one_line():
            half = working_half(f"{name}_work") if worker is None else _below_package(worker)
            gc.freeze()  # torch's own objects are many, and stay: to look through them takes a tenth of a second each time
            half.work(request)

    def main(argv: Sequence[str] | None = None, program: str = own) -> int:
        words = sys.argv[1:] if argv is None else argv
        return status_of(lambda: parse(words, program), work)

    return main


def status_of(parse: Callable[[], Namespace], work: Callable[[Namespace], None]) -> int:
    """Runs a command and returns its exit status. The error for a flag that it lacks names the commands that have it. Other
    errors name options by its flags."""

    def flags() -> Namespace:
        try:
            return parse()
        except UnknownFlag as unknown:
            raise ValueError(unknown.line(commands_with(unknown.flag))) from None

    return exit_status(flags, work, as_typed)


def commands_with(flag: str) -> list[str]:
    """The commands that have this flag."""
    return [name for name in COMMANDS if flag in _below_package(f"cli.{name}_request").make_parser().flags]


def working_half(name: str) -> ModuleType:
    """The module that does the work. It is imported only here, because it imports torch, which takes a while."""
    return _below_package(f"cli.{name}")


def _below_package(name: str) -> ModuleType:
    return import_module(f"h2o_flexgen.{name}")


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in COMMANDS:
        command = import_module(f"h2o_flexgen.{words[0]}")
        return int(command.main(words[1:], f"{PROGRAM} {words[0]}"))
    return status_of(lambda: _parse(words), lambda _: None)


def _parse(words: Sequence[str]) -> Namespace:
    lines = (f"  {name:10}{what}" for name, what in COMMANDS.items())
    epilog = "\n".join(["commands:", *lines, "", f"{PROGRAM} COMMAND --help tells of its flags."])
    parser = Parser(PROGRAM, "Large language models in little memory.", f"{PROGRAM} COMMAND [options]", epilog)
    parser.set_defaults(verbose=0)
    if not words:
        parser.error(f"a command is missing; give one of {', '.join(COMMANDS)}")
    if not words[0].startswith("-"):
        parser.error(f"unknown command {shown(words[0])}; known: {', '.join(COMMANDS)}{did_you_mean(words[0], COMMANDS)}")
    return parser.parse(words)
