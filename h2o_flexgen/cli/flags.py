"""Flags, made of tables of options and of the few words that each command adds; and the parser. Nothing here imports torch.

A flag of an option has its bounds, default, help and names from the table. Any other flag has its bounds from the same kinds.
"""

from __future__ import annotations

import argparse
from argparse import ArgumentTypeError
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

from h2o_flexgen.cli.errors import TRACEBACK
from h2o_flexgen.core.allowed_values import AUTO, TRUTH, Allowed, Bounds, Choice
from h2o_flexgen.core.hints import nearest, shortened, shown
from h2o_flexgen.core.option import Option, options_of
from h2o_flexgen.formats.kernel_table import INT8
from h2o_flexgen.planning.plan import Plan, six_numbers
from h2o_flexgen.planning.plan_requirements import PlanRequirements
from h2o_flexgen.policies import POLICIES
from h2o_flexgen.policies.kv_options import BESIDE_BUDGET, DEFAULT_KEPT, KVOptions
from h2o_flexgen.policies.policy import SINKS
from h2o_flexgen.policies.recall import RECALLED
from h2o_flexgen.sampling.params import SAMPLING
from h2o_flexgen.session.open_request import ModelRequest, SiteRequest

DUMMY_PATH = "_DUMMY_"
# the model that gives random weights their shapes, if none is named
NOISE: Mapping[str, object] = {"model": "facebook/opt-125m", "dummy_weights": True}
REPEATABLE = "may be given several times"
HELP, HELP_ALL = "--help", "--help-all"
FIRST_OF_PLANS = "--percent", "--gpu-mem", "--cpu-mem", "--kv-policy", "--kv-budget"  # in the short help
REQUIRED = "the following arguments are required: "
PLAN, KV = options_of(Plan), options_of(KVOptions)
MODEL, SITE = options_of(ModelRequest), options_of(SiteRequest)
OF_ALL_TEXTS = (
    "a LoRA or rsLoRA of PEFT (a folder) that all texts have beside the model's own weights, of which nothing is copied; for a "
    "model in a GGUF file, a LoRA in another one"
)  # what MODEL["lora_modules"] means where no request names one
OF_PREFIXES = ("prefix_dir", "prefix_dir_size")  # of the site, for commands that share prefixes


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


