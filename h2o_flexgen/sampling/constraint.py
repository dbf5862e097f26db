"""Constraint: what may come next in a row that is held to something, a grammar for instance. It takes the row's tokens one by
one. What it is made of is its maker's matter: the engine asks no more of it than this."""

from __future__ import annotations

from typing import Protocol


class Constraint(Protocol):
    """The state of one row. Threads may use it in turn, but not at once."""

    @property
    def is_whole(self) -> bool:
        """Whether the text so far is a whole answer, behind which it may end."""

    @property
    def is_over(self) -> bool:
        """Whether it is whole, and nothing but its end may follow."""

    @property
    def only_token(self) -> int | None:
        """The one token that may come next; None if there are several, none, or the text may end, or if a mask alone tells."""

    def take(self, token: int) -> None:
        """Takes the next token of the text. A ConstraintBroken refuses one that may not come."""

    def restart(self) -> None:
        """Forgets all tokens."""

    def write_mask(self, words: memoryview) -> None:
        """Writes a bit for each token of the vocabulary into words of 32 bits (format I): 1 for those that may come next. Those
        that end a text are among them where it is whole. A ConstraintBroken says why this cannot be known."""

    def holds(self, text: str) -> bool:
        """Whether a text would be a whole answer, whatever was taken."""


class ConstraintBroken(ValueError):
    """A row cannot go on as it is held."""
