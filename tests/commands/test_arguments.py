"""Arguments: published FlexGen commands parse, and mean what they meant."""

from __future__ import annotations

import pytest

from h2o_flexgen.commands.arguments import parse


def test_a_published_command_parses_with_flexgens_meaning() -> None:
    command = "--model facebook/opt-30b --path _DUMMY_ --percent 20 80 0 100 0 100 --gpu-batch-size 48 --num-gpu-batches 3"
    args = parse([*command.split(), "--overlap", "False", "--pin-weight", "0", "--debug", "fewer_batch", "--verbose", "2"])
    assert args.percent == [20, 80, 0, 100, 0, 100]
    assert (args.gpu_batch_size, args.num_gpu_batches) == (48, 3)
    assert (args.overlap, args.pin_weight, args.sep_layer) == (False, False, True)
    assert (args.debug_mode, args.verbose, args.gen_len, args.prompt_len) == ("fewer_batch", 2, 32, None)
    assert not args.demo


def test_the_published_abbreviation_of_cpu_cache_compute_is_still_one() -> None:
    with pytest.raises(ValueError, match="--cpu-cache-compute is not supported"):
        parse(["--model", "m", "--cpu"])
    assert parse(["--model", "m", "--cpu-mem", "8GB"]).cpu_mem == "8GB"


@pytest.mark.parametrize(("text", "value"), [("1", True), ("true", True), ("True", True), ("0", False), ("false", False)])
def test_switches_take_numbers_and_words(text: str, value: bool) -> None:
    assert parse(["--model", "m", "--sep-layer", text]).sep_layer is value


def test_a_switch_without_a_word_is_on() -> None:
    assert parse(["--overlap", "--model", "m"]).overlap is True


def test_without_a_model_there_is_a_small_one_whose_defaults_can_be_overruled() -> None:
    args = parse(["--gen-len", "3"])
    assert (args.demo, args.model, args.dummy_weights, args.prompt_len, args.gen_len) == (
        True,
        "facebook/opt-125m",
        True,
        64,
        3,
    )
    assert all(device + host <= 100 for device, host in zip(args.percent[::2], args.percent[1::2]))
    assert args.percent[0] + args.percent[1] < 100 and args.percent[2] + args.percent[3] < 100  # the disk has a share


def test_a_path_without_a_model_is_no_demo() -> None:
    assert not parse(["--path", "/some/folder"]).demo
    assert parse(["--path", "_DUMMY_"]).demo


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--cut-gen-len", "4", "--debug-mode", "fewer_batch"], "give one of them"),
        (["--schedule", "row_by_row", "--debug-mode", "fewer_batch"], "use --cut-gen-len"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(["--model", "m", *flags])
