"""The batch command's flags, and the request that is made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen import batch
from h2o_flexgen.checkpoints.model_places import DEMO
from h2o_flexgen.cli.batch_request import INSTEAD, BatchRequest, make_parser, parse, request_of
from h2o_flexgen.cli.main import commands_with
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.plan_requirements import PlanRequirements
from h2o_flexgen.sampling.params import SamplingParams
from tests.helpers.refusals import one_line


@pytest.fixture
def asked(tmp_path: Path) -> Any:
    """Makes the request of a job with these flags."""
    file = tmp_path / "in.jsonl"
    file.write_text('{"prompt": "x"}\n{"prompt": "y", "max_tokens": 2}\n')

    def make(*flags: object) -> BatchRequest:
        return request_of(parse(["-i", str(file), "-o", str(tmp_path / "out.jsonl"), *map(str, flags)]))

    return make


def test_without_flags_the_model_of_the_package_runs_under_a_plan_that_is_found(asked: Any, tmp_path: Path) -> None:
    request = asked()
    assert request.model.name == DEMO and isinstance(request.plan, PlanRequirements) and not request.ordered
    assert request.defaults.params == SamplingParams() and request.seed is None
    assert len(request.checked.index) == 2 and request.begun is None and not request.resuming.asked
    assert request.files.manifest == tmp_path / "out.manifest.json"
    assert json.loads(json.dumps(request.arguments))["input_file"] == str(tmp_path / "in.jsonl")


def test_flags_say_what_lines_leave_open(asked: Any) -> None:
    request = asked("--gen-len", 7, "--temperature", 0.5, "--stop", "a", "--seed", 3, "--logprobs", 2, "--return-token-ids")
    assert request.defaults.params == SamplingParams(max_tokens=7, temperature=0.5, stop=["a"], logprobs=2)
    assert request.defaults.token_ids and request.seed == 3
    assert [request.checked.index.line(place).options.params.max_tokens for place in range(2)] == [7, 2]


def test_a_plan_of_ones_own_is_taken_as_it_is(asked: Any) -> None:
    request = asked("--percent", 0, 50, 0, 100, 0, 100, "--gpu-batch-size", 3, "--kv-policy", "h2o")
    assert isinstance(request.plan, Plan) and request.plan.first_plan.gpu_batch_size == 3
    assert request.plan.kv_policy == "h2o" and request.plan.percent == (0, 50, 0, 100, 0, 100)
    assert "is for a search" in one_line(lambda: asked("--percent", 0, 50, 0, 100, 0, 100, "--allow-4bit"))


def test_every_way_of_going_on_is_one(asked: Any) -> None:
    assert asked("--resume").resuming.asked
    assert asked("--retry-errors").resuming.asked and asked("--retry-errors").resuming.retry_errors
    assert asked("--resume-anyway").resuming.asked and asked("--resume-anyway").resuming.anyway


def test_input_and_output_have_to_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["-i", "x"])
    assert "-o/--output-file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        (
            "--prompt-len",
            "each request of --input-file has a prompt of its own, which is taken as long as it is; --gen-len bounds",
        ),
        ("--num-prompts", "all requests of --input-file are run"),
        ("--prompt-file", "prompts stand in --input-file, a request per line"),
        ("--port", "it is a flag of serve"),
        ("--temprature", "did you mean --temperature?"),
        ("--prompt-size", "--help-all names those that there are"),
    ],
)
def test_a_flag_that_is_not_there_is_answered_with_what_helps(capsys: pytest.CaptureFixture[str], flag: str, said: str) -> None:
    assert batch.main(["-i", "x", "-o", "y", flag, "5"]) == 2
    assert capsys.readouterr().err.startswith(f"error: unknown flag {flag}; {said}")


def test_what_stands_instead_of_a_flag_is_said_of_flags_that_are_not_there() -> None:
    parser = make_parser()
    assert not INSTEAD.keys() & set(parser.flags) and all(commands_with(flag) for flag in INSTEAD)
    advised = {word.strip(",;") for advice in INSTEAD.values() for word in advice.split() if word.startswith("--")}
    assert advised <= set(parser.flags)
