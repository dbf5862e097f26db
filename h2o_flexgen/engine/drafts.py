"""Drafts: tokens that rows may take next, guessed from what came behind the same tokens before, in their own prompts and texts.

A pass computes them behind the newest token of their row, and the head keeps those that it would have picked anyway. So they
change no token, and take fewer passes. Rows rest where guesses fail. All rest where passes take longer than guesses are worth.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple

from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.planning.working_space import GUESSED_AT_ONCE

LOOKED_UP = (4, 3, 2)  # the last tokens of a text, which are looked for in it
LONGEST, SHORTEST = max(LOOKED_UP), min(LOOKED_UP)
FEWEST = min(GUESSED_AT_ONCE)
LONGEST_REST = 32  # passes of a row without a guess
PLAIN_FIRST = 2  # passes without guesses that are timed before any guess
TO_RECORD = 1  # more of these, where passes are recorded: the others are slower
TRIED_FIRST = 2  # passes with guesses that are timed before it is judged what these cost
FREE = 0.02  # of the seconds of a pass, which are nothing
GRANTED, ALLOWED = 0.5, 0.01  # of a pass, and of the seconds of all passes, which wrong guesses may cost
WEIGHT = 0.25  # of the newest pass in means
Clock = Callable[[], float]


class Drafted(NamedTuple):
    """Tokens that were guessed, and those of them that were right."""

    proposed: int = 0
    accepted: int = 0

    def plus(self, other: Drafted) -> Drafted:
        return Drafted(self.proposed + other.proposed, self.accepted + other.accepted)

    def behind(self, before: Drafted) -> Drafted:
        """Those since an earlier count."""
        return Drafted(self.proposed - before.proposed, self.accepted - before.accepted)

    @classmethod
    def total(cls, each: Iterable[Drafted]) -> Drafted:
        return reduce(cls.plus, each, NONE_DRAFTED)


NONE_DRAFTED = Drafted()


class Lookup:
    """Finds what came behind the last tokens of a text where it had the same tokens before. The text may only grow."""

    def __init__(self) -> None:
        self._behind: dict[int, dict[tuple[int, ...], int]] = {count: {} for count in LOOKED_UP}
        self._read = 0  # tokens of the text that are known to be behind others

    def guess(self, seen: Sequence[int], most: int, least: int = SHORTEST) -> list[int]:
        """At most so many tokens, behind the longest of the last tokens that came before, at their last place; none where fewer
        than `least` did. Where these reach the end of the text they are repeated."""
        self._read_on(seen)
        for count in LOOKED_UP:
            if count < least:
                break
            place = self._behind[count].get(tuple(seen[-count:]))
            if place is not None:
                period = len(seen) - place
                return [seen[place + number % period] for number in range(most)]
        return []

    def _read_on(self, seen: Sequence[int]) -> None:
        for place in range(self._read, len(seen)):
            for count in LOOKED_UP:
                if place >= count:
                    self._behind[count][tuple(seen[place - count : place])] = place
        self._read = len(seen)


@dataclass
class _OfRow:
    """The guesses of a row: what they are, and how good they were."""

    needs: int = SHORTEST  # tokens that must have come before, for a guess behind them, unless the last one was right
    lookup: Lookup = field(default_factory=Lookup)
    length: int = FEWEST
    was_right: bool = False
    misses: int = 0  # one after the other
    rest: int = 0  # passes to come without a guess
    tokens: Sequence[int] = ()  # that are tried in the next pass

    def guess(self, seen: Sequence[int], most: int) -> None:
        if self.rest:
            self.rest -= 1
            self.tokens = ()
        else:
            self.tokens = self.lookup.guess(seen, min(most, self.length), self.least) if most > 0 else ()

    @property
    def least(self) -> int:
        return SHORTEST if self.was_right else self.needs

    def judge(self, accepted: int, is_free: bool = False) -> None:
        """More after a guess that was all right, fewer after one that was partly right, none for a while after a wrong one,
        unless wrong ones cost nothing."""
        self.was_right = accepted > 0
        if accepted:
            self.misses = 0
            wanted = 2 * self.length if accepted == len(self.tokens) else accepted
            self.length = next((length for length in GUESSED_AT_ONCE if length >= wanted), GUESSED_AT_ONCE[-1])
        else:
            self.length, self.misses = FEWEST, self.misses + 1
            self.rest = 0 if is_free else min(LONGEST_REST, 2**self.misses - 1)


@dataclass
class Worth:
    """Whether a pass carries guesses for less than they bring: the number of rows that it carries for free is found by the
    passes themselves, since it is that of this plan on this machine beside whatever else it does. Seconds that wrong guesses
    have cost, and right ones have not brought back, stay few beside those of all passes."""

    plain_first: int = PLAIN_FIRST
    plain_seconds: float = 0.0  # a mean of passes without guesses; of the first ones, the quickest
    plain_passes: int = 0
    extra_seconds: float = 0.0  # a mean of what passes with guesses took more
    tried_passes: int = 0
    all_seconds: float = 0.0
    debt: float = 0.0  # seconds

    def note(self, seconds: float, tried: int, accepted: int, rows: int) -> None:
        """A pass that decoded these rows. A token more of one of them is worth its share of a pass."""
        self.all_seconds += seconds
        if not tried:
            self.plain_passes += 1
            is_first = self.plain_passes <= self.plain_first
            quickest = seconds if self.plain_passes == 1 else min(seconds, self.plain_seconds)
            self.plain_seconds = quickest if is_first else _mean(self.plain_seconds, seconds, self.plain_passes)
            return
        self.tried_passes += 1
        extra = seconds - self.plain_seconds
        self.extra_seconds = _mean(self.extra_seconds, extra, self.tried_passes)
        self.debt = max(0.0, self.debt + extra - accepted * self.plain_seconds / rows)

    @property
    def is_free(self) -> bool:
        """Whether guesses were found to cost nothing, as where passes wait for weights."""
        return self.tried_passes >= TRIED_FIRST and self.extra_seconds <= FREE * self.plain_seconds

    @property
    def is_there(self) -> bool:
        allowed = GRANTED * self.plain_seconds + ALLOWED * self.all_seconds
        return self.plain_passes >= self.plain_first and self.debt <= allowed


def _mean(before: float, newest: float, count: int) -> float:
    weight = max(WEIGHT, 1 / count)
    return (1 - weight) * before + weight * newest


class Drafts:
    """The guesses of the rows of a batch."""

    def __init__(self, most: int, is_recorded: bool = False, is_waited: bool = True, clock: Clock = time.perf_counter) -> None:
        """`most`: tokens of all rows in a pass that are guessed, or taken otherwise behind the newest. `is_recorded`: passes
        become quicker once they are recorded. `is_waited`: passes wait for weights, so that a first guess is likely cheap;
        else rows guess first where much speaks for it."""
        self._needs = SHORTEST if is_waited else LONGEST
        self._most = most
        self._clock = clock
        self._rows: dict[int, _OfRow] = {}  # by their places in the workload
        self._worth = Worth(PLAIN_FIRST + TO_RECORD * is_recorded)
        self._begun: float | None = None  # when the pass that is computed began, if it is one of steps alone
        self.drafted = Drafted()

    def of(self, row: RowState) -> Sequence[int]:
        """The tokens that are tried behind the known ones of a row, in the pass that is computed."""
        known = self._rows.get(row.row)
        return () if known is None else known.tokens

    def propose(self, rows: Sequence[RowState], most_of_each: Sequence[int]) -> None:
        """Guesses for the next pass of these rows; `most_of_each`: tokens that there is room for behind the known ones."""
        self._rows = {row.row: self._rows.get(row.row) or _OfRow(self._needs) for row in rows}
        room = (self._most - sum(row.ahead for row in rows)) // len(rows) if self._worth.is_there else 0
        for row, most in zip(rows, most_of_each, strict=True):
            left = row.max_tokens - row.num_generated - 1  # no token follows the last one
            self._rows[row.row].guess(row.seen, min(room, left, most))

    def begin(self, only_steps: bool) -> None:
        """A pass begins; `only_steps`: no prompts are read in it."""
        self._begun = self._clock() if only_steps else None

    def judge(self, rows: Sequence[RowState], accepted: Sequence[int]) -> None:
        """The pass is over in which guesses of these rows were tried, and so many of each were right."""
        now = Drafted(sum(len(self.of(row)) for row in rows), sum(accepted))
        for row, right in zip(rows, accepted, strict=True):
            self._rows[row.row].judge(right, self._worth.is_free)
        self.drafted = self.drafted.plus(now)
        if self._begun is not None:
            self._worth.note(self._clock() - self._begun, now.proposed, now.accepted, len(self._rows))
