"""Types of flags: every number of every command has bounds, and is written in plain digits."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from h2o_flexgen.cli import (
    batch_request,
    calibrate_request,
    chat_request,
    evaluate_request,
    plan_request,
    profile_request,
    run_request,
)
from h2o_flexgen.cli.flags import KV, MODEL, PLAN, REPEATABLE, SITE
from h2o_flexgen.cli.run_request import parse, request_of
from h2o_flexgen.core.allowed_values import Bounds, Choice, Truth
from h2o_flexgen.core.option import Option, flags_written, options_of
from h2o_flexgen.core.units import SIZE
from h2o_flexgen.formats.table import of_rows
from h2o_flexgen.planning.plan import Plan, RowCodec, Shares, TierShares
from h2o_flexgen.policies.kv_options import KVOptions
from h2o_flexgen.sampling.params import SAMPLING

REQUESTS = (run_request, plan_request, chat_request, calibrate_request, evaluate_request, profile_request)
PARSERS = {one.PROGRAM: one.make_parser() for one in REQUESTS}
OF_BATCHES = batch_request.make_parser()
TYPED = [
    pytest.param(action, id=f"{program.rpartition('.')[2]} {action.option_strings[0]}")
    for program, parser in PARSERS.items()
    for action in parser._actions
    if action.type is not None
]
NONSENSE = ("1_0", "1_0GB", "\u0663", "\u00b2", "1_0.5", "nan", "inf", "9" * 20, "9" * 5000, "", "1 0", "0x10")


@pytest.mark.parametrize("action", TYPED)
def test_no_flag_takes_what_only_python_takes_for_a_number(action: argparse.Action) -> None:
    read = action.type
    assert callable(read) and read not in (int, float)
    for text in NONSENSE:
        with pytest.raises(argparse.ArgumentTypeError) as caught:
            read(text)
        assert len(str(caught.value)) < 300


OPTIONS = tuple(one for table in (SAMPLING, PLAN, KV, MODEL, SITE) for one in table.values())
OF_NUMBERS = [one for one in OPTIONS if isinstance(one.allowed, Bounds)]


@pytest.mark.parametrize("option", OF_NUMBERS, ids=lambda option: option.name)
def test_a_flag_of_an_option_has_the_bounds_that_the_option_has_in_python(option: Option) -> None:
    bounds = option.allowed
    assert isinstance(bounds, Bounds)
    for parser in PARSERS.values():
        action = parser._option_string_actions.get(option.flag)
        if action is None or action.type is None or action.dest != option.name:
            continue
        assert callable(action.type) and action.type(str(bounds.most)) == option.value(bounds.most) == bounds.most
        for beyond in (bounds.least - 1, bounds.most + 1):
            with pytest.raises(argparse.ArgumentTypeError):
                action.type(str(beyond))
            with pytest.raises(ValueError, match=f"^{option.name} is "):
                option.value(beyond)


def test_every_option_with_a_help_is_a_flag_and_no_flag_of_that_name_is_anything_else() -> None:
    flags = {
        flag: action for parser in (*PARSERS.values(), OF_BATCHES) for flag, action in parser._option_string_actions.items()
    }
    for option in OPTIONS:
        assert not option.text or flags[option.flag].dest == option.name, option.name
        assert option.flag not in flags or option.text or option.name == "max_tokens", option.name


def another(option: Option) -> object:
    """A value of the option that is not its default."""
    allowed = option.allowed
    if isinstance(allowed, Truth):
        return not option.default
    if isinstance(allowed, (Choice, RowCodec)):
        names = of_rows() if isinstance(allowed, RowCodec) else allowed.names
        return next(name for name in reversed([*names]) if name != option.default)
    if isinstance(allowed, TierShares):
        return Shares(0.25, 0.5)
    assert isinstance(allowed, Bounds)
    return allowed.most


@pytest.mark.parametrize("table", [Plan, KVOptions])
def test_a_written_option_is_read_as_it_was(table: type) -> None:
    assert list(flags_written(table(), table)) == []
    for option in options_of(table).values():
        if option.flag in OF_BATCHES.flags and option.name not in ("head_budgets", "probe"):
            words = option.written(another(option))
            assert getattr(OF_BATCHES.parse(["-i", "a", "-o", "b", *words]), option.name) == another(option), words


def test_per_cent_may_be_parts_of_one_as_in_python_and_whole_ones_stay_whole() -> None:
    found = parse(["--model", "m", "--percent", *["12.5", "87.5", "0", "100", "0", "1e2"]]).percent
    assert found == [12.5, 87.5, 0, 100, 0, 100] and [type(one) for one in found[2:]] == [int] * 4


def test_a_stop_of_nothing_is_refused_as_in_python() -> None:
    with pytest.raises(ValueError, match=r"^stop is \[''\]; allowed is a text that is not empty"):
        request_of(parse(["--model", "m", "--stop", ""]))


def test_every_flag_that_has_a_number_for_a_default_reads_it_with_a_type() -> None:
    for parser in PARSERS.values():
        for action in parser._actions:
            is_number = isinstance(action.default, (int, float)) and action.nargs != 0
            assert not is_number or action.type is not None, action.option_strings


@pytest.mark.parametrize("parser", [OF_BATCHES, *PARSERS.values()], ids=lambda parser: parser.prog.rpartition(".")[2])
def test_help_says_that_percent_takes_six_numbers(parser: argparse.ArgumentParser) -> None:
    has_percent, said = "--percent" in parser._option_string_actions, " ".join(parser.format_help().split())
    assert ("--percent W_GPU W_CPU KV_GPU KV_CPU ACT_GPU ACT_CPU six numbers" in said) is has_percent


@pytest.mark.parametrize("percent", ["\u0665 0 0 0 0 0", "1_0 0 0 0 0 0", "nan 0 0 0 0 0", "0 0 0 0 0"])
def test_percent_takes_plain_digits(percent: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--model", "m", "--percent", *percent.split()])
    assert "takes six numbers, or auto; got" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gen-len", "1_0"], "argument --gen-len: '1_0' is not allowed; give a whole number from 1 to 10000000"),
        (["--verbose", "-5"], "argument --verbose: '-5' is not allowed; give a whole number from 0 to 3"),
        (["--top-p", "0"], "argument --top-p: '0' is not allowed; give a number above 0 and at most 1"),
        (["--temperature", "-1"], "argument --temperature: '-1' is not allowed; give a number from 0 to 100"),
        (["--temperature", "101"], "argument --temperature: '101' is not allowed; give a number from 0 to 100"),
        (["--cpu-mem", "8"], "argument --cpu-mem: size '8' would be 8 bytes; write its unit, like '8GB'"),
        (["--cpu-mem", "1_0GB"], "argument --cpu-mem: size '1_0GB' is not understood; write it like 16GB or 8GiB"),
    ],
)
def test_a_message_names_flag_value_and_range(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["--model", "m", *words])
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"error: {message}\n"


@pytest.mark.parametrize(
    "flag", ["--schedule", "--prefer", "--num-prompts", "--cpu-mem", "--percent", "--no-such-flag", "--model"]
)
@pytest.mark.parametrize("value", ["x" * 5000, "x y " * 1250])
def test_a_long_value_is_shortened_in_the_message(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [value, "--gen-len", "zero"] if flag == "--model" else ["m", flag, value]
    try:
        request_of(parse(["--model", *words]))
    except SystemExit:
        message = capsys.readouterr().err
    except ValueError as error:
        message = str(error)
    assert len(message) < 500 and message.count("\n") <= 1


def test_types_read_what_people_write() -> None:
    assert (Bounds(1, 10).typed("7"), Bounds(-5, 5).typed("-3")) == (7, -3)
    share = Bounds(0, 1, is_whole=False)
    assert (share.typed("1e-3"), share.typed(".5"), SIZE.typed("14.9GiB")) == (0.001, 0.5, "14.9GiB")


def test_a_million_prompts_are_allowed_and_twenty_digits_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["--model", "m", "--num-prompts", "1000000"]).num_prompts == 1_000_000
    with pytest.raises(ValueError, match=r"10000000000 prompts are more than one run takes"):
        request_of(parse(["--model", "m", "--gpu-batch-size", "1000000", "--num-gpu-batches", "10000"]))
    with pytest.raises(SystemExit):
        parse(["--model", "m", "--num-prompts", "9" * 20])
    assert "give a whole number from 1 to 1000000\n" in capsys.readouterr().err


@pytest.mark.parametrize("request_of_all", [run_request, chat_request])
def test_an_adapter_that_all_texts_have_is_given_once(request_of_all: Any) -> None:
    each = {one.option_strings[0]: one.help or "" for one in request_of_all.make_parser()._actions if one.option_strings}
    assert REPEATABLE not in each["--lora"]
    assert REPEATABLE in {one.option_strings[0]: one.help or "" for one in OF_BATCHES._actions if one.option_strings}["--lora"]
