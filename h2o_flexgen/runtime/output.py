"""What `generate` hands back for one prompt. Plain data: no torch, no tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class TokenLogprob(NamedTuple):
    token_id: int
    logprob: float


@dataclass(frozen=True)
class StepLogprobs:
    """Of one generated token: its own log-probability and the most likely tokens of that step (it may be among them)."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Completion:
    """`token_ids` holds the end-of-sequence or stop token that ended the row; `text` holds neither it nor a stop string."""

    index: int  # place of the prompt in the input
    prompt: str | None  # None where token ids were given
    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[StepLogprobs, ...] | None  # one per token; None unless asked for
    finish_reason: str  # "stop" or "length"; of a reply also "interrupted"
