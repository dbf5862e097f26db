"""What the commands of several benchmarks share: a parser whose help is a file's docstring, how a result is told, and requests
that begin with the same tokens."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from h2o_flexgen.checkpoints.model_places import held_out_prose
from h2o_flexgen.core.files import write_text
from h2o_flexgen.llm import LLM


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", help="also write the JSON document here")


def tell(result: Mapping[str, Any], output: str | None) -> None:
    """Writes a result to the file that was asked for, and prints it as the last line."""
    if output:
        write_text(output, json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


# -- requests that begin with the same tokens ----------------------------------------------------------------------------------


def with_header(doc: str | None, own: int, own_help: str) -> argparse.ArgumentParser:
    """A parser for requests that begin alike; `own`: tokens of each by default."""
    parser = parser_of(doc)
    add = parser.add_argument
    add("--model", default="demo")
    add("--header", type=int, default=700, help="tokens that all requests begin with")
    add("--own", type=int, default=own, help=own_help)
    add("--percent", type=float, nargs=6, default=[100, 0, 100, 0, 100, 0])
    add("--dtype", default="float32")
    add("--threads", type=int)
    add("--seed", type=int, default=0)
    add("--repeats", type=int, default=5)
    add_output(parser)
    return parser


def passages(llm: LLM, random: Random) -> Callable[[int], list[int]]:
    """What gives passages of prose, of so many tokens."""
    text = list(llm.tokenizer.encode(held_out_prose()))

    def passage(length: int) -> list[int]:
        start = random.randrange(len(text) - length)
        return text[start : start + length]

    return passage
