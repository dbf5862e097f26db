"""Flags that commands share: model, placement, sizes, search, KV cache, sampling; their types, and the parser. Nothing here
imports torch.

A default that also has a meaning in Python is read from where it is written there: Plan and SamplingParams.
"""

from __future__ import annotations

import argparse
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from typing import NoReturn

from h2o_flexgen.core.allowed_values import AUTO
from h2o_flexgen.core.cores import cores
from h2o_flexgen.core.hints import did_you_mean, shortened, shown
from h2o_flexgen.core.model_spec import DTYPE_BYTES
from h2o_flexgen.core.numbers import decimal_number, whole_number
from h2o_flexgen.core.units import parse_bytes
from h2o_flexgen.core.workload import MOST_BATCHES, MOST_PROMPTS, MOST_TOKENS
from h2o_flexgen.planning.machine import DEVICES
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.search import PREFERENCES, THROUGHPUT
from h2o_flexgen.policies.h2o import H2O
from h2o_flexgen.policies.options import DEFAULT_KEPT, POSITIONS
from h2o_flexgen.policies.streaming import SINKS
from h2o_flexgen.policies.table import POLICIES
from h2o_flexgen.quant.codec import BY_BITS
from h2o_flexgen.sampling.params import LARGEST_PENALTY, LARGEST_SHIFT, LEAST_PENALTY, SEED_LIMIT, SamplingParams
from h2o_flexgen.schedule.table import SCHEDULES
from h2o_flexgen.text.tokenizer import BYTES

BESIDE_BUDGET = ("hh_prompt_only", "sinks", "score_decay", "grace", "positions")  # options beside a budget
DUMMY_PATH = "_DUMMY_"
TRUE, FALSE = ("1", "true", "t", "yes", "y", "on"), ("0", "false", "f", "no", "n", "off")
TRACEBACK = 3  # the level of --verbose that shows where an error comes from
MOST = 1e9  # upper bound of numbers that nothing else bounds
REPEATABLE = "may be given several times"
MOST_IDS = 2**31 - 1  # upper bound of token ids: no vocabulary is larger
MOST_SLOTS = 1000  # upper bound of a schedule's buffers


# -- the types of flags: every number has bounds, and its message names the value and what is allowed -----------------------


