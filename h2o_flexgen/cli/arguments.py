"""The arguments of the main command: FlexGen's flags with FlexGen's meaning, and ours. Parsing them imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from h2o_flexgen.cli.argument_types import TOKENS, number, whole
from h2o_flexgen.cli.flags import (
    AUTO,
    DUMMY_PATH,
    MOST_IDS,
    REPEATABLE,
    TRACEBACK,
    Help,
    Parser,
    add_kv,
    add_model,
    add_placement,
    add_sampling,
    add_search,
    add_sizes,
    add_tokenizer,
    add_verbose,
    check_search,
    plan_of,
    take_sizes,
)
from h2o_flexgen.cli.made_up import DEFAULT_TOKENS
from h2o_flexgen.core.workload import MOST_PROMPTS
from h2o_flexgen.demo import DEMO
from h2o_flexgen.policies.h2o import H2O
from h2o_flexgen.sampling.params import SamplingParams

PROGRAM = "python -m h2o_flexgen.run"
FEWER_BATCH, BREAKDOWN = "fewer_batch", "breakdown"
AUTO_LOG = "auto"
WHERE_FOUND = f"where --percent is {AUTO}"

SPREAD = {"demo": True, "gpu_batch_size": 2, "num_gpu_batches": 2, "percent": [20, 30, 20, 30, 100, 0]}  # over every tier
# without --model: the one that travels with the package, its heavy hitters kept; or a small OPT where weights are to be random
DEMO_RUN = {**SPREAD, "model": DEMO, "gen_len": 96, "kv_policy": H2O.name, "temperature": 0.7, "top_p": 0.9, "seed": 0}
NOISE_RUN = {**SPREAD, "model": "facebook/opt-125m", "dummy_weights": True, "prompt_len": 64, "gen_len": 16}
DEMO_PROMPTS = (
    "It was a dark and stormy night, and the captain of the ship",
    '"My dear," said the old lady, laying down her knitting, "I must tell you',
    "Alice looked at the door for some time, and then she",
    "The two brothers had not met for many years. When at last",
)

DESCRIPTION = """\
Generate text with a model that is larger than the GPU, or than the memory; measure how fast it goes.
Without --model: a small one that travels with the package, with h2o, 96 tokens and a share of everything on each tier, where
nothing else is asked; nothing is downloaded."""

EPILOG = f"""\
To begin with, --model and --prompt are enough: the machine is measured once, and the plan is found. --dry-run shows what a plan
needs before anything is loaded:

  {PROGRAM} --model facebook/opt-1.3b --prompt-len 64 --gen-len 64 --dry-run
  {PROGRAM} --model facebook/opt-1.3b --percent 0 50 0 100 100 0 --prompt "The ferry left the harbour"