class ShortHelp(argparse.Action):
    """--help, of a command with too many flags for a screen."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        assert isinstance(parser, Parser)
        print(parser.format_short_help(), end="")
        parser.exit()


class UnknownFlag(ValueError):
    """A flag that a command lacks. The hint is what stands for it there, or else which commands have it and what is near.
    `all_flags`: the flag that names all that there are."""

    def __init__(self, flag: str, instead: str, near: str | None, all_flags: str = HELP) -> None:
        self.flag, self._instead, self._near, self._all_flags = flag, instead, near, all_flags
        super().__init__(self.line(()))

    def line(self, commands: Sequence[str]) -> str:
        """The error for a person. `commands` have the flag."""
        theirs = f"it is a flag of {', '.join(commands)}" if commands else ""
        meant = "" if self._near is None else f"did you mean {self._near}?"
        hint = self._instead or "; ".join(filter(None, (theirs, meant)))
        return f"unknown flag {self.flag}; {hint or f'{self._all_flags} names those that there are'}"


class Parser(argparse.ArgumentParser):
    """A parser that says what is wrong in one line; --help has the rest. Where there are many flags, that is for the first ones
    that are needed, and --help-all has the rest."""

    def __init__(
        self,
        program: str,
        description: str,
        usage: str | None = None,
        epilog: str | None = None,
        instead: Mapping[str, str] = MappingProxyType({}),
        first: Sequence[str] = (),
    ) -> None:
        """`instead`: what to do instead, by each flag that this command lacks. `first`: the flags that are needed first, if
        there are too many for one help."""
        super().__init__(program, usage, description, epilog, formatter_class=Help, add_help=not first)
        self._instead, self._first = instead, first
        if first:
            self.add_argument("-h", HELP, action=ShortHelp, nargs=0, default=argparse.SUPPRESS, help="the flags to begin with")
            self.add_argument(HELP_ALL, action="help", default=argparse.SUPPRESS, help="all flags, by group")
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
        told = " ".join(message.split())
        if told.startswith(REQUIRED):  # as argparse has it, which does not say what to do
            missing = told.removeprefix(REQUIRED).split(", ")
            told = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing; give as in: {self.usage}"
        self.exit(2, f"error: {shortened(told)}\n")

    def _refuse_unknown(self, unknown: Sequence[str]) -> NoReturn:
        flag = next((word.partition("=")[0] for word in unknown if word.startswith("-")), None)
        if flag is None:
            self.error(f"{unknown[0]!r} belongs to no flag; a model is given with --model, a text with spaces in quotes")
        raise UnknownFlag(flag, self._instead_of(flag), self._nearest(flag), HELP_ALL if self._first else HELP)

    def format_short_help(self) -> str:
        """The flags that are needed first, in their order, and how to see the others."""
        parts = self._get_formatter()
        parts.add_usage(self.usage, (), ())
        parts.add_text(self.description)
        parts.start_section("the flags to begin with")
        parts.add_arguments([self._option_string_actions[flag] for flag in self._first])
        parts.end_section()
        shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
        parts.add_text(f"{HELP_ALL} tells of all {len(shown)} flags.\n\n{self.epilog or ''}")
        return parts.format_help()

    def _instead_of(self, flag: str) -> str:
        """What to do instead of giving the flag, or what it is called here."""
        called = self._flag_called(flag)
        return self._instead.get(flag) or (f"it is called {called}" if called else "")

    def _nearest(self, flag: str) -> str | None:
        """The nearest flag. Dashes do not count as similarity."""
        names = {name.lstrip("-"): name for name in self.flags}
        near = nearest(flag.lstrip("-"), names)
        return None if near is None else names[near]

    def _flag_called(self, flag: str) -> str | None:
        """The flag of the option that has this name in Python, or in another library."""
        name = flag.lstrip("-").replace("-", "_")
        options = (one for table in (SAMPLING, PLAN, KV, MODEL, SITE) for one in table.values())
        found = (one.flag for one in options if name == one.name or name in one.elsewhere)
        return next((called for called in found if called in self.flags), None)

    @property
    def flags(self) -> Collection[str]:
        return self._option_string_actions.keys()

    def group(self, title: str | None = None, text: str | None = None) -> Group:
        """Flags under a title; without one, those that belong to no group."""
        return Group((self.add_argument_group(title, text) if title else self).add_argument)

    # -- groups that commands share --------------------------------------------------------------------------------------

    def add_model(self, takes_lora: bool = False) -> None:
        """Adds what is said of the model. `takes_lora`: all texts may have an adapter beside the weights."""
        group = self.group("model")
        named = "hub name (facebook/opt-30b), local folder of a checkpoint, GGUF file, smollm2, or demo: the one of the package"
        group.value("--model", "NAME", named)
        folder = f"folder that has the checkpoint, or {DUMMY_PATH} for random weights, as in FlexGen"
        group.value("--path", "FOLDER", folder)
        of_site = (SITE[name] for name in SITE if name not in ("gpus", *OF_PREFIXES))
        for one in (*(MODEL[name] for name in ("adapter", "dummy_weights", "dtype")), *of_site):
            group.option(one)
        if takes_lora:
            group.option(MODEL["lora_modules"], OF_ALL_TEXTS)

    def add_tokenizer(self) -> None:
        """Adds --tokenizer, for commands that read and write texts."""
        self.group("texts").option(MODEL["tokenizer"])

    def add_search(self, title: str, machine: str) -> Group:
        """Adds what is asked of a plan to be found. `machine` says what else the machine is for."""
        group = self.group(title)
        named = f"a YAML file, or the name of a machine of the package; {machine}"
        group.value("--machine", "NAME", f"{named} (default: this one, as its profile was kept, or measured now)")
        bits = "4 bits may be taken for weights, for KV or for both, where that is faster; it changes what the model says"
        group.truth("--allow-4bit", text=bits)
        rounded = f"products of {INT8} may be taken for packed weights, where that is faster; it changes what the model says"
        group.truth("--allow-int8", text=rounded)
        read = (
            f"decode steps may attend {RECALLED:g} of what is kept, where that is faster; it changes what the model says; with "
            "KV on disk --kv-recall-reuse is tried as well, which does not, but --kv-recall-together is not: it changes more"
        )
        group.truth("--allow-recall", text=read)
        for one in options_of(PlanRequirements).values():
            group.option(one)
        return group

    def add_kv(self) -> None:
        share = f"{100 * DEFAULT_KEPT:g} per cent of prompt and generation (in a chat: of --context-len)"
        text = f"what of it is kept; any policy but {Plan.kv_policy} keeps {share} unless told otherwise"
        group = self.group("KV cache", text)
        group.option(PLAN["kv_policy"], is_open=True)
        for one in (KV[name] for name in KV if name not in BESIDE_BUDGET):
            group.option(one)
        group.option(PLAN["head_budgets"])
        group.option(PLAN["probe"])
        group.truth("--hh-all", text="evict generated tokens too: the default, named as in H2O's commands")
        add_protection(group)

    def add_sampling(self, without: Collection[str] = ()) -> Group:
        group = self.group("sampling")
        for name, one in SAMPLING.items():
            if one.text and name not in without:
                group.option(one)
        return group


@dataclass(frozen=True)
class Group:
    """Flags under one heading. Of each: its name, what stands for its value in the help, and what it means."""

    add: Callable[..., argparse.Action]

    def option(self, one: Option, text: str = "", is_open: bool = False) -> None:
        """The flag of an option. `is_open`: it is None unless it is given, and `text` says what is taken then. A `text` also
        says how often it may be given."""
        how: dict[str, object] = {"dest": one.name, "help": text or one.text, "default": None if is_open else one.default}
        if one.metavar:
            how |= {"type": typed(one.allowed), "metavar": one.metavar}
            how |= {} if one.bare is None else {"nargs": "?", "const": one.bare}
        elif one.bare is not None:
            how |= {"action": "store_const", "const": one.bare}
        elif isinstance(one.allowed, Choice):
            how["choices"] = tuple(one.allowed.names)
        if one.is_repeated:
            how |= {"action": "append", "default": [], "help": text or f"{one.text}; {REPEATABLE}"}
        self.add(*one.all_flags, **how)

    def value(
        self, flag: str, metavar: str, text: str, allowed: Allowed | None = None, default: object = None, **how: object
    ) -> None:
        kind = None if allowed is None else typed(allowed)
        self.add(flag, type=kind, default=default, metavar=metavar, help=text, **how)

    def choice(self, flag: str, choices: Iterable[str], text: str, default: str | None = None) -> None:
        self.add(flag, default=default, choices=tuple(choices), help=text)

    def truth(self, *flags: str, text: str) -> None:
        """A flag without a value."""
        self.add(*flags, action="store_true", help=text)

    def switch(self, flag: str, default: bool, text: str) -> None:
        """A flag with a value of 0 or 1; without one it is on."""
        self.value(flag, "0|1", text, TRUTH, default, nargs="?", const=True)

    def verbose(self, text: str) -> None:
        """Adds --verbose; without a level it means more than usual."""
        self.value("--verbose", "LEVEL", text, Bounds(0, TRACEBACK), 1, nargs="?", const=TRACEBACK - 1)


class Help(argparse.RawDescriptionHelpFormatter):
    """Shows a default as it would be typed, if there is one, and six names for six numbers."""

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        return SIX if isinstance(action, Percent) else super()._format_args(action, default_metavar)

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if default in (None, argparse.SUPPRESS, [], "") or action.nargs == 0:
            return text
        return f"{text} (default: {_shown(default)})"


def _shown(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(_shown, value))
    return str(int(value)) if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def typed(allowed: Allowed) -> Callable[[str], object] | None:
    """The type of a flag; None: a word is taken as it is written."""
    if type(allowed).typed is Allowed.typed:
        return None

    def read(word: str) -> object:
        try:
            return allowed.typed(word)
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from error

    return read


# -- flags of several groups ---------------------------------------------------------------------------------------------


SIX = "W_GPU W_CPU KV_GPU KV_CPU ACT_GPU ACT_CPU"


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
            setattr(namespace, self.dest, six_numbers(given))
        except ValueError:
            what = f"six numbers{', or ' + AUTO if may_be_found else ''}"
            advised = f"; {advice}" if is_auto and advice else ""
            raise argparse.ArgumentError(self, f"takes {what}; got {shown(' '.join(given))}{advised}") from None


def add_placement(group: Group, may_be_found: bool = False, instead_of_auto: str = "") -> None:
    """Adds where data lies. `may_be_found`: --percent also takes `auto`, which is then the default. `instead_of_auto` is
    the advice where `auto` is given but not accepted."""
    without = f"; {AUTO} is not taken: {instead_of_auto}" if instead_of_auto else ""
    found = f"; or {AUTO}: the plan is found for this machine" if may_be_found else without
    group.add(
        "--percent",
        action=Percent,
        nargs="+",
        const=(may_be_found, instead_of_auto),
        default=AUTO if may_be_found else [int(share) for share in Plan().percent],
        metavar=SIX,
        help=f"six numbers: per cent of weights, KV and activations on GPU and in CPU memory; the rest is on disk{found}",
    )
    for name in ("state", "sep_layer", "pin_weight", "graphs", "draft"):
        group.option(PLAN[name])
    group.switch("--overlap", True, "0: one buffer, nothing overlaps; the tokens are the same")
    group.option(PLAN["attend_on"], is_open=True)
    group.option(PLAN["prefill_tokens"])
    for name in ("weight_codec", "kv_codec"):
        group.option(PLAN[name], is_open=True)
    group.option(PLAN["state_dtype"])
    buffers = PLAN["buffers"]
    group.option(buffers, f"{buffers.text} (default: {buffers.default}; a search tries more)", is_open=True)


def add_sizes(group: Group, found: str = "") -> None:
    """Adds the sizes of a block and the order of its work. `found` says where sizes that are not given are found."""
    otherwise = f"; found {found}" if found else ""
    for one in (PLAN["gpu_batch_size"], PLAN["num_gpu_batches"]):
        group.option(one, f"{one.text} (default: {one.default}{otherwise})", is_open=True)
    group.option(PLAN["schedule"])


def add_prefix_folder(group: Group) -> None:
    """Adds where prefixes that requests share outlive the process."""
    for name in OF_PREFIXES:
        group.option(SITE[name])


def add_protection(group: Group) -> None:
    """Adds what may be asked of a policy beside its budget."""
    with_sinks = ", ".join(policy.name for policy in POLICIES.values() if policy.usual_sinks)
    for name in BESIDE_BUDGET:
        group.option(KV[name], f"{KV[name].text} ({with_sinks}: {SINKS} unless given)" if name == "sinks" else "")
