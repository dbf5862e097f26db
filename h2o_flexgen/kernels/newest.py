"""The arguments about slots for kernels of a decode step: where each row's newest token goes, what a policy has noted of the
others, and which of them may be evicted."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Newest(NamedTuple):
    """The newest token of each row, which is written behind the others."""

    rows: Tensor  # (rows,): 0, 1, 2 ...
    slots: Tensor  # (rows,): its slot
    held: Tensor  # (rows,): slots in use, its own included
    positions: Tensor  # (rows, 1): its position in the text


class Notes(NamedTuple):
    """What a policy that evicts knows of each slot of a KV head."""

    positions: Tensor  # (rows, heads, slots), int32
    scores: Tensor | None  # alike, fp32, where tokens rank by attention
    by_chance: bool = False  # without scores, tokens rank by chance instead of by age
    worth: Tensor | None = None  # as scores, which it weighs; without scores, tokens rank by it. It is known when a token comes


class Leaving(NamedTuple):
    """The tokens that may be evicted, as (rows, 1, 1), and how many slots a row then holds."""

    start: Tensor  # tokens with positions from here
    end: Tensor  # up to but not including this one may go
    after: Tensor  # slots that a row holds in the end
