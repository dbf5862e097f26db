"""Slots in Triton are those of torch, bit for bit: which goes, what moves, what is rotated and appended."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from h2o_flexgen.formats.grouped import Grouped
from h2o_flexgen.formats.kernel_table import MAX, SUM
from h2o_flexgen.kernels.append import RotationAngles, append_twin, rotate_twin
from h2o_flexgen.kernels.evict import (
    NUMBER,
    Leaving,
    Missing,
    Newest,
    Notes,
    RowsOfBoth,
    bring_slots_twin,
    evict_twin,
    gather_slots_twin,
    parts,
    take_slots_twin,
)
from h2o_flexgen.kernels.gpu import evict as evicting
from h2o_flexgen.kernels.gpu.append import append, append_coded, rotate
from h2o_flexgen.kernels.gpu.evict import bring_slots, evict, gather_slots, take_slots
from h2o_flexgen.kernels.group_codes import group_encode_twin

EXACT = (torch.float32, torch.float16)  # the interpreter rounds to bfloat16 towards zero


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def image_of(rows: int, heads: int, slots: int, width: int, dtype: torch.dtype, draw: torch.Generator, sets: int = 2) -> Tensor:
    """As a device has it, slots first, with a row behind those that are alive; any bits, so NaN and infinity as well."""
    nbytes = torch.randint(0, 256, (slots, sets, rows + 1, heads, width * dtype.itemsize), dtype=torch.uint8, generator=draw)
    return nbytes.view(dtype).permute(1, 2, 3, 0, 4)


def on(gpu: torch.device, image: Tensor) -> Tensor:
    """A copy that lies as the image does."""
    return image.permute(3, 0, 1, 2, 4).contiguous().to(gpu, copy=True).permute(1, 2, 3, 0, 4)


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.cpu().contiguous().view(torch.uint8), other.cpu().contiguous().view(torch.uint8))


SHAPES = [
    (3, 4, 50, 36, torch.uint8),
    (1, 1, 1, 5, torch.float16),
    (2, 3, 131, 12, torch.bfloat16),
    (2, 1, 17, 3, torch.float32),
]


@pytest.mark.parametrize(("rows", "heads", "slots", "width", "dtype"), SHAPES)
@pytest.mark.parametrize("by", ["score", "highest", "weighed", "worth", "age", "chance"])
def test_the_same_token_goes_and_takes_along_what_is_noted(
    rows: int,
    heads: int,
    slots: int,
    width: int,
    dtype: torch.dtype,
    by: str,
    gpu: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evicting, "MOST_SLOTS", 64)  # the longest of them are looked at piece by piece
    draw, shape = drawn(slots), (rows, heads, slots)
    image, positions = (
        image_of(*shape, width, dtype, draw, 1 + slots % 2),
        torch.rand(shape, generator=draw).argsort(-1).int() * 2,
    )
    has_scores, gathers = by in ("score", "highest", "weighed"), MAX if by == "highest" else SUM
    scores = torch.randint(0, 4, shape, generator=draw) / 7 if has_scores else None
    got = torch.randint(0, 5, shape, generator=draw) / 9 if has_scores else None
    if scores is not None and got is not None:
        scores[0, 0, 0], scores[-1, -1, 0], got[0, 0, -1] = torch.nan, torch.inf, torch.nan
    if by == "weighed" and scores is not None and got is not None:  # many that nothing attends to
        scores[..., ::2], got[..., ::2] = 0.0, 0.0
    lowest = 1 if by == "weighed" else -2
    worth = torch.randint(lowest, 5, shape, generator=draw) / 3 if by in ("weighed", "worth") else None
    held = torch.randint(1, slots + 1, (rows,), generator=draw)
    for decay, least in ((1.0, 0), (0.97, 5), (0.9, 2 * slots)):  # at last all are protected
        newest = Newest(torch.arange(rows), held - 1, held, held[:, None])
        leaving = Leaving(
            *(torch.full((rows, 1, 1), bound) for bound in (least, 2 * slots - 2)),
            (held - torch.randint(0, 2, (rows,), generator=draw))[:, None, None],
        )
        own = [
            on(gpu, image)[:, :rows],
            *(None if x is None else x.to(gpu, copy=True) for x in (positions, scores, got, worth)),
        ]
        found = evict(
            own[0],
            Notes(own[1], own[2], by == "chance", own[4]),
            Newest(*(x.to(gpu) for x in newest)),
            Leaving(*(x.to(gpu) for x in leaving)),
            own[3],
            decay,
            gathers,
        )
        noted = Notes(positions, scores, by == "chance", worth)
        expected = evict_twin(image[:, :rows], noted, newest, leaving, got, decay, gathers)
        assert torch.equal(found.cpu(), expected) and same(own[0], image[:, :rows]) and same(own[1], positions)
        assert worth is None or same(own[4], worth)
        if scores is not None:  # but which bits a NaN has
            torch.testing.assert_close(own[2].cpu(), scores, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
@pytest.mark.parametrize("shape", [(3, 4, 50, 64, 9), (1, 1, 1, 5, 1), (2, 3, 17, 36, 20), (2, 2, 6, 8, 0), (0, 2, 6, 8, 3)])
@pytest.mark.parametrize("index_heads", ["each", "all"])
def test_slots_that_are_taken_are_those_of_torch_and_nothing_else_changes(
    shape: tuple[int, ...], dtype: torch.dtype, index_heads: str, gpu: torch.device
) -> None:
    rows, heads, slots, width, count = shape
    draw = drawn(sum(shape))
    source = torch.randint(0, 200, (rows, slots, heads, width), generator=draw).to(dtype).transpose(1, 2)
    index = torch.randint(0, slots, (rows, heads if index_heads == "each" else 1, count + 2), generator=draw)[..., 2:]
    found, expected = torch.full((2, rows, heads, count + 3, width), 7).to(dtype)
    target = found.to(gpu)
    take_slots(source.to(gpu), index.to(gpu), target[:, :, 1 : count + 1])
    take_slots_twin(source, index, expected[:, :, 1 : count + 1])
    assert same(target, expected)


@pytest.mark.parametrize(("rows", "heads", "slots", "width", "dtype"), SHAPES)
def test_what_changed_is_gathered_behind_its_numbers(
    rows: int, heads: int, slots: int, width: int, dtype: torch.dtype, gpu: torch.device
) -> None:
    draw = drawn(slots)
    image = image_of(rows, heads, slots, width, dtype, draw)[:, :rows]
    places = torch.randint(0, slots, (rows, heads), generator=draw)
    nbytes = rows * heads * (NUMBER.itemsize + 2 * width * dtype.itemsize)
    found, expected = torch.zeros(nbytes + 3, dtype=torch.uint8, device=gpu), torch.zeros(nbytes + 3, dtype=torch.uint8)
    gather_slots(on(gpu, image), places.to(gpu), found)
    gather_slots_twin(image, places, expected)
    assert same(found, expected)
    numbers, values = parts(expected, places.shape, image)
    assert torch.equal(numbers, places)
    row, head = torch.arange(rows)[:, None], torch.arange(heads)
    assert same(values, image[:, row, head, places])


@pytest.mark.parametrize(("rows", "heads", "slots", "width", "dtype"), SHAPES)
@pytest.mark.parametrize("is_home", ["source", "target"])
@pytest.mark.parametrize("picks", [False, True])
def test_slots_come_from_and_go_to_the_place_of_their_row(
    rows: int, heads: int, slots: int, width: int, dtype: torch.dtype, is_home: str, picks: bool, gpu: torch.device
) -> None:
    draw, most = drawn(slots), min(slots, 21)
    images = [image_of(rows, heads, slots, width, dtype, draw, 1 + slots % 2) for _ in range(2)]
    chosen = torch.rand(rows, heads, slots, generator=draw).argsort(-1)[..., :most].sort(-1).values
    counts = torch.randint(1, most + 1, (rows,), generator=draw)
    newest = chosen[:, 0, 0].clone()  # of other heads it may be chosen or not
    behind = torch.arange(most) >= counts[:, None, None]
    chosen = chosen.masked_fill(behind, slots + 5) if picks else chosen  # what is there is not looked at
    missing = Missing(counts, newest) if picks else None
    numbers = RowsOfBoth(**{is_home: torch.randperm(rows + 1, generator=draw)})
    target = on(gpu, images[1])
    on_gpu = RowsOfBoth(*(None if each is None else each.to(gpu) for each in numbers))
    bring_slots(on(gpu, images[0]), target, chosen.to(gpu), on_gpu, missing and Missing(*(each.to(gpu) for each in missing)))
    bring_slots_twin(*images, chosen, numbers, missing)
    assert same(target, images[1])


def a_turn(rows: int, tokens: int, half: int, dtype: torch.dtype, draw: torch.Generator) -> RotationAngles:
    angles = 50 * torch.randn(rows, tokens, 1, half, generator=draw)
    return RotationAngles(angles.cos().to(dtype), angles.sin().to(dtype))


@pytest.mark.parametrize("dtype", [*EXACT, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "heads", "dim", "half"), [(3, 4, 16, 8), (1, 3, 20, 6), (2, 1, 6, 0), (0, 2, 8, 4)])
def test_heads_are_rotated_as_torch_does_it(
    tokens: int, heads: int, dim: int, half: int, dtype: torch.dtype, gpu: torch.device
) -> None:
    draw = drawn(dim)
    x = torch.randn(2, tokens, heads, 3 * dim, generator=draw).to(dtype)[..., dim : 2 * dim]  # as of a fused matrix
    x[:, :1, 0, -1:], x[:, :1, 0, :1] = torch.nan, torch.inf
    turn = a_turn(2, tokens, half, dtype, draw)
    found, expected = rotate(x.to(gpu), RotationAngles(*(each.to(gpu) for each in turn))).cpu(), rotate_twin(x, turn)
    if dtype in EXACT or gpu.type != "cpu":
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    else:  # three roundings, each off by a unit of the last place
        torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6, equal_nan=True)


@pytest.mark.parametrize("dtype", [*EXACT, torch.uint8])
@pytest.mark.parametrize("turns", [True, False])
@pytest.mark.parametrize("noted", ["nothing", "positions", "scores", "worth"])
@pytest.mark.parametrize("sets", [2, 1])  # keys and values, or keys that have the values in them
def test_the_newest_token_is_appended_as_torch_does_it(
    dtype: torch.dtype, turns: bool, noted: str, sets: int, gpu: torch.device
) -> None:
    rows, heads, group, slots, dim = 3, 2, 3, 7, 20
    if dtype == torch.uint8 and turns:
        return  # what is encoded is not rotated any more
    draw, values = drawn(group), torch.float32 if dtype == torch.uint8 else dtype
    image = image_of(rows, heads, slots, dim, dtype, draw, sets)
    q = torch.randn(rows, 1, heads * group, dim, generator=draw).to(values)
    k, v = (torch.randint(0, 200, (rows, 1, heads, 2 * dim), generator=draw).to(dtype)[..., ::2].contiguous() for _ in range(2))
    turn = a_turn(rows, 1, 6, dtype, draw) if turns else None
    newest = Newest(torch.arange(rows), torch.tensor([3, 0, 6]), torch.tensor([4, 1, 7]), torch.tensor([[3], [9], [12]]))
    kept = torch.full((rows, heads, slots), -1, dtype=torch.int32), *torch.ones(2, rows, heads, slots)
    own, new_worth = (on(gpu, image), *(each.to(gpu, copy=True) for each in kept)), torch.randn(rows, heads, generator=draw)

    def notes(positions: Tensor, scores: Tensor, worth: Tensor) -> Notes | None:
        some = scores if noted == "scores" else None, False, worth if noted == "worth" else None
        return None if noted == "nothing" else Notes(positions, *some)

    there = None if turn is None else RotationAngles(*(each.to(gpu) for each in turn))
    on_gpu = Newest(*(each.to(gpu) for each in newest))
    values_there, v = (v.to(gpu), v) if sets == 2 else (None, None)
    given = q.to(gpu), k.to(gpu), values_there, there, notes(*own[1:]), new_worth.to(gpu)
    found = append(own[0][:, :rows], on_gpu, *given)
    expected = append_twin(image[:, :rows], newest, q, k, v, turn, notes(*kept), new_worth)
    assert same(found, expected) and all(same(*each) for each in zip(own, (image, *kept)))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("turns", [True, False])
@pytest.mark.parametrize(
    ("dim", "dtype", "sets"),
    [(64, torch.float16, 2), (100, torch.float32, 2), (192, torch.float16, 1), (128, torch.bfloat16, 2)],
)
def test_the_newest_token_is_encoded_where_it_is_appended(
    dim: int, dtype: torch.dtype, sets: int, turns: bool, bits: int, gpu: torch.device
) -> None:
    """As if it were rotated, encoded and appended one after the other."""
    if turns and dtype not in EXACT and gpu.type == "cpu":
        return  # products are rounded otherwise there
    rows, heads, group, slots, format, draw = 2, 2, 2, 5, Grouped(bits), drawn(dim)
    image = image_of(rows, heads, slots, format.nbytes((dim,), 0), torch.uint8, draw, sets)
    q, k, v = (
        torch.randn(rows, 1, each, 2 * dim, generator=draw).to(dtype)[..., :dim] for each in (heads * group, heads, heads)
    )
    k[0, 0, 0, 3], v[1, 0, 1, dim - 1], v[0, 0, 0] = torch.nan, torch.inf, 2.5
    turn = a_turn(rows, 1, dim // 4, dtype, draw) if turns else None
    newest = Newest(torch.arange(rows), torch.tensor([3, 0]), torch.tensor([4, 1]), torch.tensor([[3], [9]]))
    positions, (scores, worth) = torch.full((rows, heads, slots), -1, dtype=torch.int32), torch.ones(2, rows, heads, slots)
    new_worth = torch.randn(rows, heads, generator=draw)
    own = [on(gpu, image), *(each.to(gpu, copy=True) for each in (positions, scores, worth))]
    there = None if turn is None else RotationAngles(*(each.to(gpu) for each in turn))
    on_gpu, notes = Newest(*(each.to(gpu) for each in newest)), Notes(own[1], own[2], False, own[3])
    new = (q.to(gpu), k.to(gpu), v.to(gpu) if sets == 2 else None)
    found = append_coded(own[0][:, :rows], on_gpu, *new, there, notes, new_worth.to(gpu), format)
    if turn is not None:
        q, k = rotate_twin(q, turn), rotate_twin(k, turn)
    codes = [torch.empty(*each.shape[:3], image.shape[-1], dtype=torch.uint8) for each in (k, v)]
    for each, out in zip((k, v), codes):
        group_encode_twin(format, each.reshape(-1, dim), out.view(-1, out.shape[-1]))
    keys, values = codes
    append_twin(
        image[:, :rows], newest, q, keys, values if sets == 2 else None, None, Notes(positions, scores, False, worth), new_worth
    )
    assert same(found, q) and all(same(*each) for each in zip(own, (image, positions, scores, worth), strict=True))