"""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """A beginning of a flag is enough, as published FlexGen commands have it (`--cpu`, `--debug`). Added are `plan`, what the
    flags ask for, and `batch_sizes` and `batches`, of which a search may choose; empty: any."""
    parser = _parser()
    args = parser.parse(argv)
    if args.model is None and args.path in (None, DUMMY_PATH):
        parser.set_defaults(**DEMO_RUN if args.path is None and not args.dummy_weights else NOISE_RUN)
        args = parser.parse_args(argv)
        if args.model == DEMO and (args.prompt, args.prompt_file, args.prompt_len, args.num_prompts) == (None,) * 4:
            args.prompt = list(DEMO_PROMPTS)
    take_sizes(args)
    plan = plan_of(args)
    args.plan = plan.without_overlap() if args.debug_mode == BREAKDOWN else plan
    _refuse(args)
    return args


def _parser() -> Parser:
    parser = Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [--model NAME] [--prompt TEXT] [--percent W W KV KV A A] [options]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=Help,
    )
    parser.set_defaults(demo=False)
    add_model(parser)
    add_tokenizer(parser)
    _add_prompts(parser)
    _add_plan(parser)
    add_search(parser, f"search, {WHERE_FOUND}", "a run with a plan of your own is predicted for it, too")
    add_kv(parser)
    _add_sampling(parser)
    _add_output(parser)
    _add_later(parser)
    return parser


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("prompts").add_argument
    add("--prompt", action="append", metavar="TEXT", help=f"a text to continue; {REPEATABLE}")
    add("--prompt-file", metavar="FILE", help='a prompt per line, or (.jsonl) a {"prompt": ...} per line')
    add(
        "--num-prompts",
        type=whole(1, MOST_PROMPTS),
        metavar="N",
        help="how many made-up prompts (default: one block); of given ones the first N",
    )
    add("--prompt-len", type=TOKENS, metavar="TOKENS", help=f"of made-up prompts (default: {DEFAULT_TOKENS})")
    add(
        "--gen-len", type=TOKENS, default=SamplingParams.max_tokens, metavar="TOKENS", help="generated for each prompt, at most"
    )
    add("--cut-gen-len", type=TOKENS, metavar="TOKENS", help="run only so many and project the time of the rest")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("plan")
    add_placement(group, may_be_found=True)
    add_sizes(group, WHERE_FOUND)
    group.add_argument("--dry-run", action="store_true", help="print the plan and its bytes per tier; no weights are loaded")


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    add = add_sampling(parser).add_argument
    add(
        "--logprobs",
        type=whole(0, MOST_IDS),
        nargs="?",
        const=0,
        metavar="N",
        help="show those of each token, and of the N likeliest",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("output").add_argument
    levels = f"0: no texts; 1: the first texts; 2: all texts and the timeline; {TRACEBACK}: where errors come from"
    records = "a line of JSON per prompt, in order: whole texts, token ids, finish reasons; until the end as FILE.partial"
    add("--output", metavar="FILE", help=records)
    add_verbose(add, levels)
    timeline = "a picture of decode steps, lane by lane, as predicted above those that were run (needs the extra [plot])"
    add("--timeline", metavar="FILE", help=timeline)
    add("--trace", metavar="FILE", help="the last block, task by task, for ui.perfetto.dev or chrome://tracing")
    log = "append the summary here (no FILE: a name made of the plan)"
    add("--log-file", nargs="?", const=AUTO_LOG, metavar="FILE", help=log)
    add("--no-log", action="store_true", help="write no log, whatever --log-file says")
    modes = f"{FEWER_BATCH}: 20 layers of the first decode step, then project; {BREAKDOWN}: no overlap, seconds per operation"
    add("--debug-mode", choices=(FEWER_BATCH, BREAKDOWN), help=modes)


def _add_later(parser: argparse.ArgumentParser) -> None:
    """Flags of published FlexGen commands for what this version cannot do: known, so that they can be refused by name."""
    names = "--cpu-cache-compute, --attn-sparsity below 1"
    add = parser.add_argument_group("FlexGen's flags that this version refuses when they are on", names).add_argument
    add("--cpu-cache-compute", "--cpu", action="store_true", help=argparse.SUPPRESS)
    add("--attn-sparsity", type=number(0, 1), default=1.0, help=argparse.SUPPRESS)


def _refuse(args: argparse.Namespace) -> None:
    switched_on = {
        "--cpu-cache-compute": args.cpu_cache_compute,
        "--attn-sparsity": args.attn_sparsity != 1.0,
    }
    if found := [flag for flag, is_on in switched_on.items() if is_on]:
        raise ValueError(f"{found[0]} is not supported by this version; leave it out")
    check_search(args, args.percent == AUTO, f"say --percent {AUTO}")
    of_runs = (name for name in ("output", "trace", "timeline") if getattr(args, name) is not None)
    if args.dry_run and (flag := next(of_runs, None)):
        raise ValueError(f"--{flag} shows what was run, and --dry-run runs nothing; leave one of them out")
    if args.cut_gen_len is not None and args.cut_gen_len < 2:
        raise ValueError(f"--cut-gen-len is {args.cut_gen_len}; give 2 or more: a decode step must be measured to be projected")
    if args.output is not None and args.debug_mode == FEWER_BATCH:
        raise ValueError(f"--output is for texts, and --debug-mode {FEWER_BATCH} ends before the second token; leave one out")
    if args.cut_gen_len is not None and args.cut_gen_len > args.gen_len:
        cut = f"--cut-gen-len {args.cut_gen_len} cuts nothing: --gen-len has {args.gen_len} tokens generated"
        raise ValueError(f"{cut}; give fewer, or leave it out")
    if args.cut_gen_len is not None and args.debug_mode == FEWER_BATCH:
        raise ValueError(f"--cut-gen-len and --debug-mode {FEWER_BATCH} both cut the run short; give one of them")
    if args.debug_mode == FEWER_BATCH and args.schedule == "row_by_row":
        raise ValueError(
            f"--debug-mode {FEWER_BATCH} needs all batches in one decode step; row_by_row has none: use --cut-gen-len"
        )
    if args.cut_gen_len is not None and not args.plan.policy.keeps_all and args.plan.kv_options.is_share_of_text:
        raise ValueError(
            f"--cut-gen-len {args.cut_gen_len} would cut the budget of {args.plan.kv_policy} as well, which is a share of "
            "prompt and generation; give it as --hh-ratio, or as --heavy and --recent"
        )
