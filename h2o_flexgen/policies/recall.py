"""Recall: a decode step attends a share of the tokens that are kept, which its own query chooses by an index of keys. All are
kept, or those that a policy leaves; to this a token that a step did not attend got no attention in it.

How many these are is said here alone, and how the index is stored. Which they are says kernels/chosen_slots.py.
"""

from __future__ import annotations

from math import ceil

from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.formats.table import BY_BITS, FORMATS

FIRST, RECENT = 4, 16  # tokens that every step attends: the first of a row, and the newest, its own among them
RECALLED = 0.1  # the share that a search may take where it is allowed to
ALL = 1.0  # the share with which nothing is chosen
INDEX = BY_BITS[4]  # the format in which keys are compared with queries
UNLIKE = 1 / 3  # of what a head chooses, the part that none before it has chosen, as measured
FINENESS = 1e-9  # a tenth of 30 tokens is 3 of them, whatever a product of floating point says


def attended(share: float, held: int) -> int:
    """The tokens that a step attends of those that a row holds, the step's own included."""
    return held if share == ALL else min(held, max(FIRST + RECENT, ceil(share * held - FINENESS)))


def most_brought(share: float, held: int, heads: int) -> int:
    """The tokens that a step brings from a disk at most: its own is not there yet, and heads may choose alike. All choose the
    first and the newest ones."""
    chosen = attended(share, held)
    if chosen == held:
        return held - 1
    return min(held - 1, chosen - 1 + (heads - 1) * (chosen - FIRST - RECENT))


def usually_brought(share: float, held: int, heads: int) -> float:
    """The tokens that a step is expected to bring. Each further head adds a part of what it chooses: of SmolLM2's three heads
    a third (docs/log/eviction.md)."""
    chosen = attended(share, held)
    more = UNLIKE * (heads - 1) * max(0, chosen - FIRST - RECENT)
    return float(min(most_brought(share, held, heads), chosen - 1 + more))


def page_groups_brought(share: float, held: int, heads: int, tokens: int) -> float:
    """The page groups of so many tokens that a step is expected to bring: one comes whole if any of its tokens is chosen. The
    first and the newest tokens lie side by side. What is chosen of the others is taken to lie anywhere."""
    on_disk, always, groups = held - 1, FIRST + RECENT - 1, ceil((held - 1) / tokens)
    if on_disk <= always:
        return groups
    chosen = (usually_brought(share, held, heads) - always) / (on_disk - always)
    at_ends = min(groups, ceil(FIRST / tokens) + (RECENT - 1 + tokens - 1) / tokens)  # the newest begin anywhere in one
    return at_ends + (groups - at_ends) * (1 - (1 - chosen) ** tokens)


def index_bytes(share: float, spec: ModelSpec, apart: bool = False) -> int:
    """Bytes of the index for one slot of a KV head. Keys that are stored in its format are their own index, but where they lie
    on disk, it is `apart`: a copy of them."""
    if share == ALL or (spec.kv_codec == INDEX and not apart):
        return 0
    return FORMATS[INDEX].nbytes((spec.head_dim,), spec.itemsize)
