"""The tokens that may come next in a text that is held to a regular expression, where each token is a byte. An engine that
matches beginnings of texts finds them, and nothing of the package's own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import regex
import torch
from torch import Tensor

from h2o_flexgen.text.tokenizer import ByteTokenizer

# what the rows of a batch are held to in turn, by texts without an end in the lowest 108 characters
HELD = ("", "([A-F][0-9]{1,2}-)*", r"(ON|OFF|[?!]+ )+", "([0-9]{3}|[a-d]{2})*")
FIRST = ByteTokenizer.SPECIALS  # the token of the first byte


@cache
def allowed_by_hand(pattern: str, text: str, vocab: int) -> Tensor:
    """(vocab,): whether a token may come behind a text."""
    found = torch.ones(vocab, dtype=torch.bool)
    if pattern:
        texts = (text + chr(token - FIRST) if token >= FIRST else "\0" * (len(text) + 1) for token in range(vocab))
        found = torch.tensor([regex.fullmatch(pattern, one, partial=True) is not None for one in texts])
    return found


def pattern_of(held: tuple[str, ...], row: int) -> str:
    return held[row % len(held)] if held else ""


def likeliest_held(logits: Tensor, rows: Sequence[int], held: tuple[str, ...], before: Sequence[Sequence[int]]) -> list[int]:
    """The likeliest token of each row among those that may come; `before`: the tokens that each row has."""
    found = []
    for place, row in enumerate(rows):
        text = "".join(chr(token - FIRST) for token in before[place] if token >= FIRST)
        allowed = allowed_by_hand(pattern_of(held, row), text, logits.shape[-1]).to(logits.device)
        found.append(int(logits[place].float().masked_fill(~allowed, -torch.inf).argmax()))
    return found
