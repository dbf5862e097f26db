"""The vocabulary check: every token id must be one that the model has."""

from __future__ import annotations

from collections.abc import Iterable

LARGEST_ID = 2**31 - 1  # upper bound of token ids: no vocabulary is larger


def check_tokens(what: str, ids: Iterable[int], vocab: int, model: str) -> None:
    """Refuses token ids that the model does not have. `what` begins the error: "prompt 3 has"."""
    wrong = next((token for token in ids if not 0 <= token < vocab), None)
    if wrong is not None:
        raise ValueError(f"{what} the token id {wrong}; {model} knows 0 to {vocab - 1}")
