"""Arguments: published FlexGen commands parse, and mean what they meant."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from h2o_flexgen.checkpoints.model_places import DEMO
from h2o_flexgen.cli import plan_request, run_request
from h2o_flexgen.cli.common_requests import plan_of
from h2o_flexgen.cli.run_request import DEMO_PROMPTS, FEW_PROMPTS, SHOWS_TIERS, MadeUpPrompts, RunRequest, parse, request_of
from h2o_flexgen.core.site import DEVICE, HOST
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.plan_requirements import PlanRequirements
from h2o_flexgen.planning.search import BUFFERS
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.session.open_request import what_is_searched
from tests.helpers.refusals import one_line


def asked(*words: str) -> RunRequest:
    return request_of(parse(words))


def test_a_published_command_parses_with_flexgens_meaning() -> None:
    command = "--model facebook/opt-30b --path _DUMMY_ --percent 20 80 0 100 0 100 --gpu-batch-size 48 --num-gpu-batches 3"
    args = parse([*command.split(), "--overlap", "False", "--pin-weight", "0", "--debug", "fewer_batch", "--verbose", "2"])
    assert args.percent == [20, 80, 0, 100, 0, 100]
    assert (args.gpu_batch_size, args.num_gpu_batches) == (48, 3)
    assert (args.overlap, args.pin_weight, args.sep_layer) == (False, False, True)
    assert (args.debug_mode, args.verbose, args.gen_len, args.prompt_len) == ("fewer_batch", 2, 32, None)
    assert not args.demo


def test_the_published_abbreviation_of_cpu_cache_compute_is_still_one() -> None:
    plan, searched = asked("--model", "m", "--cpu", "--percent", "0", "100", "0", "100", "0", "100").plan, asked("--model", "m")
    assert isinstance(plan, Plan) and plan.attend_on == HOST
    assert isinstance(searched.plan, PlanRequirements) and searched.plan.attend_on == (DEVICE, HOST)
    assert asked("--model", "m", "--cpu-mem", "8GB").site.cpu_mem == "8GB"


@pytest.mark.parametrize(("text", "value"), [("1", True), ("true", True), ("True", True), ("0", False), ("false", False)])
def test_switches_take_numbers_and_words(text: str, value: bool) -> None:
    assert parse(["--model", "m", "--sep-layer", text]).sep_layer is value


@pytest.mark.parametrize(("word", "policy"), [("auto", "full"), ("equal", "h2o")])
def test_the_default_of_head_budgets_by_its_name_evicts_nothing(word: str, policy: str) -> None:
    assert plan_of(parse(["--model", "m", "--head-budgets", word])).kv_policy == policy


def test_a_recall_keeps_everything() -> None:
    plan = plan_of(parse(["--model", "m", "--kv-recall", "0.1"]))
    assert (plan.kv_policy, plan.policy.recall) == ("full", 0.1)


@pytest.mark.parametrize(
    ("words", "codecs"),
    [
        ((), ("plain", "plain")),
        (("--compress-weight",), ("group4", "plain")),
        (("--compress-cache", "--compress-weight", "8"), ("group8", "group4")),
        (("--compress-cache", "8"), ("plain", "group8")),
    ],
)
def test_fewer_bits_are_asked_for_as_flexgen_does_or_by_number(words: tuple[str, ...], codecs: tuple[str, str]) -> None:
    plan = plan_of(parse(["--model", "m", *words]))
    assert (plan.weight_codec, plan.kv_codec) == codecs


@pytest.mark.parametrize(
    ("words", "weights", "computes"),
    [
        ("--compute int8 --compress-weight 8", "group8", ()),
        ("--compute int8 --allow-4bit", "plain", ()),  # a search that must find packed weights
        ("--compute int8", "plain", ()),  # as they are stored, they may be packed
        ("--allow-int8", "plain", ("int8",)),
        ("--compute int8 --compress-weight 8 --allow-4bit", "group8", ()),
        ("--allow-int8 --compress-weight", "group4", ("int8",)),
        ("--allow-int8 --allow-4bit", "plain", ("int8",)),
    ],
)
def test_products_of_8_bits_are_asked_for_whatever_the_weights(words: str, weights: str, computes: tuple[str, ...]) -> None:
    search = asked("--model", "m", *words.split()).plan
    assert isinstance(search, PlanRequirements)
    assert (search.plan.weight_codec, search.computes) == (weights, computes)
    assert search.plan.compute == ("int8" if "--compute" in words else "exact")


def test_a_model_is_opened_with_exact_products_where_a_search_may_pack_its_weights() -> None:
    request = asked("--model", "m", "--compute", "int8", "--allow-4bit")
    assert isinstance(request.plan, PlanRequirements) and request.plan.first_plan == replace(request.plan.plan, compute="exact")
    assert asked("--model", "m", "--compute", "int8").plan.first_plan.compute == "int8"


@pytest.mark.parametrize("flag", ["--compress-weight", "--compress-cache"])
def test_a_number_of_bits_that_is_not_known_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--model", "m", flag, "3"])
    assert capsys.readouterr().err == f"error: argument {flag}: '3' bits are not known; known: 4, 8\n"


def test_a_switch_without_a_word_is_on() -> None:
    assert parse(["--overlap", "--model", "m"]).overlap is True


def test_without_a_model_the_one_of_the_package_continues_texts_and_its_defaults_can_be_overruled() -> None:
    request = asked("--gen-len", "3")
    plan = request.plan.first_plan
    assert (request.model.name, request.model.dummy_weights, request.gen_len) == ("demo", False, 3)
    assert request.prompts == DEMO_PROMPTS and len(DEMO_PROMPTS) == plan.block_size
    assert plan.kv_policy == "h2o" and asked("--kv-policy", "full").plan.first_plan.kv_policy == "full"
    assert plan.weights.disk > 0 and plan.kv.disk > 0


def test_random_weights_without_a_model_are_those_of_a_small_opt() -> None:
    request = asked("--dummy-weights")
    assert (request.model.name, request.model.dummy_weights) == ("facebook/opt-125m", True)
    assert request.prompts == MadeUpPrompts(None, 64)


@pytest.mark.parametrize("words", ["--prompt Hello", "--prompt-len 9", "--num-prompts 3", "--prompt-file {file}"])
def test_the_demo_has_no_texts_of_its_own_where_others_are_asked_for(words: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("Hello")
    prompts = asked(*words.format(file=tmp_path / "file").split()).prompts
    assert prompts == ("Hello",) or isinstance(prompts, MadeUpPrompts)


def test_a_model_without_prompts_and_sizes_runs_a_few_and_says_so() -> None:
    request = asked("--model", "m")
    assert request.prompts == MadeUpPrompts(FEW_PROMPTS, 512)
    [note] = request.notes
    assert note.startswith(f"no prompt is given: {FEW_PROMPTS} made-up ones are run; --prompt gives one")
    assert asked("--model", "m", "--prompt", "a").notes == ()


@pytest.mark.parametrize(
    "words",
    [
        "--gpu-batch-size 2",
        "--num-gpu-batches 2",
        "--prompt-len 512",
        "--dummy-weights",
        "--path _DUMMY_",
        "--percent 0 100 0 100 0 100",
    ],
)
def test_what_asks_for_sizes_still_runs_a_block_of_made_up_prompts(words: str) -> None:
    request = asked("--model", "m", *words.split())
    assert request.prompts == MadeUpPrompts(None, 512) and request.notes == ()


def test_the_policy_of_the_demo_gives_way_to_what_needs_all_tokens() -> None:
    recalls, drafts, plain = asked("--kv-recall", "0.1").plan, asked("--draft", "ngram").plan, asked().plan
    assert isinstance(recalls, Plan) and isinstance(drafts, Plan) and isinstance(plain, Plan)
    assert (recalls.kv_policy, drafts.kv_policy, plain.kv_policy) == ("full", "h2o", "h2o")
    assert drafts.percent[2:4] == (20, 80) != plain.percent[2:4] == recalls.percent[2:4]
    again = asked("--kv-recall", "0.1", "--kv-recall-reuse").plan
    assert isinstance(again, Plan) and again.policy.reuses_read and sum(again.percent[2:4]) < 100, "it reads KV from disk"
    both = asked("--kv-recall", "0.1", "--kv-policy", "h2o", "--kv-budget", "0.5").plan.first_plan
    assert (both.kv_policy, both.kv_options.kv_budget, both.policy.recall) == ("h2o", 0.5, 0.1)
    rolls = one_line(lambda: asked("--kv-recall", "0.1", "--kv-policy", "h2o", "--positions", "rolling"))
    assert "kv_recall 0.1 compares keys as they stand in the text" in rolls


def test_the_demo_says_why_it_is_spread_over_all_tiers() -> None:
    assert asked().notes == (SHOWS_TIERS,)
    for flags in (
        ("--percent", *["100", "0", "100", "0", "100", "0"]),
        ("--kv-recall", "0.1"),
        ("--kv-policy", "full"),
        ("--model", DEMO),
    ):
        assert SHOWS_TIERS not in asked(*flags).notes


def test_a_path_without_a_model_is_no_demo() -> None:
    assert not parse(["--path", "/some/folder"]).demo
    assert parse(["--path", "_DUMMY_"]).demo


def test_defaults_are_those_of_plan_and_sampling_params() -> None:
    request = asked("--model", "m")
    assert request.plan.first_plan == Plan() == asked("--model", "m", "--overlap", "1").plan.first_plan
    assert request.sampling == replace(SamplingParams(), stop=[], stop_token_ids=[]) and request.seed is None
    assert (request.gen_len, request.steps) == (SamplingParams.max_tokens,) * 2


def test_the_plan_is_what_the_flags_ask_for() -> None:
    flags = "--percent 0 50 0 100 0 100 --gpu-batch-size 8 --num-gpu-batches 2 --buffers 3 --sep-layer 0 --schedule row_by_row"
    plan = Plan(8, 2, buffers=3, sep_layer=False, schedule="row_by_row").with_percent((0, 50, 0, 100, 0, 100))
    assert asked("--model", "m", *flags.split()).plan == plan
    assert asked("--model", "m", *flags.split(), "--debug-mode", "breakdown").plan == plan.without_overlap()
    one_buffer = flags.replace("--buffers 3", "--buffers 1")
    for shown in (one_buffer, one_buffer.replace("--buffers 1", "")):
        assert asked("--model", "m", *shown.split(), "--overlap", "0").plan == plan.without_overlap()
    with pytest.raises(ValueError, match="--buffers 3 changes nothing: --overlap 0 takes one buffer"):
        asked("--model", "m", *flags.split(), "--overlap", "0")


def test_every_flag_has_help_and_every_default_is_shown() -> None:
    parser = run_request.make_parser()
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    assert len(shown) > 35 and [action.dest for action in shown if len(action.help or "") < 10] == []
    text = " ".join(parser.format_help().split())
    for default in (
        "auto",
        f"{Plan.gpu_batch_size}; found where --percent is auto",
        SamplingParams.max_tokens,
        Plan.schedule,
        512,
        "what is free",
    ):
        assert f"(default: {default})" in text
    assert "None" not in text and "True" not in text and "[]" not in text


def test_what_the_run_and_the_plan_command_both_ask_is_asked_in_the_same_words() -> None:
    def texts(parser: argparse.ArgumentParser) -> dict[str, str]:
        return {flag: action.help or "" for action in parser._actions for flag in action.option_strings}

    run, plan = texts(run_request.make_parser()), texts(plan_request.make_parser())
    for flag in (
        "--compute",
        "--allow-4bit",
        "--allow-int8",
        "--allow-recall",
        "--latency-limit",
        "--prefer",
        "--schedule",
        "--device",
        "--hh-ratio",
    ):
        assert run[flag] == plan[flag] != "", flag
    for flag in ("--machine", "--gpu-batch-size", "--num-gpu-batches"):  # but for what else it is, or where it is found
        assert run[flag].split(";")[0] == plan[flag].split(";")[0] != run[flag], flag


def test_sizes_that_are_given_are_all_that_a_search_may_take() -> None:
    search = asked("--model", "m", "--gpu-batch-size", "5").plan
    assert isinstance(search, PlanRequirements) and (search.batch_sizes, search.batches) == ((5,), ())
    assert (search.plan.gpu_batch_size, search.plan.num_gpu_batches) == (5, Plan.num_gpu_batches)


@pytest.mark.parametrize(("words", "buffers", "tried"), [("", 2, BUFFERS), ("--buffers 2", 2, ()), ("--slots 5", 5, ())])
def test_buffers_are_searched_unless_they_are_given(words: str, buffers: int, tried: tuple[int, ...]) -> None:
    search = asked("--model", "m", *words.split()).plan
    assert isinstance(search, PlanRequirements) and (search.plan.buffers, search.buffers) == (buffers, tried)
    options = {"slots": buffers} if words else {}
    assert what_is_searched(Plan.create(**options), options).buffers == tried


def test_help_ends_with_an_example_that_parses() -> None:
    commands = [line.split(None, 3)[3] for line in run_request.EPILOG.splitlines() if line.startswith("  python")]
    assert len(commands) == 2
    for command in commands:
        assert parse(shlex.split(command)).model == "facebook/opt-1.3b"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--cut-gen-len", "4", "--debug-mode", "fewer_batch"], "give one of them"),
        (["--schedule", "row_by_row", "--debug-mode", "fewer_batch"], "use --cut-gen-len"),
        (["--dry-run", "--timeline", "run.png"], "--timeline shows what was run"),
        (["--dry-run", "--trace", "run.json"], "--trace shows what was run"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        asked("--model", "m", *flags)
