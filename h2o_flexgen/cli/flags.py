"""Flags that commands share: model, placement, sizes, search, KV cache, sampling; their types, and the parser. Nothing here
imports torch.

A default that also has a meaning in Python is read from where it is written there: Plan and SamplingParams.
"""

from __future__ import annotations

import argparse
from argparse import ArgumentTypeError
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any, NoReturn, TypeAlias

from h2o_flexgen.core.allowed_values import AUTO, Bounds
from h2o_flexgen.core.cores import cores
from h2o_flexgen.core.hints import nearest, shortened, shown
from h2o_flexgen.core.model_spec import DTYPE_BYTES
from h2o_flexgen.core.numbers import decimal_number, whole_number
from h2o_flexgen.core.tiers import HOST
from h2o_flexgen.core.units import parse_bytes
from h2o_flexgen.core.workload import MOST_BATCHES, MOST_PROMPTS, MOST_TOKENS
from h2o_flexgen.formats.kernel_table import EXACT, INT8, PRODUCTS
from h2o_flexgen.formats.table import BY_BITS
from h2o_flexgen.planning.machine import DEVICES
from h2o_flexgen.planning.plan import GRAPHS, JUDGED, ON, PINNED, PREFIX_POLICIES, Plan
from h2o_flexgen.planning.search import PREFERENCES, THROUGHPUT
from h2o_flexgen.policies.h2o import H2O
from h2o_flexgen.policies.head_budgets_file import OWN
from h2o_flexgen.policies.kv_options import DEFAULT_KEPT, POSITIONS
from h2o_flexgen.policies.kvzap import KVzap
from h2o_flexgen.policies.policy import SINKS
from h2o_flexgen.policies.table import POLICIES
from h2o_flexgen.sampling.params import BOUNDS, LARGEST_SHIFT, SamplingParams
from h2o_flexgen.schedule.table import SCHEDULES
from h2o_flexgen.text.tokenizer import BYTES

BESIDE_BUDGET = ("hh_prompt_only", "value_norms", "sinks", "score_decay", "grace", "positions")  # options beside a budget
DUMMY_PATH = "_DUMMY_"
# the model that gives random weights their shapes, if none is named
NOISE: Mapping[str, object] = {"model": "facebook/opt-125m", "dummy_weights": True}
TRUE, FALSE = ("1", "true", "t", "yes", "y", "on"), ("0", "false", "f", "no", "n", "off")
GRAPHS_FLAG = "--cuda-graphs"
TRACEBACK = 3  # the level of --verbose that shows where an error comes from
MOST = 1e9  # upper bound of numbers that nothing else bounds
CALLED = dict.fromkeys(("--max-tokens", "--max-new-tokens"), "--gen-len")  # as other engines name flags
REPEATABLE = "may be given several times"
MOST_GPUS = 64  # of a machine
MOST_SLOTS = 1000  # upper bound of a schedule's buffers
Kind: TypeAlias = "Callable[[str], object] | None"  # reads the value of a flag; None: as it is written


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


def within(bounds: Bounds) -> Callable[[str], float]:
    """The type of a number that is also given in Python."""
    if bounds.is_whole:
        return whole(int(bounds.least), int(bounds.most))
    return number(bounds.least, bounds.most, bounds.without_least)


