"""What a model loses if a decode step attends only the tokens that its own query chooses, while all KV is kept.

    scripts/fetch_smollm2 && python benchmarks/chosen_tokens.py --text middlemarch.txt --examples 8
    python benchmarks/chosen_tokens.py --text wikitext2_test.txt --tasks perplexity
    python benchmarks/chosen_tokens.py --tasks disk         # random reads of single tokens and of pages of tokens

A simulation over a resident loop of transformers, in fp32: a prompt is attended whole, and each later step attends a share of
the tokens, chosen for each KV head. The first 4 tokens and the last 16 always count among them. All ways of choosing are rows
of one batch, so each sees the same question behind the same prompt. Questions and windows are those of `evaluate`. The last
line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # else transformers takes kernels.py for a package

import torch
from torch import Tensor

from h2o_flexgen.checkpoints.model_places import SMOLLM2
from h2o_flexgen.evaluation.tasks.perplexity import BoundPerplexity, Perplexity
from h2o_flexgen.evaluation.tasks.recall import BoundRecall, RecallTask
from h2o_flexgen.evaluation.tasks.task import QUESTIONS, TaskOptions
from h2o_flexgen.llm import LLM
from h2o_flexgen.memory.device import open_device
from h2o_flexgen.memory.disk import DiskFiles, FilePiece, huge_pages
from h2o_flexgen.profiling.measure import describe_machine
from h2o_flexgen.text.given_texts import Text

FIRST, RECENT = 4, 16  # tokens that every step attends
CHOSEN = "chosen_tokens"  # its name among transformers' kinds of attention


@dataclass(frozen=True)
class Choice:
    """A way of choosing. `share`: of all tokens, those that are always attended among them."""

    name: str
    share: float = 1.0
    bits: int | None = None  # of the keys that the query is compared with; None: as they are
    page: int = 1  # tokens that are chosen together, by the best of them
    by_layer: bool = False  # one choice for all KV heads of a layer
    by_highest: bool = False  # the best of a group's query heads counts, not their sum
    of_last_query: bool = False  # attends what the step before would have chosen
    likely_from: int | None = None  # the first layer in which a likely value stands for what is not attended


SHARES = (0.2, 0.1, 0.05)
CHOICES = (
    Choice("full"),
    *(Choice("exact keys", share) for share in SHARES),
    *(Choice("4-bit keys", share, 4) for share in SHARES),
    *(Choice("4-bit keys, best head", share, 4, by_highest=True) for share in SHARES[1:]),
    *(Choice("2-bit keys", share, 2) for share in SHARES[:2]),
    *(Choice("4-bit keys, one choice for a layer", share, 4, by_layer=True) for share in SHARES),
    *(Choice(f"4-bit keys, pages of {page}", share, 4, page) for page in (4, 8, 16) for share in SHARES[:2]),
    *(
        Choice(f"4-bit keys, one choice for a layer, pages of {page}", share, 4, page, by_layer=True)
        for page in (4, 8)
        for share in SHARES[:2]
    ),
    Choice("query of the step before", 0.2, 4, of_last_query=True),
    *(
        Choice(f"4-bit keys, likely values from layer {layer}", share, 4, likely_from=layer)
        for layer in (0, 2)
        for share in SHARES
    ),
)


@dataclass
class Sums:
    """By way of choosing, over steps and layers: shares of all tokens, and of the chosen that the step before chose too."""

    union: Tensor  # (choices,): over the KV heads of a layer
    again: Tensor  # of each head
    union_again: Tensor
    count: int = 0

    @classmethod
    def of(cls, choices: int) -> Sums:
        return cls(*(torch.zeros(choices, dtype=torch.float64) for _ in range(3)))


@dataclass
class Choosing:
    """The attention of a batch with a row for each way of choosing; it lives as long as one text."""

    choices: Sequence[Choice]
    sums: Sums
    rounded: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # by layer and bits: keys as the index has them
    last: dict[int, Tensor] = field(default_factory=dict)  # by layer: what the step before chose

    @cached_property
    def alike(self) -> Mapping[Choice, list[int]]:
        """Rows whose choices differ in their share alone."""
        found: dict[Choice, list[int]] = {}
        for row, choice in enumerate(self.choices):
            found.setdefault(replace(choice, name="", share=0.0, of_last_query=False), []).append(row)
        return found

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q (rows, heads, 1, width), k and v (rows, kv_heads, tokens, width) -> (rows, 1, heads, width)"""
        rows, kv_heads, width = len(k), k.shape[1], k.shape[3]
        grouped = q.view(rows, kv_heads, -1, width) * scale
        scores = grouped @ k.transpose(-1, -2)
        seen = self._seen(layer, grouped, k, scores)
        chosen = self._chosen(seen)
        attended, before = chosen.clone(), self.last.get(layer)
        if before is not None:
            self._count(chosen, before)
            of_last = [row for row, choice in enumerate(self.choices) if choice.of_last_query]
            attended[of_last] = before[of_last]
            attended[..., -1] = True
        self.last[layer] = torch.nn.functional.pad(chosen, (0, 1), value=True)
        scores = scores.masked_fill(~attended.unsqueeze(2), -math.inf)
        out = scores.softmax(-1) @ v
        for row, choice in enumerate(self.choices):
            if choice.likely_from is not None and layer >= choice.likely_from:
                out[row] = with_likely_value(scores[row], seen[row], attended[row], v[row])
        return out.view(rows, 1, -1, width)

    def _seen(self, layer: int, q: Tensor, k: Tensor, scores: Tensor) -> Tensor:
        """The scores by which each row chooses."""
        keys = {bits: self._rounded(layer, k, bits) for bits in {choice.bits for choice in self.choices if choice.bits}}
        seen = scores.clone()
        for kind, rows in self.alike.items():
            if kind.bits is not None:
                seen[rows] = q[rows] @ keys[kind.bits][rows].transpose(-1, -2)
        return seen

    def _chosen(self, seen: Tensor) -> Tensor:
        """(rows, kv_heads, tokens), True for what is attended."""
        chosen = torch.ones(*seen.shape[:2], seen.shape[3], dtype=torch.bool)
        for kind, rows in self.alike.items():
            chosen[rows] = _best(kind, [self.choices[row].share for row in rows], seen[rows].softmax(-1))
        return chosen

    def _rounded(self, layer: int, k: Tensor, bits: int) -> Tensor:
        before = self.rounded.get((layer, bits))
        new = k if before is None else k[:, :, before.shape[2] :]
        both = rounded(new, bits) if before is None else torch.cat([before, rounded(new, bits)], dim=2)
        self.rounded[layer, bits] = both
        return both

    def _count(self, chosen: Tensor, before: Tensor) -> None:
        union, was = chosen.any(1), before.any(1)
        self.sums.union += union.double().mean(-1)
        self.sums.again += ((chosen & before).sum((1, 2)) / chosen.sum((1, 2))).double()
        self.sums.union_again += ((union & was).sum(-1) / union.sum(-1)).double()
        self.sums.count += 1


