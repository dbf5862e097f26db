"""Texts that are held to something, made at random by no model."""

from __future__ import annotations

from array import array
from random import Random

import numpy as np

from h2o_flexgen.kernels.pick_tokens import mask_words
from h2o_flexgen.sampling.structured_outputs import StructuredOutputsParams
from h2o_flexgen.text.row_text import decode_new
from h2o_flexgen.text.tokenizer import Tokenizer


def allowed(words: memoryview) -> list[int]:
    """The tokens of a mask."""
    bits: np.ndarray = np.unpackbits(np.frombuffer(words, np.uint8), bitorder="little")
    found: list[int] = np.flatnonzero(bits).tolist()
    return found


def room_for_mask(vocab: int) -> memoryview:
    """Words with all bits set."""
    return memoryview(array("I", b"\xff" * (4 * mask_words(vocab))))


def random_text(
    tokenizer: Tokenizer, vocab: int, asked: StructuredOutputsParams, random: Random, most: int = 200
) -> tuple[str, bool]:
    """A text of tokens that may come, each drawn from all of them, and whether it came to its end. It ends where it may."""
    ends = sorted(tokenizer.eos_ids)
    constraint = tokenizer.grammars.constraint(asked, ends)
    words, ids, before = room_for_mask(vocab), list[int](), tokenizer.encode("It is ")
    while len(ids) < most:
        constraint.write_mask(words)
        token = random.choice(allowed(words))
        assert token < vocab
        if token in ends or set(ends) & set(allowed(words)):
            return decode_new(tokenizer, before, ids), True
        constraint.take(token)
        ids.append(token)
        if constraint.is_over:
            return decode_new(tokenizer, before, ids), True
    return decode_new(tokenizer, before, ids), False
