"""The arguments of the chat command. Parsing them imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from h2o_flexgen.cli.argument_types import TOKENS
from h2o_flexgen.cli.arguments import DEMO_RUN
from h2o_flexgen.cli.flags import (
    DUMMY_PATH,
    TRACEBACK,
    Help,
    Parser,
    add_kv,
    add_model,
    add_placement,
    add_sampling,
    add_tokenizer,
    plan_of,
)
from h2o_flexgen.cli.turns import COMMANDS
from h2o_flexgen.text.dialogue import AUTO, STYLES

PROGRAM = "python -m h2o_flexgen.chat"
GEN_LEN = 256

# without --model: the one that travels with the package, with the sampling that `run` gives it
DEMO_TALK = {name: DEMO_RUN[name] for name in ("model", "temperature", "top_p", "seed")}

DESCRIPTION = """\
Talk with a model whose weights may be larger than the memory. What was said stays in the KV cache.
Without --model: a small one that travels with the package; nothing is downloaded."""

EPILOG = f"""\
With a policy that evicts and rolling positions the talk has no end, in constant memory:

  {PROGRAM} --model Qwen/Qwen3-8B --kv-policy h2o --heavy 512 --recent 512 --positions rolling

While you talk: {", ".join(f"{word} {meaning}" for word, meaning in COMMANDS.items())}; Ctrl-C stops a reply.
"""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """`plan` is added: the plan that the flags ask for, of one row."""
    parser = _parser()
    args = parser.parse(argv)
    if args.model is None and args.path in (None, DUMMY_PATH):
        if args.dummy_weights or args.path is not None:
            raise ValueError("the model that is to have random weights is missing; give --model with its name")
        parser.set_defaults(**DEMO_TALK)
        args = parser.parse(argv)
    args.plan = replace(plan_of(args), gpu_batch_size=1)
    return args


def _parser() -> Parser:
    parser = Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [--model NAME] [--input turns.jsonl] [--kv-policy NAME] [--percent W W KV KV A A] [options]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=Help,
    )
    add_model(parser)
    add_tokenizer(parser)
    _add_turns(parser)
    add_placement(parser.add_argument_group("plan"))
    add_kv(parser)
    add_sampling(parser)
    return parser


def _add_turns(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("talk").add_argument
    given = 'turns, all of one talk: one per line, or (.jsonl) {"prompt": ...} or {"turns": [...]} per line'
    add("--input", metavar="FILE", help=given)
    styles = "how turns become text: the model's chat template, a script of User: and Assistant:, or plain continuing"
    add("--style", choices=(AUTO, *STYLES), default=AUTO, help=f"{styles}; auto: the template, or a script where there is none")
    add("--system", metavar="TEXT", default="", help="what the model is told before the first turn")
    add("--gen-len", type=TOKENS, default=GEN_LEN, metavar="TOKENS", help="of a reply, at most")
    room = "tokens that the text may grow to; of this a --kv-budget or --hh-ratio is a share (default: the model's positions)"
    add("--context-len", type=TOKENS, metavar="TOKENS", help=room)
    add("--verbose", action="store_const", const=TRACEBACK, default=0, help="show where errors come from")
