"""The one command that has the others, and what every command answers at once."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.metadata import version

import pytest

from h2o_flexgen.cli.main import COMMANDS, main

ONE_PROGRAM = [pytest.param(name, f"h2o-flexgen {name}", id=name) for name in COMMANDS]

NO_SEARCH = "no plan is searched for a talk; `h2o-flexgen plan` finds the numbers"
ALL = "run, batch, serve, plan, profile, chat, calibrate, evaluate"


@pytest.mark.parametrize(("name", "program"), ONE_PROGRAM)
def test_a_command_has_the_same_help_under_both_names(name: str, program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    called = capsys.readouterr().out
    assert import_module(f"h2o_flexgen.{name}").main(["--help"]) == 0
    of_module = capsys.readouterr().out
    assert called.startswith(f"usage: {program} ") and of_module.startswith(f"usage: python -m h2o_flexgen.{name} ")
    assert called.split() == of_module.replace(f"python -m h2o_flexgen.{name}", program).split()


@pytest.mark.parametrize("name", ["run", "batch", "serve", "plan", "chat", "evaluate"])
def test_the_first_help_is_short_and_the_other_has_all_flags(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = [main([name, flag]) or capsys.readouterr().out for flag in ("--help", "-h", "--help-all")]
    assert said[0] == said[1] != said[2]
    parser, first = import_module(f"h2o_flexgen.cli.{name}_request").make_parser(), said[0].splitlines()
    flags = {found[1] for line in first if (found := re.match(r"  (?:-\w, )?(?:-\w \w+, )?(--[\w-]+)", line))}
    assert "--model" in flags <= {*parser.flags}
    assert "--help-all tells of all" in said[0] and len(first) <= 50 < len(said[2].splitlines()) / 2
    assert "(default: )" not in " ".join(said[2].split())
    assert all(flag in said[2] for flag in parser.flags if flag != "--attn-sparsity")


@pytest.mark.parametrize("words", [[], *([name] for name in COMMANDS)], ids=lambda words: " ".join(words))
def test_the_versions_are_told_at_every_door(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--version"]) == 0
    assert capsys.readouterr().out.rstrip().endswith(f"torch {version('torch')}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], f"a command is missing; give one of {ALL}"),
        (["plam"], f"unknown command 'plam'; known: {ALL}; did you mean plan?"),
        (["--models"], "unknown flag --models; --help names those that there are"),
        (["--model", "m"], f"unknown flag --model; it is a flag of {ALL.replace(' profile,', '')}"),
        (["calibrate", "--lora", "x=y"], "unknown flag --lora; heads are measured with an adapter by --adapter PATH"),
        (
            ["batch", "-i", "in.jsonl"],
            "-o/--output-file is missing; give as in: h2o-flexgen batch -i in.jsonl -o out.jsonl [--model NAME] "
            "[--percent W W KV KV A A] [options]",
        ),
        (["chat", "--percent", "auto"], f"argument --percent: takes six numbers; got 'auto'; {NO_SEARCH}"),
        (
            ["plan", "--model", "m", "--disk", "3XB"],
            "argument --disk-mem: size '3XB' is not understood; write it like 16GB or 8GiB",
        ),
        (["run", "--lora", "sql"], "--lora is 'sql'; give NAME=PATH, where NAME has no = and no :"),
        (["run", "--gen-len", "0"], "argument --gen-len: '0' is not allowed; give a whole number from 1 to 10000000"),
    ],
)
def test_what_is_wrong_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_the_commands_are_told_in_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(f"  {name:10}{what}" in lines for name, what in COMMANDS.items())
