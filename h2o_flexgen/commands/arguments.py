"""The arguments of the main command: FlexGen's flags with FlexGen's meaning, and ours. Parsing them imports no torch.

A default that has a meaning in Python too is read from where it is written there: Plan and SamplingParams.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from typing import NoReturn

from h2o_flexgen.commands.made_up import DEFAULT_TOKENS
from h2o_flexgen.kv.h2o import H2O
from h2o_flexgen.kv.options import DEFAULT_KEPT, POSITIONS, KVOptions
from h2o_flexgen.kv.policies import POLICIES
from h2o_flexgen.kv.streaming import SINKS
from h2o_flexgen.planning.hints import did_you_mean
from h2o_flexgen.planning.machine import DEVICES
from h2o_flexgen.planning.model_spec import DTYPE_BYTES
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.schedule import SCHEDULES
from h2o_flexgen.runtime.sampling_params import SamplingParams

PROGRAM = "python -m h2o_flexgen.run"
DUMMY_PATH = "_DUMMY_"
FEWER_BATCH, BREAKDOWN = "fewer_batch", "breakdown"
AUTO_LOG = "auto"
TRUE, FALSE = ("1", "true", "t", "yes", "y", "on"), ("0", "false", "f", "no", "n", "off")
TRACEBACK = 3  # the level of --verbose that shows where an error comes from
PLAN_OPTIONS = ("gpu_batch_size", "num_gpu_batches", "slots", "sep_layer", "pin_weight", "schedule")
KV_OPTIONS = tuple(field.name for field in fields(KVOptions))
REPEATABLE = "may be given several times"

# without --model: small enough for any machine, and with a share on every tier
DEMO = {
    "demo": True,
    "model": "facebook/opt-125m",
    "dummy_weights": True,
    "prompt_len": 64,
    "gen_len": 16,
    "num_gpu_batches": 2,
    "percent": [20, 30, 20, 30, 100, 0],
}

DESCRIPTION = """\
Generate text with a model that is larger than the GPU, or than the memory; measure how fast it goes.
Without --model: a small OPT with random weights, nothing is downloaded."""

EPILOG = f"""\
To begin with, --model, --prompt and --percent are enough; --dry-run shows what a plan needs before anything is loaded:

  {PROGRAM} --model facebook/opt-1.3b --percent 0 50 0 100 100 0 --dry-run
  {PROGRAM} --model facebook/opt-1.3b --percent 0 50 0 100 100 0 --prompt "The ferry left the harbour"
"""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """A beginning of a flag is enough, as published FlexGen commands have it (`--cpu`, `--debug`). `plan` is added: the plan
    that the flags ask for."""
    parser = _parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.refuse_unknown(unknown)
    if args.model is None and args.path in (None, DUMMY_PATH):
        parser.set_defaults(**DEMO)
        args = parser.parse_args(argv)
    _refuse(args)
    args.plan = _plan(args)
    if args.cut_gen_len is not None and not args.plan.policy.keeps_all and args.plan.kept.is_share_of_text:
        raise ValueError(
            f"--cut-gen-len {args.cut_gen_len} would cut the budget of {args.plan.kv_policy} as well, which is a share of "
            "prompt and generation; give it as --hh-ratio, or as --heavy and --recent"
        )
    return args


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; --help is there for whoever wants the rest."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {' '.join(message.split())}\n")

    def refuse_unknown(self, unknown: Sequence[str]) -> NoReturn:
        flag = next((word.partition("=")[0] for word in unknown if word.startswith("-")), None)
        if flag is None:
            self.error(f"{unknown[0]!r} belongs to no flag; a model is given with --model, a text with spaces in quotes")
        hint = did_you_mean(flag, self._option_string_actions) or "; --help names those that there are"
        self.error(f"unknown flag {flag}{hint}")


class _Help(argparse.RawDescriptionHelpFormatter):
    """Shows a default as it would be typed, where there is one."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if default is None or default is argparse.SUPPRESS or default == [] or action.nargs == 0:
            return text
        return f"{text} (default: {_typed(default)})"


