"""Sizes of kernels, without torch: the numbers that C and Python share, and the working room of prompt attention.

The numbers are in kernels/sizes.h, which C includes and this file reads. Where the parts of a room lie is worked out here, and
C is told.
"""

from __future__ import annotations

import re
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

FLOAT_BYTES = 4
DTYPES = ("bfloat16", "float32", "float16")  # types of values that kernels read, as C numbers them
TWIN_VALUES = 1 << 20  # values that twins encode or decode at once: torch's temporaries stay small
DEVICE_TWIN_VALUES = 1 << 24  # on a device, where each part costs a dozen launches
ROOM_CHUNK = 1 << 20  # bytes of the room of recorded programs that are allocated at least
STATE_CHUNK = 64  # tokens of a prompt that the twins take through states at once
SCORED_BYTES = 16 << 20  # bytes of a prompt's attention that torch scores at once
WIDTH_OF_TORCH = 256  # values of a head up to which torch's own attention holds no n x n scores on GPUs
STEP_CHUNK = 256  # slots that a program of a GPU attends in a step
RANKED_AT_ONCE = 1 << 22  # slots of heads that a GPU ranks at once
DOT_PROGRAMS, DOT_OUTPUTS = 512, 64  # of a product on tensor cores of few rows: they keep any GPU busy; of each program


class Numbers(NamedTuple):
    """The numbers of sizes.h."""

    kernels_version: int
    step_head_values: int
    register_values: int
    prompt_keys: int
    prompt_queries: int
    many_queries: int
    many_values: int
    step_queries: int
    step_slots: int
    step_block: int
    prompt_heads: int
    tile_rows: int
    shared_keys: int
    state_keys: int
    convolved: int
    queued_reads: int
    shared_queries: int


@cache
def shared() -> Numbers:
    header = (Path(__file__).parents[1] / "kernels" / "sizes.h").read_text(encoding="ascii")
    return Numbers(**{name.lower(): int(number) for name, number in re.findall(r"^#define (\w+) (\d+)", header, re.MULTILINE)})


def twin_values(device: str) -> int:
    """Values that a twin encodes or decodes at once on a kind of device."""
    return TWIN_VALUES if device == "cpu" else DEVICE_TWIN_VALUES


def mask_bytes(group: int) -> int:
    """Bytes for torch to say whether a query sees a key: as it is, and for each head of a group, in two formats."""
    return 1 + group * (1 + FLOAT_BYTES)


class PromptRoom(NamedTuple):
    """A thread's room for prompt attention, in float32 values: the keys of a head (from 0 on), its values, what each key got,
    and for a block of queries their scores, themselves and their outcome. C has the same fields in this order."""

    keys: int  # with the filling of their last tiles
    dim: int  # of a head, in whole registers
    stride: int  # values from one query to the next: a register more than keys, or all want the same place of the cache
    values_at: int
    got_at: int
    scores_at: int
    queries_at: int
    out_at: int
    end: int

    @classmethod
    def of(cls, keys: int, dim: int) -> PromptRoom:
        sizes = shared()
        keys, dim = _rounded_up(keys, sizes.prompt_keys), _rounded_up(dim, sizes.register_values)
        stride, queries = keys + sizes.register_values, sizes.prompt_queries
        parts = (keys * dim, keys * dim, keys, queries * stride, queries * dim, queries * dim)
        return cls(keys, dim, stride, *accumulate(parts))

    @classmethod
    def of_shared(cls, dim: int) -> PromptRoom:
        """The same for a piece of a text that many queries share; their outcome stays there until all pieces are over."""
        laid = cls.of(shared().shared_keys, dim)
        return laid._replace(end=laid.out_at + shared().shared_queries * laid.dim)


class TiledRoom(NamedTuple):
    """A thread's room for attention of a step in tiles of registers, in words: queries in pairs (from 0 on), values of some
    columns and of the next ones in pairs, the last slots, scores of a piece and of the next one, shares in two halves, the
    outcome, and both pieces where slots are packed. C has the same fields in this order."""

    values_at: int
    last_at: int
    scores_at: int
    shares_at: int
    out_at: int
    unpacked_at: int
    end: int

    @classmethod
    def of(cls, dim: int) -> TiledRoom:
        sizes = shared()
        queries, slots, block, dim = sizes.step_queries, sizes.step_slots, sizes.step_block, _rounded_up(dim, sizes.step_block)
        last, shares = block * dim // 2, queries * slots
        parts = (queries * dim // 2, slots * block, last, 2 * shares, shares, queries * dim, slots * dim)
        return cls(*accumulate(parts))


class ManyQueries(NamedTuple):
    """Attention of a step where many query heads attend a KV head, or fewer wide ones: their number, filled up to whole tiles,
    the slots of each, filled up to whole pieces, and the room of a thread, whichever tiles are used."""

    queries: int
    stride: int
    room: PromptRoom
    tiled: TiledRoom

    @classmethod
    def of(cls, group: int, slots: int, dim: int) -> ManyQueries | None:
        """None: there are few, and they are narrow."""
        sizes = shared()
        if group <= sizes.many_queries and group * dim <= sizes.many_values:
            return None
        room, tiled = PromptRoom.of(sizes.shared_keys, dim), TiledRoom.of(dim)
        queries = max(_rounded_up(group, sizes.tile_rows), _rounded_up(group, sizes.step_block))
        return cls(queries, _rounded_up(slots, sizes.prompt_keys), room._replace(end=max(room.end, tiled.end)), tiled)

    def kept(self, units: int) -> int:
        """Values that are kept where it is wanted what slots of so many KV heads got: shares, and a summary of each query."""
        return units * self.queries * (self.stride + 2)

    def passing(self, threads: int) -> int:
        """The same where it is not wanted."""
        return threads * shared().prompt_queries * self.stride


def choosing_room(units: int, group: int, slots: int, threads: int, together: bool = False) -> int:
    """Values of the room in which slots are chosen for so many KV heads of all rows: shares of each query head of one and what
    slots are worth, for as many as are worked on at once. Those that choose together all keep what slots are worth."""
    if together:
        return (units + threads * group) * slots
    return min(units, threads) * (group + 1) * slots


def ranked_rows(kv_heads: int, slots: int) -> int:
    """Rows of which a GPU ranks the slots at once."""
    return max(1, RANKED_AT_ONCE // (kv_heads * slots))


def prompt_parts(group: int) -> int:
    """The parts of a KV head's query heads that attend prompts one by one: more than one where these are many."""
    sizes = shared()
    return 1 if group <= sizes.many_queries else -(-group // sizes.prompt_heads)


def prompt_threads(rows: int, parts: int, threads: int) -> int:
    """Threads that attend prompts, each in a room of its own: one works on a whole part of a row."""
    return min(threads, rows * parts)


def _rounded_up(count: int, to: int) -> int:
    return -(-count // to) * to
