"""Serving: requests that arrive with a system prompt in common, with that prompt shared and not.

    python benchmarks/serving.py                                  # the model of the package: two minutes
    python benchmarks/serving.py --model smollm2 --header 900

A request is a header that all have, a passage of its own, and a few tokens to generate. Requests come one by one, each when the
one before it is answered, as to a server that has little to do; or all at once. Both ways ("apart", "shared") are those of one
model in one process, with the same seats, and take turns; each time nothing is known at first, so that the requests by which
the header is found count as well. What a client waits for is measured: for its first token, and for all of them; and
what the processor works, which other work on the machine changes less. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # else transformers takes kernels.py for a package

from benchmarks.comparison.benchmark_command import passages, tell, with_header
from benchmarks.comparison.command import commit
from h2o_flexgen.engine.arrivals import Arrivals
from h2o_flexgen.engine.job import Request
from h2o_flexgen.engine.reports import Tick
from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.llm import LLM
from h2o_flexgen.profiling.measure import describe_machine
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.text.prompts import Prompt

APART, SHARED = WAYS = ("apart", "shared")
ONE_BY_ONE, AT_ONCE = COMINGS = ("one by one", "all at once")
NOTES = "Medians over the rounds. Times faster: of the seconds for all answers, round by round. Processor: its seconds for all."
COLUMNS = (
    "requests come",
    "way",
    "first token s",
    "answer s",
    "answers/s",
    "processor s",
    "prompt tokens read",
    "times faster",
    "at best",
)


def main() -> int:
    args = parse(sys.argv[1:])
    result = result_of(args, measured(args))
    print_table(result)
    tell(result, args.output)
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = with_header(__doc__, 48, "tokens of a request's own, at most; half of it at least")
    add = parser.add_argument
    add("--answer", type=int, default=8, help="tokens to generate")
    add("--requests", type=int, default=24)
    add("--seats", type=int, default=8)
    return parser.parse_args(argv)


# -- requests ----------------------------------------------------------------------------------------------------------------


def prompts_of(args: argparse.Namespace, llm: LLM) -> list[list[int]]:
    """The same for the same seed."""
    random = Random(args.seed)
    passage = passages(llm, random)
    header = passage(args.header)
    return [[*header, *passage(random.randint(args.own // 2, args.own))] for _ in range(args.requests)]


@dataclass
class Clients:
    """The clients that ask, and how long each has waited."""

    llm: LLM
    arrivals: Arrivals
    params: SamplingParams

    def ask(self, prompts: Sequence[Sequence[int]]) -> tuple[list[tuple[int, ...]], dict[str, Any]]:
        """Asks all of these at once, and returns what was said and what it took."""
        firsts, ends, ticks = dict[int, float](), list[float](), list[Tick]()
        begun = time.perf_counter()

        def hear(row: RowState, token: int, text: str | None) -> None:
            firsts.setdefault(row.row, time.perf_counter() - begun)

        asked = [Request(Prompt(None, tuple(prompt)), self.params) for prompt in prompts]
        self.arrivals.admit(come := [self.arrivals.prepare(one, hear) for one in asked])
        for _ in self.llm.generate_arriving(self.arrivals, seed=0, on_tick=ticks.append):
            ends.append(time.perf_counter() - begun)
        said = [arrival.completion.token_ids for arrival in come]
        return said, {"first": [*firsts.values()], "whole": ends, "seconds": max(ends), "prompt": ticks[-1].prompt_tokens}

    def come(self, coming: str, prompts: Sequence[Sequence[int]]) -> tuple[list[tuple[int, ...]], dict[str, Any]]:
        if coming == AT_ONCE:
            return self.ask(prompts)
        said, found = list[tuple[int, ...]](), list[dict[str, Any]]()
        for prompt in prompts:
            own, took = self.ask([prompt])
            said += own
            found.append(took)
        lists = {name: [value for one in found for value in one[name]] for name in ("first", "whole")}
        return said, lists | {name: sum(one[name] for one in found) for name in ("seconds", "prompt")}


# -- both ways ---------------------------------------------------------------------------------------------------------------


def measured(args: argparse.Namespace) -> dict[str, Any]:
    shape = {"gpu_batch_size": args.seats, "num_gpu_batches": 1}
    with LLM(args.model, percent=args.percent, device="cpu", dtype=args.dtype, threads=args.threads, **shape) as llm:
        prompts = prompts_of(args, llm)
        llm.generate([prompts[0]], SamplingParams(max_tokens=1))  # loads
        runs = [run for repeat in range(args.repeats + 1) for run in _all_ways(args, llm, prompts) if repeat]  # one to warm up
        _refuse_other_answers(runs)
        return {"machine": describe_machine(llm.device), "lines": list(_lines(runs, args.requests))}


def _all_ways(args: argparse.Namespace, llm: LLM, prompts: Sequence[Sequence[int]]) -> Iterator[dict[str, Any]]:
    params = SamplingParams(max_tokens=args.answer, ignore_eos=True)
    for coming in COMINGS:
        for way in WAYS:
            room = 0 if way == APART else None
            clients = Clients(llm, llm.arrivals(args.header + args.own, args.answer, prefix_room=room), params)
            llm.generate([prompts[0][:9]], SamplingParams(max_tokens=1))  # nothing of the time before is kept
            begun = time.process_time()
            said, took = clients.come(coming, prompts)
            yield {"coming": coming, "way": way, "said": said, "processor": time.process_time() - begun, **took}
            print(f"{coming}, {way}: {took['seconds']:.2f} s", file=sys.stderr)


def _refuse_other_answers(runs: Sequence[Mapping[str, Any]]) -> None:
    """In float32 every client gets the same, whatever is shared; other types round by the company of a row."""
    different = sum(run["said"] != runs[0]["said"] for run in runs)
    print(f"{different} of {len(runs)} rounds said something else than the first", file=sys.stderr)


def _lines(runs: Sequence[Mapping[str, Any]], requests: int) -> Iterator[dict[str, Any]]:
    """Medians over the rounds, one line for each way."""
    for coming in COMINGS:
        seconds, tokens = dict[str, list[float]](), dict[str, float]()
        for way in WAYS:
            own = [run for run in runs if (run["coming"], run["way"]) == (coming, way)]
            seconds[way], tokens[way] = [run["seconds"] for run in own], median(run["prompt"] for run in own)
            yield {
                "coming": coming,
                "way": way,
                "first_token_seconds": median(median(run["first"]) for run in own),
                "answer_seconds": median(median(run["whole"]) for run in own),
                "answers_per_second": requests / median(seconds[way]),
                "processor_seconds": median(run["processor"] for run in own),
                "prompt_tokens": tokens[way],
                "times": median(before / now for before, now in zip(seconds[APART], seconds[way])),
                "at_best": tokens[APART] / tokens[way],
                "seconds": seconds[way],
            }


# -- what is told ------------------------------------------------------------------------------------------------------------

ROUND: Mapping[str, Callable[[Any], str]] = {
    "coming": str,
    "way": str,
    "first_token_seconds": "{:.3f}".format,
    "answer_seconds": "{:.3f}".format,
    "answers_per_second": "{:.2f}".format,
    "processor_seconds": "{:.2f}".format,
    "prompt_tokens": "{:.0f}".format,
    "times": "{:.2f}".format,
    "at_best": "{:.2f}".format,
}


def result_of(args: argparse.Namespace, found: Mapping[str, Any]) -> dict[str, Any]:
    """The result in the form that scripts/readme_results.py reads."""
    tokens = f"{args.header} tokens in common and {args.own // 2} to {args.own} of their own, {args.answer} to generate"
    return {
        "benchmark": "serving",
        "title": f"{args.requests} requests that arrive, {tokens}, `{args.model}` in {args.dtype}, {args.seats} seats",
        "command": "python benchmarks/serving.py " + " ".join(sys.argv[1:]),
        "date": date.today().isoformat(),
        "commit": commit(),
        "machine": found["machine"],
        "ceiling": "as many times faster as fewer tokens of prompts are computed, if nothing else took time (at best)",
        "unit": "seconds",
        "columns": COLUMNS,
        "cells": [[show(line[name]) for name, show in ROUND.items()] for line in found["lines"]],
        "notes": NOTES,
        "lines": found["lines"],
    }


def print_table(result: Mapping[str, Any]) -> None:
    print(f"\n{result['title']}\nmachine: {result['machine']}")
    for row in (result["columns"], *result["cells"]):
        print("  ".join(f"{cell:>22}" for cell in row))


if __name__ == "__main__":
    sys.exit(main())
