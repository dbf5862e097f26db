"""transformers' continuous batching (`generate_batch`): all weights in memory, KV in pages, rows that join a running batch.

Prompts are computed some tokens at a time, while rows that are through with theirs go on. So what a step costs is known of all
rows alone: what the whole takes longer with more tokens, by their number. A shortened run finds it behind prompts as long as
half the text. Time counts from the first prompt that is begun to the last token.

Options: "batch_tokens" (that are computed at once, if there are not more rows), "attention".
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from benchmarks.baselines.installed import missing_gpu, missing_package
from benchmarks.baselines.process import bytes_read
from benchmarks.baselines.request import Answer, Ready, Request
from benchmarks.baselines.transformers_resident import missing_memory

BATCH_TOKENS = 512  # each is masked against all pages: with many more a CPU is slower
PAGE = 32  # tokens
FIRST = "5.17"  # release in which pages have a size
NEVER = -1  # a token that no model picks


class System:
    loads_within_cap = True

    def missing(self, request: Request) -> str | None:
        lacking = missing_package("transformers") or missing_gpu(request) or missing_memory(request)
        if lacking is None and Version(version("transformers")) < Version(FIRST):
            return f"generate_batch came to CPUs later than this transformers: pip install 'transformers>={FIRST}'"
        return lacking

    def run(self, request: Request, ready: Ready) -> Answer:
        from benchmarks.baselines.hugging_face import Course, prompts_of, resident_model

        began = time.perf_counter()
        model = resident_model(request)
        load_seconds = time.perf_counter() - began
        batching, prompts = _Batching(model, request), prompts_of(request, model.config.vocab_size)
        ready()
        batching.generate(prompts[:1, :1], 2)  # what is done once is not what a run costs
        first, read_before = batching.generate(prompts, 1), bytes_read()
        if request.steps is None:
            steps, whole = request.gen_len - 1, batching.generate(prompts, request.gen_len)
            step_seconds, tokens = (whole.seconds - first.seconds) / steps, whole.tokens
        else:
            steps, longer = request.steps, prompts.repeat(1, -(-request.middle // request.prompt_len))[:, : request.middle]
            short, more = (batching.generate(longer, 1 + count) for count in (0, steps))
            step_seconds, tokens = (more.seconds - short.seconds) / steps, first.tokens
        course = Course(tokens, first.seconds, (step_seconds,) * steps, bytes_read() - read_before, None)
        notes = "each step counts as their mean" + ("" if request.steps is None else f", behind {request.middle} tokens")
        placement = f"weights and KV on {request.device}, {batching.batch_tokens} tokens at once"
        return course.answer(request, (), placement, load_seconds, notes)


@dataclass(frozen=True)
class _Made:
    tokens: Tensor  # (rows, tokens)
    seconds: float


class _Batching:
    def __init__(self, model: Any, request: Request) -> None:
        self._model = model
        self.batch_tokens = max(request.rows, request.options.get("batch_tokens", BATCH_TOKENS))
        self._pages = 1 + request.rows * (1 + -(-(request.prompt_len + request.gen_len) // PAGE))

    def generate(self, prompts: Tensor, tokens: int) -> _Made:
        from transformers import GenerationConfig
        from transformers.generation import ContinuousBatchingConfig

        room = ContinuousBatchingConfig(
            page_size=PAGE, num_blocks=self._pages, max_batch_tokens=self.batch_tokens, allow_block_sharing=False
        )
        greedily = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=NEVER, pad_token_id=0)
        rows = self._model.generate_batch(
            prompts.tolist(), generation_config=greedily, continuous_batching_config=room, record_timestamps=True
        ).values()
        told = next((row.error for row in rows if row.error), None)
        if told is not None or len(rows) != len(prompts):
            raise RuntimeError(f"generate_batch finished {len(rows)} of {len(prompts)} rows: {told or 'it ended by itself'}")
        return _Made(torch.tensor([row.generated_tokens for row in rows]), _seconds(rows))


def _seconds(rows: Sequence[Any]) -> float:
    """The seconds from the first prompt that is begun to the last token."""
    return max(row.timestamps[-1] for row in rows) - min(row.lifespan[0] for row in rows)