def _typed(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(_typed, value))
    return str(int(value)) if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _parser() -> _Parser:
    parser = _Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [--model NAME] [--prompt TEXT] [--percent W W KV KV A A] [options]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=_Help,
    )
    parser.set_defaults(demo=False)
    _add_model(parser)
    _add_prompts(parser)
    _add_plan(parser)
    _add_kv(parser)
    _add_sampling(parser)
    _add_output(parser)
    _add_later(parser)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    add("--model", metavar="NAME", help="hub name (facebook/opt-30b) or local folder of a checkpoint")
    add("--path", metavar="FOLDER", help=f"folder that has the checkpoint, or {DUMMY_PATH} for random weights, as in FlexGen")
    add("--dummy-weights", action="store_true", help="random weights in the model's shapes: for speed, nothing is downloaded")
    dtypes = ("auto", *DTYPE_BYTES)
    add("--dtype", default="auto", choices=dtypes, help="what is computed with; auto: the fast type of the device")
    devices = f"auto, {' or '.join(DEVICES)}, or one of several with its number, like {DEVICES[-1]}:1"
    add("--device", default="auto", metavar="NAME", help=devices)
    add("--gpu-mem", metavar="SIZE", help="no more than this is held on the GPU, like 16GB or 14.9GiB (default: what is free)")
    held = "no more than this is held in CPU memory by the whole process (default: what is free)"
    add("--cpu-mem", metavar="SIZE", help=held)
    left = "where KV, activations and random weights go on disk; left as it was found (default: below ~/.cache/h2o_flexgen)"
    add("--offload-dir", metavar="FOLDER", help=left)


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("prompts").add_argument
    add("--prompt", action="append", metavar="TEXT", help=f"a text to continue; {REPEATABLE}")
    add("--prompt-file", metavar="FILE", help='a prompt per line, or (.jsonl) a {"prompt": ...} per line')
    add("--num-prompts", type=int, metavar="N", help="how many made-up prompts (default: one block); of given ones the first N")
    add("--prompt-len", type=int, metavar="TOKENS", help=f"of made-up prompts (default: {DEFAULT_TOKENS})")
    add("--gen-len", type=int, default=SamplingParams.max_tokens, metavar="TOKENS", help="generated for each prompt, at most")
    add("--cut-gen-len", type=int, metavar="TOKENS", help="run only so many and project the time of the rest")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("plan")
    add = group.add_argument
    add(
        "--percent",
        type=int,
        nargs=6,
        default=[int(share) for share in Plan().percent],
        metavar=("W_GPU", "W_CPU", "KV_GPU", "KV_CPU", "ACT_GPU", "ACT_CPU"),
        help="per cent of weights, KV and activations on GPU and in CPU memory; the rest of each is on disk",
    )
    batches = "batches that share a pass over the weights"
    add("--gpu-batch-size", type=int, default=Plan.gpu_batch_size, metavar="ROWS", help="sequences computed at once")
    add("--num-gpu-batches", type=int, default=Plan.num_gpu_batches, metavar="N", help=batches)
    _add_switch(group, "--sep-layer", Plan.sep_layer, "attention and MLP are two layers of the schedule, not one")
    _add_switch(group, "--pin-weight", Plan.pin_weight, "weights for a GPU lie in page-locked CPU memory")
    _add_switch(group, "--overlap", True, "0: one slot, nothing overlaps; the tokens are the same")
    slots = "layers whose weights may be under way or in use at once"
    add("--slots", type=int, default=Plan.slots, metavar="N", help=slots)
    orders = f"order of the work: {', '.join(SCHEDULES)}; all but the first are there for comparison"
    add("--schedule", default=Plan.schedule, metavar="NAME", help=orders)
    add("--dry-run", action="store_true", help="print the plan and its bytes per tier; nothing is loaded or written")


def _add_kv(parser: argparse.ArgumentParser) -> None:
    text = f"how much of it is kept, and what; without a budget {100 * DEFAULT_KEPT:g} per cent of prompt and generation"
    add = parser.add_argument_group("KV cache", text).add_argument
    names = f"{', '.join(POLICIES)} (default: {Plan.kv_policy}, or {H2O.name} where any option of this group is given)"
    add("--kv-policy", metavar="NAME", help=names)
    add(
        "--hh-ratio",
        type=float,
        metavar="R",
        help="keep R of each prompt's length as heavy hitters and as much as recent tokens",
    )
    add("--kv-budget", type=float, metavar="F", help="keep this share of prompt and generation, half heavy, half recent")
    add("--heavy", type=int, metavar="SLOTS", help="heavy hitters kept, in slots per sequence and head")
    add("--recent", type=int, metavar="SLOTS", help="newest tokens kept")
    add("--hh-all", action="store_true", help="generated tokens are evicted as well: what happens anyway")
    add("--hh-prompt-only", action="store_true", help="only the prompt is selected from; all that is generated is kept")
    add("--sinks", type=int, metavar="N", help=f"the first N tokens are never evicted (streaming: {SINKS} unless given)")
    add("--score-decay", type=float, metavar="D", help="multiplies all scores at each step; 1: plain sums")
    add("--grace", type=int, metavar="N", help="the newest N tokens are never evicted")
    rolling = "true: keys keep those of the text; rolling: by their order in the cache, for texts beyond the model's length"
    add("--positions", choices=POSITIONS, help=rolling)


