"""The bytes of keys and values that the rows of a running block hold at a moment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from h2o_flexgen.core.seats import SeatNeed
from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.planning.held_kv import HeldKV


class HeldBytes(NamedTuple):
    held: int
    of_seats: int  # that can be held at most


def held_bytes(planned: BlockPlan, rows: Sequence[tuple[RowState, SeatNeed | None]]) -> HeldBytes:
    """`rows`: each with its need for slots of its own, once that is known. Shared prefixes are not counted."""
    kv = HeldKV(planned.spec, planned.levels, planned.block)
    places = [(layer, batch) for layer in planned.spec.kv_layers for batch in range(len(planned.block.batches))]
    of_head = planned.spec.kv_bytes_per_head
    heads = [sum(map(len, level.heads)) for level in planned.levels]
    needed = ((row, need or SeatNeed(row.prompt_len, row.max_tokens)) for row, need in rows)
    held = sum(of_head * own * _slots(planned, level, *each) for each in needed for level, own in enumerate(heads))
    return HeldBytes(held, sum(kv.image_bytes(*place) for place in places))


def _slots(planned: BlockPlan, level: int, row: RowState, need: SeatNeed) -> int:
    """Slots that a row holds in each head of a level, between two passes."""
    return planned.levels[level].policy.alone(need).counts(row.num_generated)[0]
