"""Advice to users of other libraries: whatever it names is there."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from inspect import signature
from pathlib import Path

import pytest

from h2o_flexgen import LLM, SamplingParams
from h2o_flexgen.cli import batch_request, run_request
from h2o_flexgen.cli.main import COMMANDS
from h2o_flexgen.cli.main import PROGRAM as OWN_PROGRAM
from h2o_flexgen.jobs.line_fields import ELSEWHERE, OF_CHATS, OF_PROMPTS
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.sampling.foreign_options import ARGUMENTS, FOREIGN, OPTIONS, ForeignOption, OwnOptions, dtype_called
from h2o_flexgen.sampling.params import INSTEAD, SAMPLING

OF_LLM = {*signature(LLM).parameters, *Plan.option_names()}
OF_CALLS = {*signature(LLM.generate).parameters, *signature(LLM.chat).parameters}
TABLES = {"constructor": OPTIONS, "call": ARGUMENTS, "sampling": INSTEAD, "line": ELSEWHERE}
ADVICE = [
    pytest.param(where, name, advice, id=f"{where} {name}") for where, table in TABLES.items() for name, advice in table.items()
]
CALLED = re.compile(r"\bit is called (\w+)")
ARGUMENT = re.compile(r"\b(\w+)=(?!=)")
SAMPLED = re.compile(r"SamplingParams\((.*?)\)")
METHOD = re.compile(r"\bllm\.(\w+)")
COMMAND = re.compile(r"`([^`]+)`")
FLAG = re.compile(r"--[a-z0-9-]+")
VARIABLE = re.compile(r"\b[A-Z]+_[A-Z_]+\b")


def names_of(where: str) -> set[str]:
    return {"constructor": OF_LLM, "call": OF_CALLS, "sampling": {*SAMPLING}, "line": {*OF_PROMPTS, *OF_CHATS}}[where]


@pytest.mark.parametrize(("where", "name", "advice"), ADVICE)
def test_what_advice_names_is_there(where: str, name: str, advice: str) -> None:
    known = names_of("sampling" if "in SamplingParams" in advice else where)
    assert {*CALLED.findall(advice)} <= known | {"custom_id", "prompt"}
    sampled = " ".join(SAMPLED.findall(advice))
    assert {*ARGUMENT.findall(sampled)} <= SAMPLING.keys()
    written = SAMPLED.sub("", advice)
    of_calls = {"seed"} if "generate(" in written else set()
    assert {*ARGUMENT.findall(written)} <= known | of_calls, "an argument that is not there"
    assert all(
        hasattr(LLM, method) or method in signature(LLM).parameters or method == "stats" for method in METHOD.findall(advice)
    )
    for command in COMMAND.findall(advice):
        words = command.split()
        assert (words[0] == OWN_PROGRAM and words[1] in COMMANDS) or words[:2] == ["hf", "auth"], command
    flags = {*run_request.make_parser().flags} & {*batch_request.make_parser().flags}
    assert {*FLAG.findall(advice)} <= flags
    if variables := VARIABLE.findall(advice):
        assert variables == ["HF_HOME"] and "HF_HOME" in hub_variables()


def hub_variables() -> str:
    found = find_spec("huggingface_hub.constants")
    assert found is not None and found.origin is not None
    with open(os.fspath(found.origin), encoding="utf-8") as file:
        return file.read()


@pytest.mark.parametrize(("where", "table"), TABLES.items())
def test_advice_is_given_only_for_names_that_are_not_taken(where: str, table: Mapping[str, str]) -> None:
    taken = names_of(where) if where != "call" else {*signature(LLM.generate).parameters} & {*signature(LLM.chat).parameters}
    assert table.keys() & taken <= {"seed"}, "which is an option of a call, and of each prompt"


def test_another_name_of_an_option_is_that_of_one_option_alone() -> None:
    others = [other for one in SAMPLING.values() for other in (*one.elsewhere, *one.also_called)]
    assert len(others) == len({*others} - SAMPLING.keys()) and SamplingParams().n == 1


def test_advice_for_random_weights_and_prefixes_is_true() -> None:
    """The sentences that were once wrong."""
    assert "GGUF" in OPTIONS["load_format"] and signature(LLM).parameters["dummy_weights"].default is False
    assert "pipeline=" in OPTIONS["pipeline_parallel_size"] and "pipeline=" in OPTIONS["tensor_parallel_size"]
    assert "shared_prefixes=False" in OPTIONS["enable_prefix_caching"] and Plan.shared_prefixes


# -- what is accepted ----------------------------------------------------------------------------------------------------------

HARMLESS = [(name, value) for name, one in FOREIGN.items() for value in one.changes_nothing]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "other-engines.md"


@pytest.mark.parametrize(("name", "value"), HARMLESS)
def test_a_value_that_changes_nothing_is_left_out(name: str, value: object) -> None:
    assert OwnOptions.of({"buffers": 3, name: value}) == OwnOptions({"buffers": 3}, {})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("tensor_parallel_size", 2), ("tensor_parallel_size", True), ("quantization", "awq"), ("trust_remote_code", True)),
        *(
            ("seed", 7),
            ("n_gpu_layers", -1),
            ("chat_template", "x"),
            ("enforce_eager", "yes"),
            ("enable_prefix_caching", False),
        ),
    ],
)
def test_a_value_that_asks_for_something_stays_and_is_refused_with_advice(name: str, value: object) -> None:
    assert OwnOptions.of({name: value}).options == {name: value}
    with pytest.raises(ValueError, match=f"unknown option '{name}': "):
        LLM("facebook/opt-125m", dummy_weights=True, **{name: value})  # type: ignore[arg-type]


def test_other_names_are_translated_and_the_model_is_one_of_them() -> None:
    llm = LLM(model_path="facebook/opt-125m", dummy_weights=True, dtype="half", n_threads=1, n_ctx=2048, max_model_len=17)
    assert (llm.name, llm.loaded.opened.dtype, llm.loaded.request.site.threads) == ("facebook/opt-125m", "float16", 1)
    for both in ({"model_path": "x"}, {"threads": 1, "n_threads": 1}):
        with pytest.raises(ValueError, match="are given, which mean the same; leave one out"):
            LLM("facebook/opt-125m", dummy_weights=True, **both)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="model is a NoneType; give a name"):
        LLM()


@pytest.mark.parametrize("name", ["max_model_len", "n_ctx"])
def test_a_length_beyond_the_models_positions_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 2049, but facebook/opt-125m has 2048 positions; give that or less"):
        LLM("facebook/opt-125m", dummy_weights=True, **{name: 2049})  # type: ignore[arg-type]
    for value in ("8k", -1, True, 1.5):
        with pytest.raises(ValueError, match=f"{name} is .*, which is no number of tokens from 1 on"):
            OwnOptions.of({name: value})


def test_types_have_the_names_of_vllm_too() -> None:
    names = ("half", "float", "bfloat16", "torch.float16", "auto")
    assert [dtype_called(name) for name in names] == ["float16", "float32", "bfloat16", "float16", "auto"]


def test_the_page_says_of_each_whether_it_is_accepted_translated_or_refused() -> None:
    rows = [f"| `{name}` | {_fate(one)} | {one.instead} |" for name, one in FOREIGN.items()]
    said = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert said == rows, "the table is: " + "\n".join(rows)


def _fate(one: ForeignOption) -> str:
    if one.own:
        return f"translated: `{one.own}`"
    accepted = [*(["a number that the model has positions for"] if one.is_length else []), *map(repr, one.changes_nothing)]
    return "accepted: " + ", ".join(accepted) if accepted else "refused"
