"""What happens to heads before they are attended is the same in C as in torch, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from h2o_flexgen.kernels.append import RotationAngles, append_twin, rotate_twin
from h2o_flexgen.kernels.evict import Newest, Notes
from h2o_flexgen.kernels.operations import append, halves_apart, rotate
from h2o_flexgen.kernels.row_functions import halves_apart_twin
from tests.helpers.all_of import all_of
from tests.kernels.variants import VARIANTS, used, without

DTYPES = torch.float32, torch.bfloat16, torch.float16


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())


def a_turn(rows: int, tokens: int, half: int, dtype: torch.dtype, draw: torch.Generator) -> RotationAngles:
    angles = 50 * torch.randn(rows, tokens, 1, half, generator=draw)
    return RotationAngles(angles.cos().to(dtype), angles.sin().to(dtype))


@pytest.mark.parametrize("variant", VARIANTS)
@all_of(
    {
        "dtype": DTYPES,
        ("tokens", "heads", "dim", "half"): [(3, 4, 16, 8), (1, 3, 70, 33), (2, 1, 6, 0), (0, 2, 8, 4), (90, 9, 64, 32)],
    }
)
def test_heads_are_rotated(variant: str, dtype: torch.dtype, tokens: int, heads: int, dim: int, half: int) -> None:
    draw = torch.Generator().manual_seed(dim)
    x = torch.randn(2, tokens, heads, 3 * dim, generator=draw).to(dtype)[..., dim : 2 * dim]  # as of a fused matrix
    x[:, :1, 0, -1:], x[:, :1, 0, :1] = torch.nan, torch.inf
    turn = a_turn(2, tokens, half, dtype, draw)
    with used(variant), without("rotate_twin"):
        found = rotate(x, turn)
    assert same(found, rotate_twin(x, turn)) and found.is_contiguous()


@pytest.mark.parametrize("variant", VARIANTS)
@all_of(
    {
        "dtype": [*DTYPES, torch.uint8],
        "turns": [True, False],
        "noted": ["nothing", "positions", "scores"],
        ("rows", "dim", "half"): [(3, 20, 6), (130, 64, 32)],
        "sets": [2, 1],  # keys and values, or keys that have the values in them
    }
)
def test_the_newest_token_is_appended(
    variant: str, dtype: torch.dtype, turns: bool, noted: str, rows: int, dim: int, half: int, sets: int
) -> None:
    if dtype == torch.uint8 and turns:
        return  # what is encoded is not rotated any more
    heads, slots, draw = 2, 7, torch.Generator().manual_seed(dim)
    values = torch.float32 if dtype == torch.uint8 else dtype
    image = torch.randint(0, 200, (sets, rows + 1, heads, slots, dim), generator=draw).to(dtype)
    q = torch.randn(rows, 1, 3 * heads, dim, generator=draw).to(values)
    k, v = (torch.randint(0, 200, (rows, 1, heads, dim), generator=draw).to(dtype) for _ in range(2))
    v = v if sets == 2 else None
    turn = a_turn(rows, 1, half, dtype, draw) if turns else None
    held = torch.randint(1, slots + 1, (rows,), generator=draw)
    newest = Newest(torch.arange(rows), held - 1, held, torch.randint(0, 1000, (rows, 1), generator=draw))
    positions, scores = torch.full((rows + 1, heads, slots), -1, dtype=torch.int32), torch.ones(rows + 1, heads, slots)

    def appended(function, image: Tensor, positions: Tensor, scores: Tensor) -> list[Tensor]:  # type: ignore[no-untyped-def]
        notes = None if noted == "nothing" else Notes(positions[:rows], scores[:rows] if noted == "scores" else None)
        return [function(image[:, :rows], newest, q, k, v, turn, notes), image, positions, scores]

    with used(variant), without("append_twin"):
        found = appended(append, image.clone(), positions.clone(), scores.clone())
    assert all(map(same, found, appended(append_twin, image, positions, scores)))


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"dtype": DTYPES, "shape": [(3, 4, 64), (1, 6), (2, 3, 5, 34), (0, 8), (700, 128)], "paired": [None, 4]})
def test_halves_are_put_apart(variant: str, dtype: torch.dtype, shape: tuple[int, ...], paired: int | None) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    with used(variant), without("halves_apart_twin"):
        found = halves_apart(x, paired)
    assert torch.equal(found, halves_apart_twin(x, paired or shape[-1]))
    assert paired is None or torch.equal(found[..., paired:], x[..., paired:])
