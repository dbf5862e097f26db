"""Slots that are chosen in C: those that float64 would choose, where it tells them apart. Attended in place, they give the bits
of attention over copies of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from h2o_flexgen.kernels import native as kernels
from h2o_flexgen.kernels.chosen_slots import Always, choose_slots, choose_slots_twin, chosen_attention, side_by_side
from h2o_flexgen.kernels.decode_attention import KVSlots, decode_attention
from h2o_flexgen.kernels.more_keys import More
from h2o_flexgen.kernels.recording import CallRecording, WorkingRoom
from h2o_flexgen.kv.slots import Coding
from tests.helpers.all_of import all_of
from tests.kernels.test_cap import capped
from tests.kernels.variants import VARIANTS, used

ALWAYS = Always(4, 16)
SHAPES = [  # rows, kv_heads, group, slots, dim
    (2, 2, 1, 70, 64), (2, 1, 4, 2100, 128), (1, 2, 3, 130, 80), (3, 1, 2, 90, 3), (2, 2, 1, 300, 128), (1, 1, 9, 90, 200),
    (1, 2, 20, 60, 72), (1, 1, 7, 1025, 128), (2, 1, 40, 90, 576),
]  # fmt: skip
NEAR = {torch.float32: 1e-5, torch.bfloat16: 3e-4, torch.float16: 3e-4}  # between what slots are worth, of themselves


def index_of(keys: Tensor) -> KVSlots:
    coding = Coding("group4", torch.float32, keys.shape[3])
    return KVSlots(coding.encode(keys.float()), coding.format)


def drawn(shape: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, kv_heads, group, slots, dim = shape
    draw = torch.Generator().manual_seed(sum(shape))
    q = (scale * torch.randn(rows, kv_heads, group, dim, generator=draw)).to(dtype)
    keys = torch.randn(rows, kv_heads, slots, dim, generator=draw)
    held = torch.randint(slots // 2, slots + 1, (rows,), generator=draw)
    held[0] = slots
    counts = torch.tensor([min(one, max(20, one // 5)) for one in held.tolist()])
    return q, keys, held, counts


def worth_of(q: Tensor, index: KVSlots, held: int, more: Tensor | None, cap: float | None) -> Tensor:
    """What the slots of one row are worth (kv_heads, slots), in float64."""
    keys = Coding(index.format, torch.float32, q.shape[-1]).decode(index.data).double()[:, :held]
    scores = capped(q.double() @ keys.transpose(1, 2) * q.shape[-1] ** -0.5, cap)
    if more is not None:
        scores = torch.cat((scores, more.double().view(*scores.shape[:2], 1)), dim=-1)
    return scores.softmax(-1)[..., :held].sum(1)


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"dtype": list(NEAR), "shape": SHAPES, "form": ["plain", "more", "cap", "steep"]})
def test_the_best_are_chosen(variant: str, dtype: torch.dtype, shape: tuple[int, ...], form: str) -> None:
    q, keys, held, counts = drawn(shape, dtype, 30.0 if form == "steep" else 1.0)
    near = NEAR[dtype] * (100 if form == "steep" else 1)  # scores are larger, and so is what they are off by
    rows, kv_heads, group, slots, _ = shape
    index, cap = index_of(keys), 2.0 if form == "cap" else None
    more = More(torch.linspace(-2, 3, rows * kv_heads * group).view(rows, 1, -1), None) if form == "more" else None
    with used(variant):
        found = choose_slots(q, index, held, counts, slots, ALWAYS, more, cap)
    assert found.shape == (rows, kv_heads, slots) and found.dtype == torch.int64
    assert_best(found, q, index, held, counts, near, more, cap)


def assert_best(
    found: Tensor,
    q: Tensor,
    index: KVSlots,
    held: Tensor,
    counts: Tensor,
    near: float,
    more: More | None = None,
    cap: float | None = None,
    together: bool = False,
) -> None:
    """Asserts that those are chosen which float64 would choose, but for what differs by less than `near` of it."""
    for row, (holds, count) in enumerate(zip(held.tolist(), counts.tolist())):
        beside = None if more is None else more.scores[row, 0]
        worth = worth_of(q[row], KVSlots(index.data[row], index.format), holds, beside, cap)
        worth = worth.sum(0, keepdim=True).repeat(len(worth), 1) if together else worth
        worth[:, : ALWAYS.first] = worth[:, -ALWAYS.recent :] = torch.inf
        for head in range(len(worth)):
            own, behind = found[row, head, :count], found[row, head, count:]
            assert all(one < other for one, other in pairwise(own.tolist())) and own[-1] < holds and not behind.any()
            is_chosen = torch.zeros(holds, dtype=torch.bool).index_fill(0, own, True)
            left = worth[head][~is_chosen]
            assert not len(left) or worth[head][is_chosen].min() >= left.max() * (1 - near)


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"dtype": list(NEAR), "shape": SHAPES, "form": ["plain", "more"]})
def test_heads_that_choose_together_choose_what_is_best_for_all(
    variant: str, dtype: torch.dtype, shape: tuple[int, ...], form: str
) -> None:
    q, keys, held, counts = drawn(shape, dtype, 1.0)
    rows, kv_heads, group, slots, _ = shape
    index = index_of(keys)
    more = More(torch.linspace(-2, 3, rows * kv_heads * group).view(rows, 1, -1), None) if form == "more" else None
    with used(variant):
        found = choose_slots(q, index, held, counts, slots, ALWAYS, more, None, True)
        for threads in (1, 16):
            with in_threads(threads):
                assert torch.equal(choose_slots(q, index, held, counts, slots, ALWAYS, more, None, True), found)
    twin = choose_slots_twin(q, index, held, counts, slots, ALWAYS, more, None, True)
    for one in (found, twin):
        assert torch.equal(one, one[:, :1].expand_as(one))
        assert_best(one, q, index, held, counts, NEAR[dtype], more, together=True)


@contextmanager
def in_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"dtype": list(NEAR), "group": [1, 4]})
def test_of_equals_the_older_are_chosen(variant: str, dtype: torch.dtype, group: int) -> None:
    q, keys, _, _ = drawn((2, 1, group, 1500, 64), dtype)
    keys[:, :, 100:] = keys[:, :, 100:101]  # equal ones in two pieces
    held, counts = torch.tensor([1500, 1400]), torch.tensor([700, 30])
    index = index_of(keys)
    with used(variant):
        found = choose_slots(q, index, held, counts, 700, ALWAYS)
    twin = choose_slots_twin(q, index, held, counts, 700, ALWAYS)
    assert torch.equal(found, twin)
    first = [slot for slot in found[0, 0].tolist() if 100 <= slot < 1484]
    assert first == [*range(100, 100 + len(first))] and len(first) > 500


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"dtype": list(NEAR), "group": [1, 4]})
def test_neither_strides_nor_neighbours_nor_threads_nor_what_lies_behind_change_the_choice(
    variant: str, dtype: torch.dtype, group: int
) -> None:
    q, keys, held, counts = drawn((3, 2, group, 2500, 64), dtype)
    index = index_of(keys)
    by_slot = KVSlots(index.data.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3), index.format)
    before = torch.get_num_threads()
    with used(variant):
        expected = choose_slots(q, index, held, counts, 600, ALWAYS)
        assert torch.equal(choose_slots(q, by_slot, held, counts, 600, ALWAYS), expected)
        for row, count in enumerate(held.tolist()):
            index.data[row, :, count:] = 255  # NaN
        for threads in (1, 2, 16):  # more than there are heads, too
            torch.set_num_threads(threads)
            assert torch.equal(choose_slots(q, index, held, counts, 600, ALWAYS), expected)
        torch.set_num_threads(before)
        for row in range(3):
            one = slice(row, row + 1)
            alone = choose_slots(q[one], KVSlots(index.data[one], index.format), held[one], counts[one], 600, ALWAYS)
            assert torch.equal(alone, expected[one])


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"dtype": list(NEAR)})
def test_all_are_chosen_where_as_many_are_asked_for(variant: str, dtype: torch.dtype) -> None:
    q, keys, held, _ = drawn((2, 2, 2, 90, 64), dtype)
    with used(variant):
        whole = choose_slots(q, index_of(keys), held, held, 90, ALWAYS)
    for row, holds in enumerate(held.tolist()):
        assert all(head == [*range(holds), *[0] * (90 - holds)] for head in whole[row].tolist())


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"dtype": list(NEAR), "queries": [slice(0, 1), slice(0, 2)], "is_twin": [False, True]})
def test_what_is_nan_is_worth_nothing(variant: str, dtype: torch.dtype, queries: slice, is_twin: bool) -> None:
    q, keys, held, _ = drawn((2, 2, 2, 90, 64), dtype)
    q[:, :, queries], counts = torch.nan, torch.tensor([30, 25])
    with used(variant):
        found = (choose_slots_twin if is_twin else choose_slots)(q, index_of(keys), held, counts, 40, ALWAYS)
    for row, (holds, count) in enumerate(zip(held.tolist(), counts.tolist())):
        older = range(count - ALWAYS.recent)
        assert all(head[:count] == [*older, *range(holds - ALWAYS.recent, holds)] for head in found[row].tolist())


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"dtype": list(NEAR), "shape": SHAPES, "format": ["plain", "group4", "group8"], "form": ["plain", "more", "cap"]})
def test_attention_of_chosen_slots_in_place_has_the_bits_of_copies(
    variant: str, dtype: torch.dtype, shape: tuple[int, ...], format: str, form: str
) -> None:
    q, keys, held, counts = drawn(shape, dtype)
    rows, kv_heads, group, slots, dim = shape
    coding, most, cap = Coding(format, dtype, dim), int(counts.max()), 2.0 if form == "cap" else None
    each = (keys.to(dtype), keys.flip(2).to(dtype))
    kept = [KVSlots(one if format == "plain" else coding.encode(one), format) for one in each]
    more = More(torch.linspace(-2, 3, rows * kv_heads * group).view(rows, 1, -1), None) if form == "more" else None
    with used(variant):
        chosen = choose_slots(q, index_of(keys), held, counts, most, ALWAYS, more, cap)
        copies = [side_by_side(one, chosen) for one in kept]
        expected, _ = decode_attention(q, *copies, counts, torch.zeros(0), more, None, cap)
        by_slot = [KVSlots(one.data.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3), format) for one in kept]
        for places in (kept, by_slot):
            assert torch.equal(chosen_attention(q, *places, chosen, counts, more, None, cap)[0], expected)
        is_chosen = torch.zeros(rows, kv_heads, slots, dtype=torch.bool).scatter(2, chosen, True)
        for one in kept:
            one.data[~is_chosen] = 255 if one.data.dtype == torch.uint8 else torch.nan
        assert torch.equal(chosen_attention(q, *kept, chosen, counts, more, None, cap)[0], expected)
    assert expected.float().isfinite().all()


@pytest.mark.skipif(not kernels.variants(), reason="there are no kernels in C")
@pytest.mark.parametrize("dtype", list(NEAR))
def test_a_recorded_choice_follows_the_queries_and_what_rows_hold(dtype: torch.dtype) -> None:
    q, keys, held, counts = drawn((2, 2, 4, 600, 64), dtype)
    index, kept, out = index_of(keys), KVSlots(keys.to(dtype)), torch.zeros_like(q)

    def work() -> Tensor:
        chosen = choose_slots(q, index, held, counts, 120, ALWAYS)
        return chosen_attention(q, kept, kept, chosen, counts)[0]

    program = CallRecording.of(lambda: out.copy_(work()), WorkingRoom())
    assert not out.any(), "a recording computes nothing"
    before = out.clone()
    for holds, count in ((600, 120), (500, 100), (30, 30)):
        held.fill_(holds)
        counts.fill_(count)
        q.copy_(torch.randn(q.shape))
        program()
        assert torch.equal(out, work()) and not torch.equal(out, before)
        before = out.clone()
