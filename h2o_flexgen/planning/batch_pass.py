"""BatchPass: what one batch does in one pass over the weights: the newest tokens of some rows, and prompts, part by part; and
the KV that is moved for it. Cost and pricing read it, whether the rows of a block begin together or come and go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from h2o_flexgen.core.workload import ECHO_TOKENS, Batch, evenly
from h2o_flexgen.policies.occupancy import Occupancy


class Prompts(NamedTuple):
    """Prompts that are read together, after the tokens that their rows hold already."""

    rows: int
    length: int  # of the longest, to which the others are padded
    held: int = 0
    echoes: bool = False  # each is read twice, one copy after the other
    at_once: int | None = None  # the most tokens that are computed at once, of a prompt that has more; None: all

    @property
    def length_computed(self) -> int:
        return 2 * self.length if self.echoes else self.length

    @property
    def tokens(self) -> int:
        return self.rows * self.length_computed

    @property
    def products(self) -> Iterator[int]:
        """The numbers of rows of the products that are made, piece by piece."""
        if self.at_once is None or self.rows > 1 or self.tokens <= self.at_once:
            yield self.tokens
            return
        of_echo = range(0, self.length if self.echoes else 0, ECHO_TOKENS)
        for part in (self.length, *(min(ECHO_TOKENS, self.length - start) for start in of_echo)):
            yield from (piece.stop - piece.start for piece in evenly(0, part, self.at_once))

    @property
    def attended(self) -> float:
        """Keys that a token attends on average."""
        own = self.held + (self.length + 1) / 2
        if not self.echoes:
            return own
        of_echo = self.held + self.length + (min(self.length, ECHO_TOKENS) + 1) / 2
        return (own + of_echo) / 2


class SharedTokens(NamedTuple):
    """Tokens of prefixes that rows share in decode."""

    tokens: int = 0  # of the prefixes, each of which is read once
    attended: int = 0  # by all rows together


NOTHING_SHARED = SharedTokens()


class BatchPass(Protocol):
    """Slots are counted over all rows."""

    @property
    def rows(self) -> int:
        """Rows for which the newest token is computed."""

    @property
    def slots(self) -> int:
        """Slots that these hold before."""

    @property
    def shared(self) -> SharedTokens:
        """The tokens of shared prefixes that these rows attend as well."""

    @property
    def prompts(self) -> Mapping[Prompts, int]:
        """The parts in which prompts are read, and how many of each there are."""

    @property
    def joining(self) -> int:
        """Rows for which the prompt is read."""

    @property
    def evicts(self) -> bool: ...

    @property
    def loaded(self) -> int:
        """Slots that are brought to where they are computed with."""

    @property
    def read(self) -> int:
        """Slots that are read from disk, with those in the journal."""

    @property
    def stored(self) -> int:
        """Slots that are brought back."""

    @property
    def written(self) -> int:
        """Slots that are written to disk."""

    @property
    def changed(self) -> int:
        """Slots that change, of each row its own: what is written where KV lies in pages on disk."""

    @property
    def counts(self) -> Sequence[int]:
        """Slots that each row holds before for which the newest token is computed."""

    @property
    def mean_read(self) -> float:
        """The mean over the passes of a journal."""

    @property
    def mean_written(self) -> float: ...


def products_of(one: BatchPass) -> Mapping[int, int]:
    """The numbers of rows of matrix products, and how many products of each there are."""
    rows = Counter({one.rows: 1} if one.rows else {})
    for part, count in one.prompts.items():
        for tokens in part.products:
            rows[tokens] += count
    return rows


def tokens_of(one: BatchPass) -> int:
    """Tokens that are computed, with pads."""
    return one.rows + sum(count * part.tokens for part, count in one.prompts.items())


def rows_of(one: BatchPass) -> int:
    """Rows for which a token is picked."""
    return one.rows + sum(count * part.rows for part, count in one.prompts.items())


@dataclass(frozen=True)
class StepOfBatch:
    """A step of rows that begin together. Every row is computed with as many slots as the one that holds most."""

    occupancy: Occupancy
    step: int
    prefill_tokens: int

    @property
    def _batch(self) -> Batch:
        return self.occupancy.batch

    @property
    def rows(self) -> int:
        return self._batch.size if self.step else 0

    @cached_property
    def slots(self) -> int:
        return self.rows and self.rows * self.occupancy.held(self.step)

    @property
    def shared(self) -> SharedTokens:
        return NOTHING_SHARED

    @cached_property
    def prompts(self) -> Mapping[Prompts, int]:
        if self.step:
            return {}
        held, counts = self.occupancy.held(0), Counter[Prompts]()
        for part, count in self._batch.kinds_of_parts(self.prefill_tokens).items():
            counts[Prompts(part.size, part.prompt_len, held, part.echoes, self.prefill_tokens)] += count
        return counts

    @property
    def joining(self) -> int:
        return 0 if self.step else self._batch.size

    @cached_property
    def evicts(self) -> bool:
        return self.occupancy.evicts_at(self.step)

    @property
    def loaded(self) -> int:
        return self._batch.size * self.occupancy.held(self.step)

    @property
    def read(self) -> int:
        return self.loaded + self._batch.size * self.occupancy.journal_entries(self.step)

    @property
    def stored(self) -> int:
        return self._batch.size * self.occupancy.stored(self.step)

    @property
    def written(self) -> int:
        return self._batch.size * self.occupancy.written(self.step)

    @property
    def changed(self) -> int:
        if self.step:
            return self.rows
        return sum(self.occupancy.counts(1)) - (0 if self.evicts else sum(self.occupancy.counts(0)))

    @property
    def counts(self) -> Sequence[int]:
        return self.occupancy.counts(self.step) if self.step else ()

    @property
    def mean_read(self) -> float:
        return self._batch.size * self.occupancy.mean_read(self.step)

    @property
    def mean_written(self) -> float:
        return self._batch.size * self.occupancy.mean_written(self.step)