def _add_switch(group: argparse._ArgumentGroup, flag: str, default: bool, text: str) -> None:
    group.add_argument(flag, type=_switch, nargs="?", const=True, default=default, metavar="0|1", help=text)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("sampling").add_argument
    add("--temperature", type=float, default=SamplingParams.temperature, metavar="T", help="0: greedy, the likeliest token")
    add("--top-k", type=int, default=SamplingParams.top_k, metavar="K", help="only the K likeliest tokens; 0: all")
    add("--top-p", type=float, default=SamplingParams.top_p, metavar="P", help="only the fewest that hold this share; 1: all")
    floor = "only tokens at least P times as likely as the likeliest; 0: all"
    add("--min-p", type=float, default=SamplingParams.min_p, metavar="P", help=floor)
    penalty = "above 1 discourages tokens that were there before; 1: off"
    add("--repetition-penalty", type=float, default=SamplingParams.repetition_penalty, metavar="R", help=penalty)
    add("--seed", type=int, metavar="N", help="repeats a run with a temperature (default: another one each time)")
    add("--stop", action="append", default=[], metavar="TEXT", help=f"a text ends before this; {REPEATABLE}")
    add("--stop-token-id", action="append", type=int, default=[], metavar="ID", help=f"ends a text; {REPEATABLE}")
    add("--ignore-eos", action="store_true", help="go on to --gen-len behind the end of the text")
    add("--logprobs", type=int, nargs="?", const=0, metavar="N", help="show those of each token, and of the N likeliest")


def _add_output(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("output").add_argument
    levels = f"0: no texts; 1: the first texts; 2: all texts and the timeline; {TRACEBACK}: where errors come from"
    add("--verbose", type=int, nargs="?", const=2, default=1, metavar="LEVEL", help=levels)
    add("--trace", metavar="FILE", help="the last block, task by task, for ui.perfetto.dev or chrome://tracing")
    log = "append the summary here (no FILE: a name made of the plan)"
    add("--log-file", nargs="?", const=AUTO_LOG, metavar="FILE", help=log)
    add("--no-log", action="store_true", help="write no log, whatever --log-file says")
    modes = f"{FEWER_BATCH}: 20 layers of the first decode step, then project; {BREAKDOWN}: no overlap, seconds per operation"
    add("--debug-mode", choices=(FEWER_BATCH, BREAKDOWN), help=modes)


def _add_later(parser: argparse.ArgumentParser) -> None:
    """Flags of published FlexGen commands for what this version cannot do: known, so that they can be refused by name."""
    names = "--compress-weight, --compress-cache, --cpu-cache-compute, --attn-sparsity below 1"
    add = parser.add_argument_group("FlexGen's flags that this version refuses when they are on", names).add_argument
    add("--compress-weight", action="store_true", help=argparse.SUPPRESS)
    add("--compress-cache", action="store_true", help=argparse.SUPPRESS)
    add("--cpu-cache-compute", "--cpu", action="store_true", help=argparse.SUPPRESS)
    add("--attn-sparsity", type=float, default=1.0, help=argparse.SUPPRESS)


def _switch(text: str) -> bool:
    if text.lower() not in (*TRUE, *FALSE):
        raise argparse.ArgumentTypeError(f"{text!r} is neither 0 nor 1")
    return text.lower() in TRUE


def _plan(args: argparse.Namespace) -> Plan:
    asked = {name: getattr(args, name) for name in (*PLAN_OPTIONS, *KV_OPTIONS)}
    plan = Plan.create(**asked, kv_policy=_policy_name(args)).with_percent(args.percent)
    if plan.has_own_slots and args.slots != Plan.slots:
        raise ValueError(f"--slots {args.slots} changes nothing: schedule {plan.schedule} has slots of its own; leave it out")
    return plan if args.overlap and args.debug_mode != BREAKDOWN else plan.without_overlap()


def _policy_name(args: argparse.Namespace) -> str:
    """Published commands of H2O say no more than --hh-ratio 0.1 --hh-all."""
    if args.kv_policy is not None:
        return str(args.kv_policy)
    given = args.hh_all or any(getattr(args, field.name) is not field.default for field in fields(KVOptions))
    return H2O.name if given else Plan.kv_policy


def _refuse(args: argparse.Namespace) -> None:
    switched_on = {
        "--compress-weight": args.compress_weight,
        "--compress-cache": args.compress_cache,
        "--cpu-cache-compute": args.cpu_cache_compute,
        "--attn-sparsity": args.attn_sparsity != 1.0,
    }
    if found := [flag for flag, is_on in switched_on.items() if is_on]:
        raise ValueError(f"{found[0]} is not supported by this version; leave it out")
    if args.hh_all and args.hh_prompt_only:
        raise ValueError("--hh-all evicts generated tokens and --hh-prompt-only keeps them; give one of them")
    if args.cut_gen_len is not None and args.cut_gen_len < 2:
        raise ValueError(f"--cut-gen-len is {args.cut_gen_len}; give 2 or more: a decode step must be measured to be projected")
    if args.cut_gen_len is not None and args.debug_mode == FEWER_BATCH:
        raise ValueError(f"--cut-gen-len and --debug-mode {FEWER_BATCH} both cut the run short; give one of them")
    if args.debug_mode == FEWER_BATCH and args.schedule == "row_by_row":
        raise ValueError(
            f"--debug-mode {FEWER_BATCH} needs all batches in one decode step; row_by_row has none: use --cut-gen-len"
        )
