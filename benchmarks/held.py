"""What it costs to hold rows to a JSON schema: steps of a block in which all rows are held, beside the same steps of rows that
are not, in turn.

    python benchmarks/held.py                       # SmolLM2 (scripts/fetch_smollm2), 64 rows, a few minutes
    python benchmarks/held.py --model demo --rows 8 --rounds 2 --output benchmarks/results
    python benchmarks/held.py --ahead --rows 8      # what tokens bring that are taken without asking the model

With --ahead rows come and go in one block, and the figures are tokens per second where tokens that must come are taken several
at a time, beside the same job where each takes a pass.

The schema is that of a list of persons, so long that no text ends. Beside the seconds of a step stand those of a mask, and
those that the head waits for masks, or takes to look at the likeliest tokens and to make masks where these may not come. The
figures are medians; `mean_cost` is of all steps together. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # else transformers takes kernels.py for a package

from benchmarks.comparison.command import commit
from benchmarks.instructions import processor_slug
from h2o_flexgen import LLM, SamplingParams
from h2o_flexgen.core.files import write_text
from h2o_flexgen.engine.job import Request
from h2o_flexgen.engine.masks import BatchMasks
from h2o_flexgen.engine.reports import Tick
from h2o_flexgen.engine.seated_rows import SeatedRows
from h2o_flexgen.profiling.measure import describe_machine

AIM = 0.03  # of a step's time
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "kind": {"enum": ["child", "adult"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": PERSON, "minItems": 1000}


@dataclass
class Seconds:
    """Of each step, and of each mask."""

    steps: list[float] = field(default_factory=list)
    made: list[float] = field(default_factory=list)  # a mask, by the thread or at the head
    waited: list[float] = field(default_factory=list)  # for them, at the head
    tried: list[float] = field(default_factory=list)  # to look at the likeliest tokens there, and to make masks for some


@contextmanager
def watched(seconds: Seconds) -> Iterator[None]:
    """A context in which all of this is noted."""
    noted = {"_make": seconds.made, "of": seconds.waited, "refuse": seconds.tried}

    def timed(act: Callable[..., Any], told: list[float]) -> Callable[..., Any]:
        def timed_act(*given: Any) -> Any:
            begun = time.perf_counter()
            found = act(*given)
            told.append(time.perf_counter() - begun)
            return found

        return timed_act

    with ExitStack() as patched:
        for name, told in noted.items():
            patched.enter_context(patch.object(BatchMasks, name, timed(getattr(BatchMasks, name), told)))
        yield


def measured(llm: LLM, rows: int, tokens: int, rounds: int, temperature: float) -> tuple[Seconds, Seconds]:
    """Steps of rows that are held to nothing, and of rows that are held, round by round."""
    prompts = [f"Here are {number + 2} persons as JSON:\n" for number in range(rows)]
    free, held = Seconds(), Seconds()
    for number in range(rounds + 1):
        for seconds, asked in ((free, None), (held, {"json": SCHEMA})):
            params = SamplingParams(tokens, temperature, ignore_eos=True, structured_outputs=asked)
            noted = Seconds() if number == 0 else seconds  # the first is to warm up
            with watched(noted):
                found = llm.generate(prompts, params, seed=number)
            assert llm.stats is not None and all(len(one.token_ids) == tokens for one in found)
            noted.steps += llm.stats.step_seconds
    return free, held


def streamed(llm: LLM, rows: int, tokens: int, rounds: int, temperature: float) -> dict[str, Any]:
    """Tokens per second of rows that come and go, with and without tokens that are taken ahead, round by round."""
    requests = [
        Request(
            f"Here are {number + 2} persons as JSON:\n",
            SamplingParams(
                tokens // 2 + number * 7 % tokens, temperature, ignore_eos=True, structured_outputs={"json": SCHEMA}
            ),
        )
        for number in range(2 * rows)
    ]
    rates: dict[bool, list[float]] = {True: [], False: []}
    passes: dict[bool, int] = {}
    for number in range(rounds + 1):
        for ahead, none in ((True, nullcontext()), (False, patch.object(SeatedRows, "_room_ahead", lambda rows: 0))):
            ticks, begun = list[Tick](), time.perf_counter()
            with none:
                done = sum(len(one.token_ids) for one in llm.generate_stream(requests, seed=number, on_tick=ticks.append))
            passes[ahead] = len(ticks)
            if number:  # the first is to warm up
                rates[ahead].append(done / (time.perf_counter() - begun))
    fast, slow = median(rates[True]), median(rates[False])
    return {
        "tokens_per_second_one_by_one": round(slow, 1),
        "tokens_per_second_ahead": round(fast, 1),
        "gain": round(fast / slow - 1, 4),
        "passes_one_by_one": passes[False],
        "passes_ahead": passes[True],
    }


def about(llm: LLM, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "threads": args.threads,
        "machine": describe_machine(llm.device),
        "commit": commit(),
        "date": date.today().isoformat(),
    }


def as_json(llm: LLM, args: argparse.Namespace, free: Seconds, held: Seconds) -> dict[str, Any]:
    plain, with_masks = median(free.steps), median(held.steps)
    return {
        "model": args.model,
        "rows": args.rows,
        "temperature": args.temperature,
        "vocab": llm.spec.vocab,
        "ms_of_a_step": round(1e3 * plain, 3),
        "ms_of_a_held_step": round(1e3 * with_masks, 3),
        "cost": round(with_masks / plain - 1, 4),
        "aim": AIM,
        "us_to_make_a_mask": round(1e6 * median(held.made), 2),
        "masks_of_a_token": round(len(held.made) / len(held.steps) / args.rows, 3),
        "ms_waited_at_the_head": round(1e3 * median(held.waited), 3),
        "ms_tried_at_the_head": round(1e3 * median(held.tried), 3),
        "mean_cost": round(sum(held.steps) / sum(free.steps) - 1, 4),
        "steps": len(held.steps),
        **about(llm, args),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ahead", action="store_true", help="measure tokens that are taken without asking the model")
    parser.add_argument("--percent", type=float, nargs=6, help="where weights, KV and activations lie (default: in memory)")
    parser.add_argument("--output", help="also write a JSON document into this folder")
    args = parser.parse_args(argv)
    asked = args.rows, args.tokens, args.rounds, args.temperature
    with LLM(args.model, gpu_batch_size=args.rows, num_gpu_batches=1, threads=args.threads, percent=args.percent) as llm:
        if args.ahead:
            told = {"model": args.model, "rows": args.rows, "percent": args.percent, "temperature": args.temperature}
            document = {**told, **streamed(llm, *asked), **about(llm, args)}
            line = f"{document['tokens_per_second_ahead']} tokens/s instead of {document['tokens_per_second_one_by_one']}"
        else:
            document = as_json(llm, args, *measured(llm, *asked))
            line = f"a step {document['ms_of_a_step']} ms, held {document['ms_of_a_held_step']} ms: {document['cost']:+.1%}"
    if args.output:
        name = f"held-{'ahead-' * args.ahead}{processor_slug()}.json"
        write_text(Path(args.output) / name, json.dumps(document, indent=1) + "\n")
    print(line)
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