def sampled(option: str) -> Callable[[str], float]:
    """The type of an option of sampling."""
    return within(BOUNDS[option])


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
SEED = sampled("seed")
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

    def __init__(
        self,
        program: str,
        description: str,
        usage: str | None = None,
        epilog: str | None = None,
        instead: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`instead`: what to do instead, by each flag that this command lacks."""
        super().__init__(program, usage, description, epilog, formatter_class=Help)
        self._instead = instead
        self.add_argument(
            "--version", action=Version, nargs=0, default=argparse.SUPPRESS, help="the versions of this package and of torch"
        )

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        args, unknown = self.parse_known_args(argv)
        if unknown:
            self._refuse_unknown(unknown)
        return args

    def parse_or_demo(
        self, argv: Sequence[str], demo: Mapping[str, object], noise: Mapping[str, object] | None = None
    ) -> argparse.Namespace:
        """Counts the flags of `demo` as given if no model is named; those of `noise` if weights are to be random."""
        flags = self.parse(argv)
        if flags.model is None and flags.path in (None, DUMMY_PATH):
            is_random = flags.dummy_weights or flags.path is not None
            if is_random and noise is None:
                raise ValueError("the model that is to have random weights is missing; give --model with its name")
            self.set_defaults(**(noise or {} if is_random else demo))
            flags = self.parse(argv)
        return flags

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {shortened(' '.join(message.split()))}\n")

    def _refuse_unknown(self, unknown: Sequence[str]) -> NoReturn:
        flag = next((word.partition("=")[0] for word in unknown if word.startswith("-")), None)
        if flag is None:
            self.error(f"{unknown[0]!r} belongs to no flag; a model is given with --model, a text with spaces in quotes")
        self.error(f"unknown flag {flag}{self._hint(flag) or '; --help names those that there are'}")

    def _hint(self, flag: str) -> str:
        """The hint: what to use instead, which command has the flag, or the nearest name. Dashes do not count as similarity."""
        if flag in self._instead:
            return f"; {self._instead[flag]}"
        if CALLED.get(flag) in self.flags:
            return f"; it is called {CALLED[flag]}"
        names = {name.lstrip("-"): name for name in self.flags}
        near = nearest(flag.lstrip("-"), names)
        meant = "" if near is None else f"; did you mean {names[near]}?"
        others: list[str] = import_module("h2o_flexgen.cli.main").commands_with(flag)
        return f"; it is a flag of {', '.join(others)}{meant}" if others else meant

    @property
    def flags(self) -> Collection[str]:
        return self._option_string_actions.keys()

    def group(self, title: str | None = None, text: str | None = None) -> Group:
        """Flags under a title; without one, those that belong to no group."""
        return Group((self.add_argument_group(title, text) if title else self).add_argument)

    # -- groups that commands share --------------------------------------------------------------------------------------

    def add_model(self) -> None:
        group = self.group("model")
        named = "hub name (facebook/opt-30b), local folder of a checkpoint, GGUF file, smollm2, or demo: the one of the package"
        group.value("--model", "NAME", named)
        folder = f"folder that has the checkpoint, or {DUMMY_PATH} for random weights, as in FlexGen"
        group.value("--path", "FOLDER", folder)
        group.truth("--dummy-weights", text="random weights in the model's shapes: for speed, nothing is downloaded")
        group.choice("--dtype", (AUTO, *DTYPE_BYTES), "what is computed with; auto: the fast type of the device", AUTO)
        add_device(group)
        on_gpu = "no more than this is held on the GPU, like 16GB or 14.9GiB (default: what is free)"
        group.value("--gpu-mem", "SIZE", on_gpu, memory_size)
        held = "no more than this is held in CPU memory by the whole process (default: what is free)"
        group.value("--cpu-mem", "SIZE", held, memory_size)
        add_threads(group)
        left = "where KV, activations and random weights go on disk; left as it was found (default: below ~/.cache/h2o_flexgen)"
        group.value("--offload-dir", "FOLDER", left)

    def add_tokenizer(self) -> None:
        """Adds --tokenizer, for commands that read and write texts."""
        own = f"{AUTO}: that of the model, or {BYTES} for random weights"
        other = f"a hub name, or a folder or GGUF file with a tokenizer, or {BYTES}: every byte is a token"
        self.group("texts").value("--tokenizer", "NAME", f"{other}; {own}", default=AUTO)

    def add_search(self, title: str, machine: str) -> Group:
        """Adds what is asked of a plan to be found. `machine` says what else the machine is for."""
        group = self.group(title)
        named = f"a YAML file, or the name of a machine of the package; {machine}"
        group.value("--machine", "NAME", f"{named} (default: this one, as its profile was kept, or measured now)")
        bits = "4 bits may be taken for weights, for KV or for both, where that is faster; it changes what the model says"
        group.truth("--allow-4bit", text=bits)
        rounded = f"products of {INT8} may be taken for packed weights, where that is faster; it changes what the model says"
        group.truth("--allow-int8", text=rounded)
        limit = "from the first prompt of a block to its last token (default: no limit)"
        group.value("--latency-limit", "SECONDS", limit, number(0, above=True))
        wish = "what is best: most tokens per second, or the block that is over soonest"
        group.choice("--prefer", PREFERENCES, wish, THROUGHPUT)
        return group

    def add_kv(self) -> None:
        share = f"{100 * DEFAULT_KEPT:g} per cent of prompt and generation (in a chat: of --context-len)"
        text = f"what of it is kept; any policy but {Plan.kv_policy} keeps {share} unless told otherwise"
        group = self.group("KV cache", text)
        names = f"{', '.join(POLICIES)} (default: {Plan.kv_policy}, or {H2O.name} where any option of this group is given)"
        group.value("--kv-policy", "NAME", names)
        group.value("--hh-ratio", "R", "keep R of each prompt's length as heavy hitters and as much as recent tokens", SHARE)
        group.value("--kv-budget", "F", "keep this share of prompt and generation, half heavy, half recent", SHARE)
        group.value("--heavy", "SLOTS", "heavy hitters kept, in slots per sequence and head", SLOTS)
        group.value("--recent", "SLOTS", "slots for the newest tokens", SLOTS)
        add_head_budgets(group)
        add_probe(group)
        group.truth("--hh-all", text="evict generated tokens too: the default, named as in H2O's commands")
        add_protection(group)

    def add_sampling(self) -> Group:
        group, usual = self.group("sampling"), SamplingParams
        value = group.value
        value("--temperature", "T", "0: greedy, the likeliest token", sampled("temperature"), usual.temperature)
        value("--top-k", "K", "only the K likeliest tokens; 0 or -1: all", sampled("top_k"), usual.top_k)
        value("--top-p", "P", "only the fewest that hold this share; 1: all", sampled("top_p"), usual.top_p)
        value("--min-p", "P", "only tokens at least P times as likely as the likeliest; 0: all", sampled("min_p"), usual.min_p)
        discouraged = "above 1 discourages tokens that were there before; 1: off"
        value("--repetition-penalty", "R", discouraged, sampled("repetition_penalty"), usual.repetition_penalty)
        limits = f"{-LARGEST_SHIFT:g} to {LARGEST_SHIFT:g}"
        presence = f"taken off the logits of tokens that were generated, {limits}; below 0 encourages them"
        value("--presence-penalty", "P", presence, sampled("presence_penalty"), usual.presence_penalty)
        frequency = "the same, once for each time that a token was generated"
        value("--frequency-penalty", "P", frequency, sampled("frequency_penalty"), usual.frequency_penalty)
        value("--seed", "N", "repeats a run with a temperature (default: another one each time)", SEED)
        group.values("--stop", "TEXT", f"a text ends before this; {REPEATABLE}")
        group.values("--stop-token-id", "ID", f"ends a text; {REPEATABLE}", sampled("stop_token_ids"))
        before = "nothing ends a text before it has so many tokens"
        value("--min-tokens", "N", before, sampled("min_tokens"), usual.min_tokens)
        group.truth("--ignore-eos", text="go on to --gen-len behind the end of the text")
        return group


@dataclass(frozen=True)
class Group:
    """Flags under one heading. Of each: its name, what stands for its value in the help, and what it means."""

    add: Callable[..., argparse.Action]

    def value(self, flag: str, metavar: str, text: str, kind: Kind = None, default: object = None, **how: object) -> None:
        self.add(flag, type=kind, default=default, metavar=metavar, help=text, **how)

    def values(self, flag: str, metavar: str, text: str, kind: Kind = None) -> None:
        """A flag that may be given several times."""
        self.value(flag, metavar, text, kind, [], action="append")

    def choice(self, flag: str, choices: Iterable[str], text: str, default: str | None = None) -> None:
        self.add(flag, default=default, choices=tuple(choices), help=text)

    def truth(self, *flags: str, text: str) -> None:
        """A flag without a value."""
        self.add(*flags, action="store_true", help=text)

    def switch(self, flag: str, default: bool, text: str) -> None:
        """A flag with a value of 0 or 1; without one it is on."""
        self.value(flag, "0|1", text, _switch, default, nargs="?", const=True)

    def verbose(self, text: str) -> None:
        """Adds --verbose; without a level it means more than usual."""
        self.value("--verbose", "LEVEL", text, whole(0, TRACEBACK), 1, nargs="?", const=TRACEBACK - 1)


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


# -- flags of several groups ---------------------------------------------------------------------------------------------


def add_threads(group: Group) -> None:
    text = "that compute on the CPU; with others sums may differ in their last bits (default: one for each core that is free)"
    group.value("--threads", "N", text, threads)


def add_device(group: Group) -> None:
    devices = f"auto, {' or '.join(DEVICES)}, or one of several with its number, like {DEVICES[-1]}:1"
    group.value("--device", "NAME", devices, default=AUTO)


def add_gpus(group: Group) -> None:
    """Adds by how many processes the work is done."""
    shared = "a process with each of N GPUs, from the first on; rows are dealt to them, and all share the weights in CPU memory"
    group.value("--gpus", "N", f"{shared}; a plan, --gpu-mem and --threads are those of each", whole(1, MOST_GPUS), 1)


def add_pipeline(group: Group) -> None:
    """Adds how many devices compute the layers of one model."""
    ranges = "N GPUs, from the first on, each compute a range of the layers, while others compute theirs for other batches"
    group.value("--pipeline", "N", f"{ranges}; --gpu-mem is that of each", whole(1, MOST_GPUS), Plan.pipeline)


class Percent(argparse.Action):
    """Takes six numbers. `const`: whether the word AUTO asks for a plan search, and if not, what to do instead of AUTO."""

    const: tuple[bool, str]

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: object) -> None:
        given = [str(value) for value in values or ()]
        is_auto, (may_be_found, advice) = given == [AUTO], self.const
        if is_auto and may_be_found:
            setattr(namespace, self.dest, AUTO)
            return
        try:
            shares = [whole_number(value) for value in given]
        except ValueError:
            shares = []
        if len(shares) != 6:
            what = f"six whole numbers{', or ' + AUTO if may_be_found else ''}"
            advised = f"; {advice}" if is_auto and advice else ""
            raise argparse.ArgumentError(self, f"takes {what}; got {shown(' '.join(given))}{advised}")
        setattr(namespace, self.dest, shares)


def add_placement(group: Group, may_be_found: bool = False, instead_of_auto: str = "") -> None:
    """Adds where data lies. `may_be_found`: --percent also takes `auto`, which is then the default. `instead_of_auto` is
    the advice where `auto` is given but not accepted."""
    found = f"; {AUTO}: the plan is found for this machine" if may_be_found else ""
    group.add(
        "--percent",
        action=Percent,
        nargs="+",
        const=(may_be_found, instead_of_auto),
        default=AUTO if may_be_found else [int(share) for share in Plan().percent],
        metavar=("W_GPU", "W_CPU KV_GPU KV_CPU ACT_GPU ACT_CPU"),
        help=f"per cent of weights, KV and activations on GPU and in CPU memory; the rest of each is on disk{found}",
    )
    group.switch("--sep-layer", Plan.sep_layer, "attention and MLP are two layers of the schedule, not one")
    group.switch("--pin-weight", Plan.pin_weight, "weights for a GPU lie in page-locked CPU memory")
    captured = f"where KV and activations stay on a GPU, decode steps are captured and replayed; {ON}: or it is an error"
    group.add(GRAPHS_FLAG, dest="graphs", default=Plan.graphs, choices=GRAPHS, help=captured)
    group.switch("--overlap", True, "0: one slot, nothing overlaps; the tokens are the same")
    beside = "with a GPU: in decode, KV in CPU memory and on disk is attended by the CPU, and does not cross the link"
    group.add("--cpu-cache-compute", "--cpu", dest="attend_on", action="store_const", const=HOST, help=beside)
    at_once = "tokens of prompts computed at once: more take more memory; longer prompts are computed in pieces"
    group.value("--prefill-tokens", "N", at_once, TOKENS, Plan.prefill_tokens)
    packed = "matrices, embedding and head too, take 4 bits a value (or 8); packed once, into a cache (default: as they are)"
    kept = "keys and values take 4 bits (or 8), head by head (default: as they are)"
    for flag, option, text in (("--compress-weight", "weight_codec", packed), ("--compress-cache", "kv_codec", kept)):
        kinds = "|".join(map(str, BY_BITS))
        group.value(flag, kinds, text, _codec, argparse.SUPPRESS, dest=option, nargs="?", const="4")
    under_way = f"layers that may have weights under way or in use at once (default: {Plan.slots}; a search tries more)"
    group.value("--slots", "N", under_way, whole(1, MOST_SLOTS))


def add_compute(group: Group) -> None:
    """Adds how weights are multiplied."""
    rounded = (
        f"{INT8}: packed weights are multiplied with activations rounded to 8 bits, which is faster; on a CPU logits of a row "
        "do not depend on the rows beside it"
    )
    group.choice("--compute", PRODUCTS, f"{EXACT}: activations are multiplied as they are; {rounded}", Plan.compute)


def add_sizes(group: Group, found: str = "") -> None:
    """Adds the sizes of a block and the order of its work. `found` says where sizes that are not given are found."""
    otherwise = f"; found {found}" if found else ""
    rows = f"sequences computed at once (default: {Plan.gpu_batch_size}{otherwise})"
    group.value("--gpu-batch-size", "ROWS", rows, whole(1, MOST_PROMPTS))
    batches = f"batches that share a pass over the weights (default: {Plan.num_gpu_batches}{otherwise})"
    group.value("--num-gpu-batches", "N", batches, whole(1, MOST_BATCHES))
    orders = f"order of the work: {', '.join(SCHEDULES)}; all but the first are there for comparison"
    group.value("--schedule", "NAME", orders, default=Plan.schedule)


def add_sharing(group: Group) -> None:
    """Adds what becomes of prefixes that requests share."""
    group.switch("--shared-prefixes", Plan.shared_prefixes, "what requests begin with alike is computed and kept once")
    add_prefix_policy(group)


def add_prefix_policy(group: Group) -> None:
    pinned = f"{PINNED}: it is never evicted, and a budget is that of the tokens behind it"
    judged = f"{JUDGED}: it is evicted as if it were not shared"
    group.choice("--prefix-policy", PREFIX_POLICIES, f"of shared prefixes; {pinned}; {judged}", Plan.prefix_policy)


def add_head_budgets(group: Group) -> None:
    """Adds by which budgets heads differ."""
    by_head = f"KV heads share out the budget as this file of `calibrate` says; {OWN}: the file beside the model"
    group.value("--head-budgets", f"FILE|{OWN}", f"{by_head} (default: all keep as much)")


def add_probe(group: Group) -> None:
    """Adds what a policy ranks tokens by that asks for a probe."""
    text = f"{KVzap.name}: what a token is worth is said by this file of `calibrate --probe`; {OWN}: the file beside the model"
    group.value("--probe", f"FILE|{OWN}", text)


def add_protection(group: Group) -> None:
    """Adds what may be asked of a policy beside its budget: the options in BESIDE_BUDGET."""
    group.truth("--hh-prompt-only", text="only the prompt is selected from; all that is generated is kept")
    with_sinks = ", ".join(policy.name for policy in POLICIES.values() if policy.usual_sinks)
    group.truth("--value-norms", text="scores are weighed with how long a token's value is")
    group.value("--sinks", "N", f"the first N tokens are never evicted ({with_sinks}: {SINKS} unless given)", SLOTS)
    decay = "multiply the scores so far by D before each step adds to them (default: 1, plain sums)"
    group.value("--score-decay", "D", decay, SHARE)
    group.value("--grace", "N", "never evict the newest N, also where --recent is less; has no slots of its own", SLOTS)
    rolling = "of keys; true: those in the text (default); rolling: their order in the cache, for texts without end"
    group.choice("--positions", POSITIONS, rolling)
