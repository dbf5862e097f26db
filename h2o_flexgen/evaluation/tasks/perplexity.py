"""Perplexity by decoding: the first quarter of a window is the prompt, and every token after it goes through the cache as if
it had been generated. So tokens that a policy has evicted are missing, as they would be in use."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from h2o_flexgen.evaluation.cells import DIGITS, Figure, of_exponents, ratio_of_sums, standard_error
from h2o_flexgen.evaluation.tasks.task import EXAMPLES, Advance, Bound, EvaluationTask, Shown, Size, in_blocks, window_of
from h2o_flexgen.text.given_texts import checksum, windows
from h2o_flexgen.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from h2o_flexgen.evaluation.tasks.full_cache import FullCache
    from h2o_flexgen.llm import LLM

PROMPT_SHARE = 4  # the prompt is a quarter of the window


@dataclass(frozen=True)
class Perplexity(EvaluationTask):
    name: ClassVar[str] = "perplexity"
    shown: ClassVar[tuple[Shown, ...]] = (
        Shown("perplexity", "perplexity per token", False, of_exponents),
        Shown("bits_per_byte", "bits per byte", False, None),
    )

    def bind(self, llm: LLM) -> BoundPerplexity:
        window = window_of(self.asked.window, llm)
        found = windows(self.asked.texts, llm.tokenizer, window, self.asked.examples or EXAMPLES)
        return BoundPerplexity(found.ids, window // PROMPT_SHARE, found.of_texts, llm.tokenizer)


@dataclass(frozen=True)
class BoundPerplexity(Bound):
    windows: tuple[tuple[int, ...], ...]
    prompt_len: int
    of_texts: int
    tokenizer: Tokenizer

    @property
    def num_tokens(self) -> int:
        return len(self.windows) * (len(self.windows[0]) - self.prompt_len)

    @property
    def sizes(self) -> tuple[Size, ...]:
        return ((self.prompt_len, len(self.windows[0]) - self.prompt_len),)

    @property
    def identity(self) -> Mapping[str, object]:
        return {"prompt_len": self.prompt_len, "windows": len(self.windows), "tokens": checksum(self.windows)}

    @property
    def notes(self) -> tuple[str, ...]:
        window = len(self.windows[0])
        scored = f"of which the last {window - self.prompt_len} are scored"
        return (f"{len(self.windows)} of {self.of_texts} windows of {window} tokens, {scored}",)

    @cached_property
    def _bytes(self) -> list[float]:
        """Bytes of the scored text, window by window."""
        return [float(self._length(ids) - self._length(ids[: self.prompt_len])) for ids in self.windows]

    def _length(self, ids: tuple[int, ...]) -> int:
        return len(self.tokenizer.decode(ids).encode())

    def measure(self, llm: LLM, advance: Advance, reference: FullCache | None) -> tuple[Figure, ...]:
        losses = [0.0] * len(self.windows)
        for rows in in_blocks(self.windows, llm.plan.block_size):
            pairs = [(self.windows[row][: self.prompt_len], self.windows[row][self.prompt_len :]) for row in rows]
            for row, scored in zip(rows, llm.score(pairs, by="decode", on_token=lambda *_: advance(1))):
                losses[row] = -math.fsum(scored.logprobs)
        return self._figures(losses)

    def _figures(self, losses: list[float]) -> tuple[Figure, ...]:
        """`losses` are those of whole windows, in nats."""
        scored = len(self.windows[0]) - self.prompt_len
        per_token = [round(loss / scored, DIGITS) for loss in losses]
        value, error = math.exp(math.fsum(losses) / scored / len(losses)), standard_error(per_token)
        error = None if error is None else value * error
        perplexity = Figure("perplexity", value, error, len(losses), examples=tuple(per_token))
        if not all(self._bytes):
            return (perplexity,)
        bits = ratio_of_sums([loss / math.log(2) for loss in losses], self._bytes)
        return perplexity, Figure("bits_per_byte", *bits, len(losses))