def whole(least: int, most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            number = whole_number(text)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise ArgumentTypeError(f"{shown(text)} is not allowed; give a whole number from {least} to {most}")
        return number

    return read


def number(least: float, most: float = MOST, above: bool = False) -> Callable[[str], float]:
    """The type of a number with bounds. `above` is a lower bound that is not allowed itself."""

    def read(text: str) -> float:
        try:
            value = decimal_number(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most or (above and value == least):
            allowed = f"above {least:g} and at most {most:g}" if above else f"from {least:g} to {most:g}"
            raise ArgumentTypeError(f"{shown(text)} is not allowed; give a number {allowed}")
        return value

    return read


def memory_size(text: str) -> str:
    """A size in bytes, kept as it was written, since messages and printed flags repeat it."""
    try:
        parse_bytes(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from error
    return text


def threads(text: str) -> int:
    try:
        return whole(1, cores())(text)
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f"{error}, the cores that this process may use") from None


def _codec(bits: str) -> str:
    for known, codec in BY_BITS.items():
        if bits == str(known):
            return codec
    raise ArgumentTypeError(f"{shown(bits)} bits are not known; known: {', '.join(map(str, BY_BITS))}")


def _switch(text: str) -> bool:
    if text.lower() not in (*TRUE, *FALSE):
        raise ArgumentTypeError(f"{shown(text)} is neither 0 nor 1")
    return text.lower() in TRUE


SHARE = number(0, 1, above=True)
SEED = whole(0, SEED_LIMIT - 1)
TOKENS = whole(1, MOST_TOKENS)  # tokens of a text
SLOTS = whole(0, MOST_TOKENS)  # slots of a KV cache, which never holds more than the tokens of a text


# -- the parser ---------------------------------------------------------------------------------------------------------


class Version(argparse.Action):
    """--version, which looks the version up only when asked: that takes as long as parsing the flags."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import PackageNotFoundError, version

        told = []
        for package in ("h2o_flexgen", "torch"):
            try:
                told.append(f"{package} {version(package)}")
            except PackageNotFoundError:
                told.append(f"{package} (not installed)")
        print(", ".join(told))
        parser.exit()


class Parser(argparse.ArgumentParser):
    """A parser that says what is wrong in one line; --help has the rest."""

    def __init__(self, program: str, description: str, usage: str | None = None, epilog: str | None = None) -> None:
        super().__init__(program, usage, description, epilog, formatter_class=Help)
        self.add_argument(
            "--version", action=Version, nargs=0, default=argparse.SUPPRESS, help="the versions of this package and of torch"
        )

    def parse(self, argv: Sequence[str] | None) -> argparse.Namespace:
        args, unknown = self.parse_known_args(argv)
        if unknown:
            self._refuse_unknown(unknown)
        return args

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {shortened(' '.join(message.split()))}\n")

    def _refuse_unknown(self, unknown: Sequence[str]) -> NoReturn:
        flag = next((word.partition("=")[0] for word in unknown if word.startswith("-")), None)
        if flag is None:
            self.error(f"{unknown[0]!r} belongs to no flag; a model is given with --model, a text with spaces in quotes")
        hint = did_you_mean(flag, self._option_string_actions) or "; --help names those that there are"
        self.error(f"unknown flag {flag}{hint}")


class Help(argparse.RawDescriptionHelpFormatter):
    """Shows a default as it would be typed, if there is one."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if default is None or default is argparse.SUPPRESS or default == [] or action.nargs == 0:
            return text
        return f"{text} (default: {_typed(default)})"


def _typed(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(_typed, value))
    return str(int(value)) if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    add = group.add_argument
    add(
        "--model",
        metavar="NAME",
        help="hub name (facebook/opt-30b), local folder of a checkpoint, or demo: the one of the package",
    )
    add("--path", metavar="FOLDER", help=f"folder that has the checkpoint, or {DUMMY_PATH} for random weights, as in FlexGen")
    add("--dummy-weights", action="store_true", help="random weights in the model's shapes: for speed, nothing is downloaded")
    dtypes = ("auto", *DTYPE_BYTES)
    add("--dtype", default="auto", choices=dtypes, help="what is computed with; auto: the fast type of the device")
    add_device(group)
    add(
        "--gpu-mem",
        type=memory_size,
        metavar="SIZE",
        help="no more than this is held on the GPU, like 16GB or 14.9GiB (default: what is free)",
    )
    held = "no more than this is held in CPU memory by the whole process (default: what is free)"
    add("--cpu-mem", type=memory_size, metavar="SIZE", help=held)
    add_threads(group)
    left = "where KV, activations and random weights go on disk; left as it was found (default: below ~/.cache/h2o_flexgen)"
    add("--offload-dir", metavar="FOLDER", help=left)


def add_tokenizer(parser: argparse.ArgumentParser) -> None:
    """Adds --tokenizer, for commands that read and write texts."""
    own = f"{AUTO}: that of the model, or {BYTES} for random weights"
    other = f"a hub name or a folder with a tokenizer, or {BYTES}: every byte is a token"
    parser.add_argument_group("texts").add_argument("--tokenizer", default=AUTO, metavar="NAME", help=f"{other}; {own}")


def add_threads(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    text = "that compute on the CPU; with others sums may differ in their last bits (default: one for each core that is free)"
    parser.add_argument("--threads", type=threads, metavar="N", help=text)


def add_device(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    devices = f"auto, {' or '.join(DEVICES)}, or one of several with its number, like {DEVICES[-1]}:1"
    parser.add_argument("--device", default="auto", metavar="NAME", help=devices)


class Percent(argparse.Action):
    """Takes six numbers; with a true `const` also the word that asks for a plan to be found."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        given = [str(value) for value in values or ()]
        if self.const and given == [AUTO]:
            setattr(namespace, self.dest, AUTO)
            return
        try:
            shares = [whole_number(value) for value in given]
        except ValueError:
            shares = []
        if len(shares) != 6:
            what = f"six whole numbers{', or ' + AUTO if self.const else ''}"
            raise argparse.ArgumentError(self, f"takes {what}; got {shown(' '.join(given))}")
        setattr(namespace, self.dest, shares)


def add_placement(group: argparse._ArgumentGroup, may_be_found: bool = False) -> None:
    """Adds where data lies. `may_be_found`: --percent also takes `auto`, which is then the default."""
    add = group.add_argument
    found = f"; {AUTO}: the plan is found for this machine" if may_be_found else ""
    add(
        "--percent",
        action=Percent,
        nargs="+",
        const=may_be_found,
        default=AUTO if may_be_found else [int(share) for share in Plan().percent],
        metavar=("W_GPU", "W_CPU KV_GPU KV_CPU ACT_GPU ACT_CPU"),
        help=f"per cent of weights, KV and activations on GPU and in CPU memory; the rest of each is on disk{found}",
    )
    add_switch(group, "--sep-layer", Plan.sep_layer, "attention and MLP are two layers of the schedule, not one")
    add_switch(group, "--pin-weight", Plan.pin_weight, "weights for a GPU lie in page-locked CPU memory")
    add_switch(group, "--overlap", True, "0: one slot, nothing overlaps; the tokens are the same")
    at_once = "tokens of prompts computed at once: more take more memory; a longer turn of a chat is read in pieces"
    add("--prefill-tokens", type=TOKENS, default=Plan.prefill_tokens, metavar="N", help=at_once)
    packed = "matrices, embedding and head too, take 4 bits a value (or 8); packed once, into a cache (default: as they are)"
    _add_codec(group, "--compress-weight", "weight_codec", packed)
    _add_codec(group, "--compress-cache", "kv_codec", "keys and values take 4 bits (or 8), head by head (default: as they are)")
    slots = "layers whose weights may be under way or in use at once"
    add("--slots", type=whole(1, MOST_SLOTS), default=Plan.slots, metavar="N", help=slots)


def _add_codec(group: argparse._ArgumentGroup, flag: str, option: str, text: str) -> None:
    kinds, default = "|".join(map(str, BY_BITS)), argparse.SUPPRESS
    group.add_argument(flag, dest=option, type=_codec, nargs="?", const="4", default=default, metavar=kinds, help=text)


def add_sizes(group: argparse._ArgumentGroup, found: str = "") -> None:
    """Adds the sizes of a block and the order of its work. `found` says where sizes that are not given are found."""
    add, otherwise = group.add_argument, f"; found {found}" if found else ""
    for flag, metavar, most, usual, text in (
        ("--gpu-batch-size", "ROWS", MOST_PROMPTS, Plan.gpu_batch_size, "sequences computed at once"),
        ("--num-gpu-batches", "N", MOST_BATCHES, Plan.num_gpu_batches, "batches that share a pass over the weights"),
    ):
        add(flag, type=whole(1, most), metavar=metavar, help=f"{text} (default: {usual}{otherwise})")
    orders = f"order of the work: {', '.join(SCHEDULES)}; all but the first are there for comparison"
    add("--schedule", default=Plan.schedule, metavar="NAME", help=orders)


def add_search(parser: argparse.ArgumentParser, title: str, machine: str) -> argparse._ArgumentGroup:
    """Adds what is asked of a plan to be found. `machine` says what else the machine is for."""
    group = parser.add_argument_group(title)
    add = group.add_argument
    named = f"a YAML file, or the name of a machine of the package; {machine}"
    add("--machine", metavar="NAME", help=f"{named} (default: this one, as its profile was kept, or measured now)")
    bits = "4 bits may be taken for weights, for KV or for both, where that is faster; it changes what the model says"
    add("--allow-4bit", action="store_true", help=bits)
    limit = "from the first prompt of a block to its last token (default: no limit)"
    add("--latency-limit", type=number(0, above=True), metavar="SECONDS", help=limit)
    wish = "what is best: most tokens per second, or the block that is over soonest"
    add("--prefer", choices=PREFERENCES, default=THROUGHPUT, help=wish)
    return group


def add_kv(parser: argparse.ArgumentParser) -> None:
    share = f"{100 * DEFAULT_KEPT:g} per cent of prompt and generation (in a chat: of --context-len)"
    text = f"what of it is kept; any policy but {Plan.kv_policy} keeps {share} unless told otherwise"
    add = parser.add_argument_group("KV cache", text).add_argument
    names = f"{', '.join(POLICIES)} (default: {Plan.kv_policy}, or {H2O.name} where any option of this group is given)"
    add("--kv-policy", metavar="NAME", help=names)
    add(
        "--hh-ratio",
        type=SHARE,
        metavar="R",
        help="keep R of each prompt's length as heavy hitters and as much as recent tokens",
    )
    add("--kv-budget", type=SHARE, metavar="F", help="keep this share of prompt and generation, half heavy, half recent")
    add("--heavy", type=SLOTS, metavar="SLOTS", help="heavy hitters kept, in slots per sequence and head")
    add("--recent", type=SLOTS, metavar="SLOTS", help="slots for the newest tokens")
    add("--hh-all", action="store_true", help="evict generated tokens too: the default, named as in H2O's commands")
    add_protection(add)


def add_protection(add: Callable[..., argparse.Action]) -> None:
    """Adds what may be asked of a policy beside its budget: the options in BESIDE_BUDGET."""
    add("--hh-prompt-only", action="store_true", help="only the prompt is selected from; all that is generated is kept")
    add("--sinks", type=SLOTS, metavar="N", help=f"the first N tokens are never evicted (streaming: {SINKS} unless given)")
    decay = "multiply the scores so far by D before each step adds to them (default: 1, plain sums)"
    add("--score-decay", type=SHARE, metavar="D", help=decay)
    add(
        "--grace",
        type=SLOTS,
        metavar="N",
        help="never evict the newest N, also where --recent is less; has no slots of its own",
    )
    rolling = "of keys; true: those in the text (default); rolling: their order in the cache, for texts without end"
    add("--positions", choices=POSITIONS, help=rolling)


def add_verbose(add: Callable[..., argparse.Action], text: str, default: int = 1) -> None:
    """Adds --verbose; without a level it means more than usual."""
    levels = whole(0, TRACEBACK)
    add("--verbose", type=levels, nargs="?", const=TRACEBACK - 1, default=default, metavar="LEVEL", help=text)


def add_switch(group: argparse._ArgumentGroup, flag: str, default: bool, text: str) -> None:
    group.add_argument(flag, type=_switch, nargs="?", const=True, default=default, metavar="0|1", help=text)


def add_sampling(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("sampling")
    add = group.add_argument
    add("--temperature", type=number(0), default=SamplingParams.temperature, metavar="T", help="0: greedy, the likeliest token")
    likeliest, usual = "only the K likeliest tokens; 0 or -1: all", SamplingParams.top_k
    add("--top-k", type=whole(-1, MOST_IDS), default=usual, metavar="K", help=likeliest)
    add("--top-p", type=SHARE, default=SamplingParams.top_p, metavar="P", help="only the fewest that hold this share; 1: all")
    floor = "only tokens at least P times as likely as the likeliest; 0: all"
    add("--min-p", type=number(0, 1), default=SamplingParams.min_p, metavar="P", help=floor)
    penalty = "above 1 discourages tokens that were there before; 1: off"
    off = SamplingParams.repetition_penalty
    add("--repetition-penalty", type=number(LEAST_PENALTY, LARGEST_PENALTY), default=off, metavar="R", help=penalty)
    shift, limits = number(-LARGEST_SHIFT, LARGEST_SHIFT), f"{-LARGEST_SHIFT:g} to {LARGEST_SHIFT:g}"
    presence = f"taken off the logits of tokens that were generated, {limits}; below 0 encourages them"
    add("--presence-penalty", type=shift, default=SamplingParams.presence_penalty, metavar="P", help=presence)
    frequency = "the same, once for each time that a token was generated"
    add("--frequency-penalty", type=shift, default=SamplingParams.frequency_penalty, metavar="P", help=frequency)
    add("--seed", type=SEED, metavar="N", help="repeats a run with a temperature (default: another one each time)")
    add("--stop", action="append", default=[], metavar="TEXT", help=f"a text ends before this; {REPEATABLE}")
    ends = f"ends a text; {REPEATABLE}"
    add("--stop-token-id", action="append", type=whole(0, MOST_IDS), default=[], metavar="ID", help=ends)
    least = "nothing ends a text before it has so many tokens"
    add("--min-tokens", type=whole(0, MOST_TOKENS), default=SamplingParams.min_tokens, metavar="N", help=least)
    add("--ignore-eos", action="store_true", help="go on to --gen-len behind the end of the text")
    return group
