"""Room for the prefixes of requests that are not known yet: how much is kept, where nobody says so.

Seats come first: prefixes get what memory leaves, and no plan is refused because they get none.
"""

from __future__ import annotations

from h2o_flexgen.core.prefixes import ROOM_TOKENS, room_of
from h2o_flexgen.planning.plan import Plan

SEATS_PER_PREFIX = 8  # that room is wanted for a prefix as long as the longest prompt


def prefix_rooms(plan: Plan, prompt_len: int) -> list[int]:
    """Tokens for what requests share, the most that is of use first, and nothing last: of these the first is taken for which
    memory is enough. Nothing where answers would depend on who else has come, unless somebody asks for it."""
    if plan.answers_depend_on_prefixes or not least_prefix_room(plan, prompt_len):
        return [0]
    rooms, room = list[int](), least_prefix_room(plan, prompt_len) * max(1, plan.block_size // SEATS_PER_PREFIX)
    while room >= plan.least_prefix and room:
        rooms.append(room)
        room = room // 2 // ROOM_TOKENS * ROOM_TOKENS
    return [*rooms, 0]


def least_prefix_room(plan: Plan, prompt_len: int) -> int:
    """Room for one prefix as long as a prompt may have; none where prompts are too short to share any, or none is shared."""
    return room_of(prompt_len - 1) if plan.shares_prefixes and prompt_len > plan.least_prefix else 0
