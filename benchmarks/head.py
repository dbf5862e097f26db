"""The head of a decode step without its product: what picking tokens, texts, and the numbers of the next step take in Python.

    python benchmarks/head.py                       # a minute on one core
    python benchmarks/head.py --rows 1 32 --vocab 32000 --case greedy streamed --output benchmarks/results
    python benchmarks/head.py --profile greedy      # where the time of one case goes, by function

Rows of a block, or seated rows of a running one, take logits that are already made. Each part is timed in the run itself: the
last hidden states, picking, what a row does with its token (with its text, where that is streamed or has stop strings), and
what the next step needs to know. Texts are English, in the tokens of SmolLM2 (scripts/fetch_smollm2), or bytes without it. The
figures are medians over steps. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # else transformers takes kernels.py for a package

from benchmarks.comparison.command import commit
from benchmarks.instructions import processor_slug
from h2o_flexgen.core.files import write_text
from h2o_flexgen.core.seats import SeatNeed
from h2o_flexgen.core.site import Site
from h2o_flexgen.core.workload import Batch, Workload
from h2o_flexgen.engine.head import OfHead, Picker
from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.engine.rows import BatchRows
from h2o_flexgen.engine.seated_rows import SeatedRows, WaitingJob
from h2o_flexgen.engine.stores.prefix_store import PrefixStore
from h2o_flexgen.memory.device import Device
from h2o_flexgen.memory.memories import Memories
from h2o_flexgen.planning.block_plan import BlockPlan, BlockPlans
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.profiling.measure import describe_machine
from h2o_flexgen.profiling.products import small_llama
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.sampling.sampler import Sampler
from h2o_flexgen.text.load_tokenizer import load_tokenizer
from h2o_flexgen.text.tokenizer import BYTES, Tokenizer

ROWS, VOCABS = (1, 8, 32, 128), (32_000, 150_000)
PROMPT_LEN, GEN_LEN = 48, 400
WARM_UP, STEPS = 4, 60
SECONDS = 1.0  # of the steps of one case, at most
MODEL = "SmolLM2-135M"
AIM_US, AIM_ROW_US = 300, 5  # of one row, and of each of many
TEXT = (
    "The quick brown fox jumps over the lazy dog, and then it rests for a while under an old oak tree. “Why,” asked the "
    "dog, “do you always jump?” – “Because I can,” said the fox; 3.14159 is not a number for a fox. Ça va, naïve café? "
)


@dataclass(frozen=True)
class Case:
    """What is asked of all rows."""

    params: Mapping[str, Any]
    streamed: bool = False

    @property
    def has_text(self) -> bool:
        return self.streamed or "stop" in self.params


CASES: Mapping[str, Case] = {
    "greedy": Case({}),
    "streamed": Case({}, streamed=True),
    "stop strings": Case({"stop": ["\n\n", "User:", "</s>"]}),
    "logprobs": Case({"logprobs": 5}),
    "penalties": Case({"repetition_penalty": 1.1, "frequency_penalty": 0.2}),
    "temperature": Case({"temperature": 0.8}),
    "top k": Case({"temperature": 0.8, "top_k": 40}),
    "top k and p": Case({"temperature": 0.8, "top_k": 40, "top_p": 0.95}),
    "top p": Case({"temperature": 0.8, "top_p": 0.95}),
}
PARTS: Mapping[str, tuple[type, str]] = {
    "last hidden": (BatchRows, "last_hidden"),
    "pick": (Sampler, "sample"),
    "push": (RowState, "push"),
    "next": (BatchRows, "_drop"),
    "next seated": (SeatedRows, "_drop"),
}


@dataclass(frozen=True)
class Measured:
    """Medians over steps, in microseconds."""

    case: str
    rows: int
    vocab: int
    seated: bool
    step: float
    parts: Mapping[str, float]

    @property
    def of_row(self) -> float:
        return self.step / self.rows


class Watch:
    """Times methods while they run for one step after the other."""

    def __init__(self) -> None:
        self.now: dict[str, float] = defaultdict(float)

    def timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            begun = time.perf_counter()
            try:
                return method(*given, **named)
            finally:
                self.now[name] += time.perf_counter() - begun

        return call

    @contextmanager
    def parts(self) -> Iterator[None]:
        with ExitStack() as patches:
            for name, (owner, method) in PARTS.items():
                patches.enter_context(patch.object(owner, method, self.timed(name, getattr(owner, method))))
            yield


def states(case: Case, count: int, tokenizer: Tokenizer) -> list[RowState]:
    params = SamplingParams(max_tokens=GEN_LEN, ignore_eos=True, seed=7, **case.params)
    ids = tokenizer.encode(TEXT)
    return [RowState(row, [ids[(row + at) % len(ids)] for at in range(PROMPT_LEN)], params, tokenizer, streamed=case.streamed)
            for row in range(count)]  # fmt: skip


@contextmanager
def batch_of(rows: Sequence[RowState], seated: bool) -> Iterator[BatchRows]:
    """The rows of a batch, fixed or seated."""
    plan, device = Plan(gpu_batch_size=len(rows)), torch.device("cpu")
    if not seated:
        batch = Batch(tuple(range(len(rows))), (PROMPT_LEN,) * len(rows))
        yield BatchRows(batch, rows, plan, [plan.policy], GEN_LEN, device)
        return
    needs = [SeatNeed(PROMPT_LEN, GEN_LEN)] * len(rows)
    planned: BlockPlan = BlockPlans.of(small_llama("float32", 64).spec, plan, Workload.running(needs), Site()).first
    waiting = WaitingJob(rows.__getitem__)
    waiting.seat_in(planned)
    policies = [level.policy for level in planned.levels]
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        memories = opened.enter_context(closing(Memories(Device(), folder / "o")))
        prefixes = opened.enter_context(closing(PrefixStore(planned, memories, {})))
        given = plan, policies, GEN_LEN, device, Tensor.to, Tensor.cpu
        yield SeatedRows(0, planned.block.batches[0], waiting, prefixes, *given)


def logits_ring(rows: int, vocab: int, tokenizer: Tokenizer) -> Iterator[Tensor]:
    """Logits of steps, one after the other: their highest values are tokens of a text."""
    draw, ids = torch.Generator().manual_seed(rows), tokenizer.encode(TEXT)
    made = 2 * torch.randn(rows + len(ids), vocab, generator=draw)
    made[range(len(made)), [token % vocab for token, _ in zip(cycle(ids), made)]] = made.max() + 4  # it weighs most
    return (made[at : at + rows] for at in cycle(range(len(ids))))


def measured(
    name: str, count: int, vocab: int, seated: bool, tokenizer: Tokenizer, profile: cProfile.Profile | None
) -> Measured:
    case, watch, heard = CASES[name], Watch(), list[object]()
    ring = logits_ring(count, vocab, tokenizer)
    picker = Picker(Sampler(3), (lambda row, token, text: heard.append(text)) if case.streamed else None)
    steps, each = list[float](), list[dict[str, float]]()
    with torch.inference_mode(), batch_of(states(case, count, tokenizer), seated) as rows:
        begun_all = time.perf_counter()
        for step in range(STEPS):
            hidden = torch.zeros(count, *((PROMPT_LEN, 64) if step == 0 else (1, 64)))
            if step == 0 and len(rows.parts) > 1:
                hidden = hidden.flatten(0, 1)
            logits = next(ring)
            of_head = OfHead(logits=lambda _, made=logits: made, states=lambda states: states)
            run = partial(picker, rows, hidden, of_head, step)
            if step % 2 and profile is None:
                with watch.parts():
                    watch.now.clear()
                    run()
                    each.append(dict(watch.now))
            else:
                if profile is not None:
                    profile.enable()
                begun = time.perf_counter()
                run()
                steps.append(time.perf_counter() - begun)
                if profile is not None:
                    profile.disable()
            if time.perf_counter() - begun_all > SECONDS and step > WARM_UP + 2:
                break
    found = each[WARM_UP // 2 :] or [{}]
    parts = {part: 1e6 * median(one.get(part, 0.0) for one in found) for part in PARTS}
    parts["next"] = parts.pop("next seated") or parts["next"]
    return Measured(name, count, vocab, seated, 1e6 * median(steps[WARM_UP // 2 :]), parts)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--vocab", type=int, nargs="+", default=VOCABS)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seated", action="store_true", help="rows of a running block")
    parser.add_argument("--profile", choices=CASES, help="print where the time of one case goes, and no table")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", help="also write a JSON document into this folder")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    tokenizer = opened_tokenizer(max(args.vocab))
    if args.profile:
        profile = cProfile.Profile()
        measured(args.profile, args.rows[0], args.vocab[0], args.seated, tokenizer, profile)
        pstats.Stats(profile).sort_stats("tottime").print_stats(35)
        return 0
    found = [measured(name, rows, vocab, args.seated, tokenizer, None)
             for vocab in args.vocab for name in args.case for rows in args.rows]  # fmt: skip
    print_table(found)
    document = as_json(found)
    if args.output:
        write_text(Path(args.output) / f"head-{processor_slug()}.json", json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))
    return 0


def opened_tokenizer(vocab: int) -> Tokenizer:
    place = Path.home() / ".cache/h2o_flexgen/models/SmolLM2-135M-Instruct.Q4_1.gguf"
    return load_tokenizer(place, None, vocab) if place.exists() else load_tokenizer(None, None, vocab, BYTES)


def print_table(found: Sequence[Measured]) -> None:
    print(f"| case | vocab | rows | us a step | us a row | {' | '.join(found[0].parts)} |")
    print("|---|--:|--:|--:|--:|" + "--:|" * len(found[0].parts))
    for one in found:
        parts = " | ".join(f"{us:.0f}" for us in one.parts.values())
        print(f"| {one.case} | {one.vocab} | {one.rows} | {one.step:.0f} | {one.of_row:.1f} | {parts} |")


def as_json(found: Sequence[Measured]) -> dict[str, Any]:
    return {
        "benchmark": "head",
        "title": "the head of a decode step without its product",
        "command": f"python benchmarks/head.py {' '.join(sys.argv[1:])}".strip(),
        "date": date.today().isoformat(),
        "commit": commit(),
        "machine": describe_machine(Device()),
        "unit": "microseconds of a step",
        "ceiling": f"the aim: {AIM_US} us for one row, {AIM_ROW_US} us for each of many",
        "cells": [asdict(one) for one in found],
    }


if __name__ == "__main__":
    raise SystemExit(main())