def _best(kind: Choice, shares: Sequence[float], seen: Tensor) -> Tensor:
    """The tokens that rows attend, each its share of all: seen (rows, kv_heads, group, tokens) -> (rows, kv_heads, tokens)"""
    worth = seen.amax(2) if kind.by_highest else seen.sum(2)
    if kind.by_layer:
        worth = worth.sum(1, keepdim=True).expand_as(worth)
    tokens, worth = worth.shape[-1], worth.clone()
    worth[..., :FIRST], worth[..., -RECENT:] = math.inf, math.inf
    places = -(-tokens // kind.page)
    filled = torch.nn.functional.pad(worth, (0, places * kind.page - tokens), value=-1.0)
    pages = filled.view(*worth.shape[:2], places, -1).amax(-1)
    always = int(torch.isinf(pages[0, 0]).sum())
    counts = [min(places, max(always, round(share * tokens / kind.page))) for share in shares]
    place = pages.argsort(-1, descending=True).argsort(-1)
    kept = place < torch.tensor(counts)[:, None, None]
    return kept.repeat_interleave(kind.page, dim=-1)[..., :tokens]


def with_likely_value(scores: Tensor, seen: Tensor, attended: Tensor, v: Tensor) -> Tensor:
    """Attention of a row over what it attends (`scores` are -inf elsewhere) and a value for the rest, of its mean size in the
    mean direction of all: scores (kv_heads, group, tokens), v (kv_heads, tokens, width)."""
    left, sizes = seen.masked_fill(attended.unsqueeze(1), -math.inf), v.abs().sum(-1)
    size = (left.softmax(-1).nan_to_num(0.0) * sizes.unsqueeze(1)).sum(-1, keepdim=True)
    likely = size * (v.sum(1) / sizes.sum(1, keepdim=True)).unsqueeze(1)
    shares = torch.cat([scores, left.logsumexp(-1, keepdim=True)], -1).softmax(-1)
    return shares[..., :-1] @ v + shares[..., -1:] * likely


def rounded(k: Tensor, bits: int) -> Tensor:
    """Keys as an index holds them: whole numbers between the lowest and the highest value of a head's key."""
    low, high = k.amin(-1, keepdim=True), k.amax(-1, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp(min=1e-8).half().float()
    low = low.half().float()
    return ((k - low) / step).round().clamp(0, 2**bits - 1) * step + low


class ResidentLoop:
    """SmolLM2 of transformers, whose attention a test can choose."""

    def __init__(self, file: Path) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        self.choosing: Choosing | None = None
        ALL_ATTENTION_FUNCTIONS.register(CHOSEN, self._attention)
        self.model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        self.model.config._attn_implementation = CHOSEN
        self.model.eval()

    def _attention(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: object, scaling: float, **_: object
    ) -> tuple[Tensor, None]:
        if q.shape[2] > 1 or self.choosing is None:
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=q.shape[2] > 1, scale=scaling, enable_gqa=True
            )
            return out.transpose(1, 2).contiguous(), None
        return self.choosing.attend(module.layer_idx, q, k, v, scaling), None

    def read(self, prompt: Sequence[int], rows: int) -> tuple[Tensor, Any]:
        """The logits behind a prompt (rows, vocab), and as many copies of its cache."""
        self.choosing = None
        out = self.model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        out.past_key_values.batch_repeat_interleave(rows)
        return out.logits[:, -1].expand(rows, -1), out.past_key_values

    def step(self, tokens: Tensor, cache: Any, choosing: Choosing) -> Tensor:
        self.choosing = choosing
        return self.model(tokens[:, None], past_key_values=cache, use_cache=True).logits[:, -1]


def recall(loop: ResidentLoop, bound: BoundRecall, choices: Sequence[Choice]) -> Iterator[dict[str, Any]]:
    """The share of answers that are right in full, visible and hidden."""
    for kind in QUESTIONS:
        sums, right = Sums.of(len(choices)), [[0.0] * len(bound.examples) for _ in choices]
        for number, example in enumerate(bound.examples):
            prompt, forced = (
                (example.context, example.question) if kind == "hidden" else (example.context + example.question, ())
            )
            logits, cache = loop.read(prompt, len(choices))
            choosing, made = Choosing(choices, sums), []
            for token in forced:
                logits = loop.step(torch.full((len(choices),), token), cache, choosing)
            while True:
                made.append(logits.argmax(-1))
                if len(made) == len(example.answer):
                    break
                logits = loop.step(made[-1], cache, choosing)
            said = torch.stack(made, dim=1).tolist()
            for row, text in enumerate(said):
                right[row][number] = float(tuple(text) == example.answer)
            print(
                f"{kind} {number + 1} of {len(bound.examples)}: "
                + " ".join(f"{statistics.mean(r[: number + 1]):.2f}" for r in right),
                file=sys.stderr,
            )
        tasks = [example.task for example in bound.examples]
        for row, (choice, own) in enumerate(zip(choices, right)):
            by_task = {task: statistics.mean(x for x, t in zip(own, tasks) if t == task) for task in dict.fromkeys(tasks)}
            yield {
                "task": "recall",
                "questions": kind,
                **_described(choice, sums, row),
                "accuracy": statistics.mean(own),
                "by_task": by_task,
                "each": own,
            }


def perplexity(loop: ResidentLoop, bound: BoundPerplexity, choices: Sequence[Choice]) -> Iterator[dict[str, Any]]:
    sums, losses = Sums.of(len(choices)), torch.zeros(len(choices), dtype=torch.float64)
    count = 0
    for number, window in enumerate(bound.windows):
        logits, cache = loop.read(window[: bound.prompt_len], len(choices))
        choosing = Choosing(choices, sums)
        for token in window[bound.prompt_len :]:
            losses -= logits.log_softmax(-1)[:, token].double()
            logits = loop.step(torch.full((len(choices),), token), cache, choosing)
            count += 1
        print(f"window {number + 1}: " + " ".join(f"{math.exp(each / count):.2f}" for each in losses), file=sys.stderr)
    full = float(losses[0])
    for row, (choice, loss) in enumerate(zip(choices, losses.tolist())):
        value = math.exp(loss / count)
        yield {
            "task": "perplexity",
            **_described(choice, sums, row),
            "perplexity": value,
            "of_full": math.exp((loss - full) / count),
        }


def _described(choice: Choice, sums: Sums, row: int) -> dict[str, Any]:
    moved = {"union": sums.union, "again": sums.again, "union_again": sums.union_again}
    return {**asdict(choice), **{name: round(float(each[row]) / max(1, sums.count), 3) for name, each in moved.items()}}


def random_reads(folder: Path | None) -> Iterator[dict[str, Any]]:
    """Operations and bytes a second of random reads past the page cache, by size and by readers, as the engine's disk does."""
    nbytes, draw = 2 << 30, random.Random(1)
    with tempfile.NamedTemporaryFile(dir=folder, prefix="reads-") as file:
        block = random.Random(2).randbytes(1 << 24)
        for _ in range(nbytes // len(block)):
            file.write(block)
        file.flush()
        for readers in (1, 6, 16, 32):
            with DiskFiles(readers) as files:
                for size in (4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 1 << 20, 4 << 20):
                    count = min(4096, (1 << 30) // size)
                    memory = torch.frombuffer(huge_pages(count * size), dtype=torch.uint8)
                    rates = []
                    for _ in range(3):
                        places = [draw.randrange(nbytes // size) * size for _ in range(count)]
                        pieces = [
                            FilePiece(Path(file.name), at, memory[n * size : (n + 1) * size], torch.uint8)
                            for n, at in enumerate(places)
                        ]
                        began = time.perf_counter()
                        files.read(pieces)
                        rates.append(count / (time.perf_counter() - began))
                    rate = statistics.median(rates)
                    yield {"task": "disk", "readers": readers, "bytes": size, "reads_per_s": rate, "bytes_per_s": rate * size}


TASKS: tuple[str, ...] = ("recall", "perplexity", "disk")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["recall"])
    parser.add_argument("--text", type=Path)
    parser.add_argument("--length", type=int, default=512, help="tokens of a text with a question (default: %(default)s)")
    parser.add_argument("--examples", type=int, default=8, help="of each kind and depth, or windows (default: %(default)s)")
    parser.add_argument("--window", type=int, default=768, help="tokens whose perplexity is measured (default: %(default)s)")
    names = list(dict.fromkeys(choice.name for choice in CHOICES))
    parser.add_argument("--choices", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="on the disk that is measured")
    parser.add_argument("--output", type=Path, help="also write the JSON there")
    asked = parser.parse_args()
    found: list[dict[str, Any]] = []
    if "disk" in asked.tasks:
        found += _shown(random_reads(asked.folder))
    if set(asked.tasks) - {"disk"}:
        found += _of_texts(asked)
    document = {
        "machine": describe_machine(open_device("cpu")),
        "arguments": {k: v if v is None else str(v) for k, v in vars(asked).items()},
        "found": found,
    }
    if asked.output is not None:
        asked.output.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


@torch.inference_mode()
def _of_texts(asked: argparse.Namespace) -> list[dict[str, Any]]:
    text = Text.held_out() if asked.text is None else Text.read(str(asked.text))
    options = TaskOptions(
        (text,),
        window=asked.window,
        examples=asked.examples,
        lengths=(asked.length,),
        depths=(0.1, 0.5, 0.9),
        mentions=1,
        seed=asked.seed,
    )
    llm, loop, found = LLM("smollm2"), ResidentLoop(SMOLLM2.path), []
    choices = [each for each in CHOICES if each.share == 1.0 or each.name in asked.choices]
    if "recall" in asked.tasks:
        found += _shown(recall(loop, RecallTask(options).bind(llm), choices))
    if "perplexity" in asked.tasks:
        found += _shown(perplexity(loop, Perplexity(options).bind(llm), choices))
    return found


def _shown(lines: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for line in lines:
        found.append(line)
        print(
            ", ".join(
                f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}"
                for key, value in line.items()
                if key != "each"
            ),
            flush=True,
        )
    return found


if __name__ == "__main__":
    main()
