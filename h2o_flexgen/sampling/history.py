"""History: the tokens of a row before the next one, and how often each of them came, counted as they come."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

FIRST_ROOM = 64


class TokenCounts:
    """The tokens that a row has seen, each once, and how often each was generated."""

    def __init__(self, prompt_len: int = 0) -> None:
        self._prompt_len = prompt_len
        self._forget()

    def _forget(self) -> None:
        self._known = 0  # tokens of the row that are counted
        self.places: dict[int, int] = {}  # of each token among all
        self._ids: np.ndarray = np.zeros(FIRST_ROOM, dtype=np.int64)
        self._times: np.ndarray = np.zeros(FIRST_ROOM, dtype=np.float32)

    @property
    def ids(self) -> np.ndarray:
        return self._ids[: len(self.places)]

    @property
    def times(self) -> np.ndarray:
        return self._times[: len(self.places)]

    def follow(self, seen: Sequence[int]) -> TokenCounts:
        """Counts what has come since the last call. A row that has started again has fewer tokens."""
        if len(seen) < self._known:
            self._forget()
        for number in range(self._known, len(seen)):
            self._count(seen[number], number >= self._prompt_len)
        self._known = len(seen)
        return self

    def _count(self, token: int, is_generated: bool) -> None:
        place = self.places.setdefault(token, len(self.places))
        if place == len(self._ids):
            self._ids, self._times = (np.concatenate((old, np.zeros_like(old))) for old in (self._ids, self._times))
        self._ids[place] = token
        self._times[place] += is_generated


@dataclass(frozen=True)
class History:
    """The tokens before the next one of a row, and those that would end it."""

    seen: Sequence[int]  # prompt and generated ids
    prompt_len: int
    ends: Collection[int] = ()  # end-of-text and stop tokens
    number: int = 0  # of the row among the completions of its prompt

    @property
    def num_generated(self) -> int:
        return len(self.seen) - self.prompt_len

    @cached_property
    def _counts(self) -> TokenCounts:
        return TokenCounts(self.prompt_len)

    @property
    def counts(self) -> TokenCounts:
        return self._counts.follow(self.seen)
