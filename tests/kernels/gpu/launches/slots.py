"""Slots of OPT-30B with 8 rows, plain and in 4 bits, as a decode step works on them."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_flexgen.formats.grouped import Grouped
from h2o_flexgen.formats.kernel_table import MAX, SUM
from h2o_flexgen.kernels.append import RotationAngles
from h2o_flexgen.kernels.evict import NUMBER, Leaving, Missing, Newest, Notes, RowsOfBoth
from h2o_flexgen.kernels.gpu.append import append, append_coded, rotate
from h2o_flexgen.kernels.gpu.evict import bring_slots, evict, gather_slots, take_slots
from tests.kernels.gpu.launch import Launch

ROWS, HEADS, SLOTS, DIM, PACKED = 8, 56, 543, 128, 72
MANY = 100_000


def made(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def image(width: int, dtype: torch.dtype) -> Tensor:
    return made(SLOTS, 2, ROWS, HEADS, width, dtype=dtype).permute(1, 2, 3, 0, 4)


PLAIN, CODED = image(DIM, torch.float16), image(PACKED, torch.uint8)
COUNTS, PLACES = made(ROWS, dtype=torch.int64), made(ROWS, 1, 1, dtype=torch.int64)
NEWEST = Newest(COUNTS, COUNTS, COUNTS, COUNTS[:, None])
POSITIONS = made(ROWS, HEADS, SLOTS, dtype=torch.int32)
SCORES = made(ROWS, HEADS, SLOTS, dtype=torch.float32)
NEW, TURN = made(ROWS, 1, HEADS, DIM), RotationAngles(made(ROWS, 1, 1, DIM // 2), made(ROWS, 1, 1, DIM // 2))


def evicted(
    of: Tensor, scores: Tensor | None, by_chance: bool = False, gathers: str = SUM, worth: Tensor | None = None
) -> None:
    evict(of, Notes(POSITIONS, scores, by_chance, worth), NEWEST, Leaving(PLACES, PLACES, PLACES), scores, 0.9, gathers)


def appended() -> None:
    append(PLAIN, NEWEST, NEW, NEW, NEW, TURN, Notes(POSITIONS, SCORES, worth=SCORES), made(ROWS, HEADS, dtype=torch.float32))


def appended_as_they_are() -> None:
    coded = made(ROWS, 1, HEADS, PACKED, dtype=torch.uint8)
    append(CODED, NEWEST, NEW, coded, coded, None, None)


def appended_in_4_bits(turn: RotationAngles | None) -> None:
    noted = Notes(POSITIONS, SCORES, worth=SCORES), made(ROWS, HEADS, dtype=torch.float32)
    append_coded(CODED, NEWEST, NEW, NEW, NEW, turn, *noted, Grouped(4))


def rotated(rows: int, tokens: int, heads: int) -> None:
    rotate(made(rows, tokens, heads, DIM), RotationAngles(*(made(rows, tokens, 1, DIM // 2) for _ in range(2))))


def gathered(of: Tensor) -> None:
    nbytes = ROWS * HEADS * (NUMBER.itemsize + 2 * of.shape[-1] * of.itemsize)
    gather_slots(of, made(ROWS, HEADS, dtype=torch.int64), made(nbytes, dtype=torch.uint8))


def taken() -> None:
    index = made(1, 1, 400, dtype=torch.int64).expand(ROWS, -1, -1)
    take_slots(made(ROWS, 512, HEADS, DIM).transpose(1, 2), index, PLAIN[0, :, :, :400])


def brought(of: Tensor, most: int) -> None:
    """From the host: what a step has chosen; and back to it what it has changed."""
    chosen, numbers = made(ROWS, HEADS, most, dtype=torch.int64), made(ROWS, dtype=torch.int64)
    bring_slots(of, of, chosen, RowsOfBoth(source=numbers), Missing(numbers, numbers))
    bring_slots(of, of, chosen[..., :1], RowsOfBoth(target=numbers))


LAUNCHES = (
    Launch("evict by score", lambda: evicted(PLAIN, SCORES), kernels=1, narrowest={"evict_one": 4}),
    Launch("evict by the highest share", lambda: evicted(PLAIN, SCORES, gathers=MAX), narrowest={"evict_one": 4}),
    Launch("evict by score and worth", lambda: evicted(PLAIN, SCORES, worth=SCORES), narrowest={"evict_one": 4}),
    Launch("evict by age", lambda: evicted(CODED, None), narrowest={"evict_one": 4}),
    Launch("evict by chance", lambda: evicted(CODED, None, by_chance=True), narrowest={"evict_one": 4}),
    Launch("append and rotate", appended, registers=64, kernels=1),
    Launch("append bytes of a codec", appended_as_they_are, registers=64, kernels=1, narrowest={"append_heads": 8}),
    Launch("append and encode", lambda: appended_in_4_bits(None), registers=64, kernels=1),
    Launch("append, rotate and encode", lambda: appended_in_4_bits(TURN), registers=64, kernels=1),
    Launch("rotate a long text", lambda: rotated(4, MANY, HEADS), registers=64),
    Launch("rotate what heads hold", lambda: rotated(MANY, 512, 1), registers=64),
    Launch("gather what changed", lambda: gathered(PLAIN), registers=64, narrowest={"move_slots": 8}),
    Launch("bring slots", lambda: brought(PLAIN, 400), registers=64, kernels=2, narrowest={"bring_some": 8}),
    Launch("bring packed slots", lambda: brought(CODED, 400), registers=64, narrowest={"bring_some": 4}),
    Launch("take slots", taken, registers=64, narrowest={"move_slots": 8}),
)
