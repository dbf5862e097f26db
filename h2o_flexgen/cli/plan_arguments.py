"""The arguments of the plan command. Parsing them imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from h2o_flexgen.cli.argument_types import TOKENS, memory_size, whole
from h2o_flexgen.cli.flags import (
    DUMMY_PATH,
    TRACEBACK,
    Help,
    Parser,
    add_kv,
    add_model,
    add_placement,
    add_search,
    add_sizes,
    add_verbose,
    check_search,
    plan_of,
    take_sizes,
)
from h2o_flexgen.cli.made_up import DEFAULT_TOKENS
from h2o_flexgen.core.tiers import HOST
from h2o_flexgen.core.workload import MOST_PROMPTS
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.sampling.params import SamplingParams

PROGRAM = "python -m h2o_flexgen.plan"
EPILOG = f"""\
The flags that it prints are those of `python -m h2o_flexgen.run`. Without --machine it plans for this one:

  {PROGRAM} --model facebook/opt-6.7b --prompt-len 512 --gen-len 32 --cpu-mem 8GB
  {PROGRAM} --model facebook/opt-6.7b --cpu-mem 8GB --evaluate --percent 0 10 0 50 0 100 --gpu-batch-size 4
"""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Added are `plan`, what the flags ask for, and `batch_sizes` and `batches`, of which a search may choose; empty: any."""
    parser = _parser()
    args = parser.parse(argv)
    if args.model is None and args.path in (None, DUMMY_PATH):
        parser.error("the model to plan for is missing; give --model with a hub name or a local folder")
    _refuse(args)
    take_sizes(args)
    args.percent = args.percent or list(Plan().percent)
    plan = plan_of(args)
    args.plan = replace(plan, attend_on=HOST) if args.cpu_cache_compute else plan
    return args


def _parser() -> Parser:
    parser = Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} --model NAME [--machine NAME] [--prompt-len P] [--gen-len G] [options]",
        description="Find the plan that generates fastest within the memory of a machine, say why, and predict its seconds.",
        epilog=EPILOG,
        formatter_class=Help,
    )
    add_model(parser)
    _add_workload(parser)
    _add_plan(parser)
    _add_search(parser)
    add_kv(parser)
    _add_output(parser)
    return parser


def _add_workload(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("work").add_argument
    add(
        "--num-prompts",
        type=whole(1, MOST_PROMPTS),
        metavar="N",
        help="how many there are (default: as many as make one block)",
    )
    add("--prompt-len", type=TOKENS, default=DEFAULT_TOKENS, metavar="TOKENS", help="of each prompt")
    add("--gen-len", type=TOKENS, default=SamplingParams.max_tokens, metavar="TOKENS", help="generated for each prompt")


def _add_plan(parser: Parser) -> None:
    group = parser.add_argument_group("plan", "what is named is kept, and the rest of sizes and shares is searched")
    add_placement(group)
    parser.set_defaults(percent=None)
    add_sizes(group, "without --evaluate")
    beside = "KV in CPU memory is attended by the CPU; priced only: the run command cannot do it"
    group.add_argument("--cpu-cache-compute", "--cpu", action="store_true", help=beside)


def _add_search(parser: argparse.ArgumentParser) -> None:
    add = add_search(parser, "search", "its memory is the limit where no other is given").add_argument
    room = "no more than this is held on disk (default: what the machine has free)"
    add("--disk", type=memory_size, metavar="SIZE", help=room)
    priced = "search nothing: price the plan that --percent, the sizes and the other flags describe"
    add("--evaluate", action="store_true", help=priced)


def _add_output(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("output").add_argument
    add("--plot", metavar="FILE", help="a picture of latency against throughput (needs the extra [plot])")
    add("--timeline", metavar="FILE", help="a picture of the lanes over two decode steps (needs the extra [plot])")
    add_verbose(add, f"{TRACEBACK}: where errors come from")


def _refuse(args: argparse.Namespace) -> None:
    if args.percent is not None and not args.evaluate:
        raise ValueError("--percent is what is searched; leave it out, or give --evaluate to price it")
    if args.threads is not None and args.machine is not None:
        figures = f"--machine {args.machine} has figures of its own"
        raise ValueError(f"--threads {args.threads} is for plans for this machine, and {figures}; leave one of them out")
    check_search(args, not args.evaluate, "do without --evaluate")
    if args.evaluate and args.plot is not None:
        raise ValueError("--plot shows what a search has found; leave it out with --evaluate")
