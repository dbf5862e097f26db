"""Sharing: what requests that arrive share, decided when they take their seats.

A row begins with the kept prefix that agrees with its prompt. If the prompts of other rows, waiting or earlier ones, agree with
it further, the longer beginning is computed as a prefix for them all, after a copy of what is kept of it. Later rows find it.
Where prompts differ, beginnings are cut to multiples of the least length that is worth sharing, so that chance does not make
many different prefixes of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from threading import Lock
from typing import NamedTuple

from h2o_flexgen.core.prefix_groups import Beginnings, SharedPrefix, bytes_of, common_tokens
from h2o_flexgen.engine.stores.prefix_store import Prefix, PrefixStore
from h2o_flexgen.planning.plan import Plan


class SharedBeginning(NamedTuple):
    """The prefix that a row begins with, and the source from which a new prefix is copied first."""

    prefix: SharedPrefix | None = None
    source: SharedPrefix | None = None
    spared: int = 0  # tokens that need not be computed for it


NOTHING = SharedBeginning()


class Sharing:
    def __init__(self, plan: Plan) -> None:
        self._least = plan.least_prefix
        self._own = plan.least_own
        self._seen = Beginnings()
        self._looking = Lock()  # requests come in any thread

    def take_note(self, come: Iterable[tuple[Sequence[int], int]]) -> None:
        """Records requests that have come: their tokens, and how many rows each has."""
        with self._looking:
            for ids, rows in come:
                self._seen.add(ids, rows)

    def choice(self, ids: Sequence[int], kept: PrefixStore, room: int) -> SharedBeginning:
        """What a row with this prompt shares. `room`: the tokens of prefixes that may be computed now."""
        most = len(ids) - self._own
        known = self._known(ids[: max(0, most)], kept)
        spared = 0 if known is None else known.tokens
        with self._looking:
            common = self._seen.common(ids)
        wanted = min(common, most, kept.room_beside(known), spared + room)
        if wanted < most:
            wanted = self._whole_pieces(wanted)
        if wanted - spared >= self._least:
            return SharedBeginning(kept.new(wanted), known, spared)
        return SharedBeginning(known, None, spared)

    def _known(self, ids: Sequence[int], kept: PrefixStore) -> SharedPrefix | None:
        """The longest kept prefix that a text begins with; of equals the one with most users, which attend to it together."""
        text = bytes_of(ids)
        found = ((self._agreeing(prefix, text, kept.may_cut), prefix) for prefix in kept)
        tokens, _, group = max(((tokens, one.users, one.shared.group) for tokens, one in found), default=(0, 0, 0))
        return SharedPrefix(group, tokens) if tokens >= self._least else None

    def _agreeing(self, prefix: Prefix, text: bytes, may_cut: bool) -> int:
        """The first tokens of a prefix that a row with this text may share."""
        tokens = common_tokens(prefix.text, text)
        if tokens == prefix.shared.tokens:
            return tokens
        return self._whole_pieces(tokens) if may_cut else 0

    def _whole_pieces(self, tokens: int) -> int:
        return tokens // self._least * self._least
