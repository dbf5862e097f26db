"""Recall: a decode step attends a share of the tokens that are kept, which its own query chooses by an index of keys. All are
kept, or those that a policy leaves; to this a token that a step did not attend got no attention in it.

How many these are is said here alone, and how the index is stored. Which they are says kernels/chosen_slots.py.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.formats.table import BY_BITS, FORMATS

FIRST, RECENT = 4, 16  # tokens that every step attends: the first of a row, and the newest, its own among them
LEAST = FIRST + RECENT
NEWEST = 1  # of these, where tokens took over slots of others: which are the recent ones, no slot says
RECALLED = 0.1  # the share that a search may take where it is allowed to
ALL = 1.0  # the share with which nothing is chosen
INDEX = BY_BITS[4]  # the format in which keys are compared with queries
UNLIKE = 1 / 3  # of what a head chooses, the part that none before it has chosen, as measured
ROOM = 2  # times what a step wants, for what steps before it have read
REPEATED = 5 / 6  # of what a step wants, the part that is in this room, as measured
FINENESS = 1e-9  # a tenth of 30 tokens is 3 of them, whatever a product of floating point says


def attended(share: float, held: int) -> int:
    """The tokens that a step attends of those that a row holds, the step's own included."""
    return held if share == ALL else min(held, max(LEAST, ceil(share * held - FINENESS)))


class Choosing(NamedTuple):
    """How the KV heads of a layer choose, and what a step therefore brings from a disk: the tokens that any head has chosen."""

    share: float
    heads: int  # that choose by themselves
    in_order: bool = True  # slots have the order of the text; else heads hold other tokens in them, and share no newest ones
    reuses: bool = False  # what steps before it have read is in memory

    @property
    def _newest(self) -> int:
        """Those of the newest that all heads choose, without the step's own: it is not on disk yet."""
        return (RECENT if self.in_order else NEWEST) - 1

    @property
    def _always(self) -> int:
        return FIRST + self._newest

    @property
    def _always_brought(self) -> int:
        """Those of them that every step brings: all, or none where they are still in memory."""
        return 0 if self.reuses else self._always

    def most_brought(self, held: int) -> int:
        """The tokens that a step brings at most, which holds so many with its own. Heads may choose alike."""
        chosen = attended(self.share, held)
        if chosen == held:
            return held - 1
        return min(held - 1, chosen - 1 + (self.heads - 1) * (chosen - 1 - self._always))

    def usually_brought(self, held: int) -> float:
        """The tokens that a step is expected to bring."""
        wanted = self._usually_wanted(held)
        if not self.reuses:
            return wanted
        return (1 - REPEATED) * max(0.0, wanted - self._always)

    def _usually_wanted(self, held: int) -> float:
        """The tokens that any head is expected to choose. Each further head adds a part of what it chooses: of SmolLM2's three
        heads a third (docs/log/eviction.md). Where slots have no order, heads choose as if they drew them."""
        chosen = attended(self.share, held) - 1
        own, others = max(0, chosen - self._always), max(1, held - 1 - self._always)
        if not self.in_order:
            return chosen - own + others * (1 - (1 - own / others) ** self.heads)
        return float(min(self.most_brought(held), chosen + UNLIKE * (self.heads - 1) * own))

    def kept(self, held: int) -> int:
        """The tokens for which there is room in memory, where what steps have read stays there, with a step's own."""
        return min(held, ceil(ROOM * self._usually_wanted(held)) + 1)

    def page_groups_brought(self, held: int, tokens: int) -> float:
        """The page groups of so many tokens that a step is expected to bring: one comes whole if any of its tokens is chosen.
        The first and the newest tokens lie side by side. What is chosen of the others is taken to lie anywhere."""
        on_disk, always, groups = held - 1, self._always_brought, ceil((held - 1) / tokens)
        if on_disk <= always:
            return groups
        chosen = (self.usually_brought(held) - always) / (on_disk - always)
        newest = (self._newest + tokens - 1) / tokens if self._newest else 0  # they begin anywhere in one
        goes_on = (tokens - 1) / tokens  # the one that has the step's own token as well, if there is one
        at_ends = min(groups, goes_on if self.reuses else ceil(FIRST / tokens) + newest)
        return at_ends + (groups - at_ends) * (1 - (1 - chosen) ** tokens)


def index_bytes(share: float, spec: ModelSpec, is_copy: bool = False) -> int:
    """Bytes of the index for one slot of a KV head. Keys that are stored in its format are their own index. Where they lie
    elsewhere, it is a copy of them."""
    if share == ALL or (spec.kv_codec == INDEX and not is_copy):
        return 0
    return FORMATS[INDEX].nbytes((spec.head_dim,), spec.itemsize)
