"""SamplingParams: how a prompt is to be continued. The command line reads its defaults from here, without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SEED_LIMIT = 2**64


@dataclass(frozen=True)
class SamplingParams:
    """How one prompt is continued. The defaults are greedy decoding of 32 tokens."""

    max_tokens: int = 32
    temperature: float = 0.0  # 0: greedy, the most likely token, the lowest id of several
    top_k: int = 0  # only the k most likely tokens (and what ties with the k-th); 0: all
    top_p: float = 1.0  # only the fewest tokens that hold this share of the probability; 1: all
    min_p: float = 0.0  # only tokens at least this many times as likely as the likeliest; 0: all
    repetition_penalty: float = 1.0  # of tokens in the prompt and in what was generated; above 1 discourages
    seed: int | None = None  # None: the seed of the whole call
    stop: str | Sequence[str] = ()  # the text ends before the first of these
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; n: of the chosen token and of the n likeliest, before penalty and filters

    def __post_init__(self) -> None:
        self._require("max_tokens", self.max_tokens >= 1, "1 or more")
        self._require("temperature", 0 <= self.temperature < math.inf, "0 (greedy) or more")
        self._require("top_k", self.top_k >= 0, "0 (off) or more")
        self._require("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (off)")
        self._require("min_p", 0 <= self.min_p <= 1, "0 (off) to 1")
        self._require("repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0; 1 is off")
        self._require("seed", self.seed is None or 0 <= self.seed < SEED_LIMIT, "0 to 2**64 - 1, or None")
        self._require("stop", all(isinstance(text, str) and text for text in self.stop_strings), "texts that are not empty")
        self._require("stop_token_ids", all(token >= 0 for token in self.stop_token_ids), "token ids, 0 or more")
        self._require("logprobs", self.logprobs is None or self.logprobs >= 0, "0 or more, or None (off)")

    def _require(self, name: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise ValueError(f"{name} is {getattr(self, name)!r}; allowed is {allowed}")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if isinstance(self.stop, str):
            return (self.stop,) if self.stop else ()
        return tuple(self.stop)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def is_filtered(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0
