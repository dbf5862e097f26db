"""Room for the prefixes of requests that are not known yet.

Seats come first: where no room is asked for, prefixes get the memory that seats leave, and no plan is refused because they get
none. Where a room is asked for, they get exactly that, or the plan is refused because it does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from h2o_flexgen.core.allowed_values import Bounds
from h2o_flexgen.core.prefix_groups import ROOM_TOKENS, room_of
from h2o_flexgen.core.workload import MOST_TOKENS
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.workload_plan import DoesNotFit

Made = TypeVar("Made")
SEATS_PER_PREFIX = 8  # for so many seats, room for one prefix as long as the longest prompt is of use
ROOM = Bounds(0, MOST_TOKENS)  # tokens


def prefix_rooms(plan: Plan, prompt_len: int, asked: int | None = None) -> list[int]:
    """Tokens for what requests share, in seats for prompts of this length: the first of them that fits is taken. None where
    answers would depend on which other requests have come, unless it is asked for."""
    if asked is not None:
        return [_checked(plan, asked)]
    rooms, room = list[int](), _of_one(plan, prompt_len) * max(1, plan.block_size // SEATS_PER_PREFIX)
    while room and room >= plan.least_prefix:
        rooms.append(room)
        room = room // 2 // ROOM_TOKENS * ROOM_TOKENS
    return [*rooms, 0]


def rooms_to_search(plan: Plan, prompt_len: int, asked: int | None = None) -> list[int]:
    """The rooms, in tokens, that a search tries in the same way: one prefix, or else none."""
    if asked is not None:
        return [_checked(plan, asked)]
    return list(dict.fromkeys((_of_one(plan, prompt_len), 0)))


def first_that_fits(rooms: Sequence[int], make: Callable[[int], Made]) -> Made:
    """The result with the first room for which memory is enough; raises the error of the last if none is."""
    for room in rooms[:-1]:
        with suppress(DoesNotFit):
            return make(room)
    return make(rooms[-1])


def _of_one(plan: Plan, prompt_len: int) -> int:
    """Room for one prefix as long as a prompt may have; none where none is shared by itself, or prompts are too short."""
    is_shared = plan.shares_prefixes and not plan.answers_depend_on_prefixes
    return room_of(prompt_len - 1) if is_shared and prompt_len > plan.least_prefix else 0


def _checked(plan: Plan, asked: int) -> int:
    room: int = ROOM.value("prefix_room", asked)
    if room and not plan.shares_prefixes:
        off = "they are off, or the model's layers have windows"
        why = f"schedule {plan.schedule!r} cannot" if plan.shared_prefixes else off
        raise ValueError(f"prefix_room is {room}, but no prefixes are shared ({why}); leave prefix_room out")
    if 0 < room < plan.least_prefix:
        raise ValueError(f"prefix_room is {room}, and a prefix has {plan.least_prefix} tokens at least; give more, or 0")
    return room
