"""Attention over slots in C against the twin in torch and against float64: every shape of heads, ragged rows, any strides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from h2o_flexgen.formats.kernel_table import MAX, SUM
from h2o_flexgen.kernels.decode_attention import KVSlots, decode_attention_twin
from h2o_flexgen.kernels.operations import decode_attention
from h2o_flexgen.kv.slots import Coding
from tests.helpers.all_of import all_of
from tests.kernels.test_cap import capped
from tests.kernels.variants import VARIANTS, used

SHAPES = [  # rows, kv_heads, group, slots, dim
    (1, 1, 1, 1, 64), (3, 2, 1, 17, 64), (2, 3, 4, 33, 128), (4, 2, 7, 130, 80), (5, 1, 2, 9, 3), (2, 2, 1, 600, 128),
    (2, 1, 8, 70, 200), (1, 2, 12, 65, 64), (3, 1, 20, 70, 72), (1, 2, 61, 600, 40), (2, 1, 17, 3, 5),
]  # fmt: skip
TOLERANCES = {
    torch.float32: 3e-6,
    torch.bfloat16: 2e-2,
    torch.float16: 2.5e-3,
}  # the twin rounds shares to 16 bits, and both the outcome


def drawn(shape: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, kv_heads, group, slots, dim = shape
    draw = torch.Generator().manual_seed(sum(shape))
    q = (scale * torch.randn(rows, kv_heads, group, dim, generator=draw)).to(dtype)
    keys, values = (torch.randn(rows, kv_heads, slots, dim, generator=draw).to(dtype) for _ in range(2))
    held = torch.randint(1, slots + 1, (rows,), generator=draw)
    held[0] = slots
    mask = torch.zeros(rows, slots).masked_fill(torch.arange(slots) >= held[:, None], -torch.inf)[:, None, None]
    return q, keys, values, held, mask


def exact(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, gathers: str = SUM, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    scores = capped(q.double() @ keys.double().transpose(2, 3) * q.shape[-1] ** -0.5, cap)
    shares = (scores + mask).softmax(-1)
    return shares @ values.double(), shares.amax(2) if gathers == MAX else shares.sum(2)


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"dtype": list(TOLERANCES), "shape": SHAPES, "scale": [0.01, 1.0, 30.0]})
def test_c_is_as_near_to_float64_as_torch(variant: str, dtype: torch.dtype, shape: tuple[int, ...], scale: float) -> None:
    q, keys, values, held, mask = drawn(shape, dtype, scale)
    for gathers in (MAX, SUM):
        with used(variant):
            out, got = decode_attention(q, KVSlots(keys), KVSlots(values), held, mask, gathers=gathers)
        twin, twin_got = decode_attention_twin(q, KVSlots(keys), KVSlots(values), held, mask, gathers=gathers)
        expected, expected_got = exact(q, keys, values, mask, gathers)
        assert out.dtype == twin.dtype == dtype and got.dtype == twin_got.dtype == torch.float32
        tolerance = TOLERANCES[dtype]
        for ours, theirs, wanted in ((out, twin, expected), (got, twin_got, expected_got)):
            assert ours.shape == theirs.shape == wanted.shape
            assert (ours.double() - wanted).abs().max() <= tolerance * max(1.0, scale) * wanted.abs().max()
            assert (ours.double() - theirs.double()).abs().max() <= 2 * tolerance * max(1.0, scale) * wanted.abs().max()
    assert (got.sum(-1) - shape[2]).abs().max() < 1e-4  # all of each head is shared out


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("shape", [(1, 2, 1, 2, 64), (3, 2, 4, 40, 128)])
def test_scores_that_float16_does_not_hold_before_they_are_scaled(shape: tuple[int, ...], by_token: bool, device: str) -> None:
    q, keys, values, held, mask = drawn(shape, torch.float16)
    slots, dim = shape[3:]
    keys = 60 + 0.5 * torch.arange(slots).flip(0)[:, None].expand_as(keys)  # products up to 65504 and far beyond
    keys, q = keys.half(), torch.full_like(q, 24.0)
    assert float((q[0, 0, 0].float() * keys[0, 0, 0].float()).sum()) > 65504 > 24 * 80 * dim**0.5
    if by_token:
        keys, values = (tensor.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for tensor in (keys, values))
    given = (tensor.to(device) for tensor in (q, keys, values, held, mask))
    q_there, keys_there, values_there, held_there, mask_there = given
    twin, sums = decode_attention_twin(q_there, KVSlots(keys_there), KVSlots(values_there), held_there, mask_there)
    expected, expected_sums = exact(q, keys, values, mask)
    assert (sums.cpu().double() - expected_sums).abs().max() < 0.05 and (twin.cpu().double() - expected).abs().max() < 0.05


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"dtype": list(TOLERANCES)})
def test_what_lies_behind_a_row_changes_nothing(variant: str, dtype: torch.dtype) -> None:
    q, keys, values, held, mask = drawn((4, 2, 2, 40, 64), dtype)
    with used(variant):
        before = decode_attention(q, KVSlots(keys), KVSlots(values), held, mask)
        for row, count in enumerate(held.tolist()):
            keys[row, :, count:] = torch.nan
            values[row, :, count:] = torch.inf
        after = decode_attention(q, KVSlots(keys), KVSlots(values), held, mask)
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
    behind = torch.arange(40) >= held[:, None]
    assert (before[1].masked_select(behind[:, None]) == 0).all()


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"dtype": list(TOLERANCES)})
def test_neither_strides_nor_neighbours_nor_threads_change_a_bit(variant: str, dtype: torch.dtype) -> None:
    q, keys, values, held, mask = drawn((6, 3, 2, 50, 64), dtype)
    by_token = [tensor.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for tensor in (keys, values)]
    with used(variant):
        expected = decode_attention(q, KVSlots(keys), KVSlots(values), held, mask)
        turned = decode_attention(q, *map(KVSlots, by_token), held, mask)
        alone = [
            decode_attention(q[one], KVSlots(keys[one]), KVSlots(values[one]), held[one], mask[one])
            for one in (slice(row, row + 1) for row in range(6))
        ]
        before = torch.get_num_threads()
        torch.set_num_threads(3)
        threaded = decode_attention(q, KVSlots(keys), KVSlots(values), held, mask)
        torch.set_num_threads(before)
    assert not by_token[0].is_contiguous()
    for place in range(2):
        assert torch.equal(turned[place], expected[place])
        assert torch.equal(threaded[place], expected[place])
        assert torch.equal(torch.cat([one[place] for one in alone]), expected[place])


@pytest.mark.parametrize("variant", [*VARIANTS, "torch"])
@all_of({"bits": [4, 8], "dtype": list(TOLERANCES), "shape": SHAPES})
def test_packed_slots_are_attended_as_what_they_decode_to(
    variant: str, bits: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """Also where keys were unpacked before, to be rotated, and values were not."""
    q, keys, values, held, mask = drawn(shape, dtype)
    coding = Coding(f"group{bits}", dtype, shape[4])
    kept = [KVSlots(coding.encode(tensor), coding.format) for tensor in (keys, values)]
    unpacked = [coding.decode(one.data) for one in kept]
    with used(variant):
        for gathers in (SUM, MAX):
            expected, expected_got = exact(q, *unpacked, mask, gathers)
            for keys_there, values_there in (kept, (KVSlots(unpacked[0]), kept[1])):
                out, got = decode_attention(q, keys_there, values_there, held, mask, gathers=gathers)
                assert (out.double() - expected).abs().max() <= TOLERANCES[dtype] * expected.abs().max()
                assert (got.double() - expected_got).abs().max() <= TOLERANCES[dtype] * expected_got.abs().max()


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_value_of_float16_is_read_as_what_it_is(variant: str) -> None:
    """A row that holds one slot gets the slot's value."""
    values = torch.arange(-(1 << 15), 1 << 15).short().view(torch.float16).view(64, 1, 1, 1024)
    nothing = torch.zeros_like(values)
    with used(variant):
        found = decode_attention(nothing, KVSlots(nothing), KVSlots(values), torch.ones(64).long(), torch.zeros(64, 1, 1, 1))[0]
    assert torch.equal(found.nan_to_num(7.0, torch.inf, -torch.inf), values.nan_to_num(7.0, torch.inf, -torch.inf))
    assert torch.equal(found.isnan(), values.isnan()) and (found == values).sum() == (1 << 16) - 2 * 1023


@pytest.mark.parametrize("variant", VARIANTS)
@all_of(
    {
        "format": ["plain", "group4", "group8"],
        "dtype": list(TOLERANCES),
        "where": ["q", "keys", "values"],
        "what": [torch.nan, torch.inf],
        "group": [1, 4],
    }
)
def test_what_is_no_number_stays_none_and_harms_no_other_head(
    variant: str, format: str, dtype: torch.dtype, where: str, what: float, group: int
) -> None:
    q, keys, values, held, mask = drawn((2, 2, group, 37, 64), dtype)
    given = {"q": q, "keys": keys, "values": values}
    coding, held, mask = Coding(format, dtype, 64), torch.full_like(held, 37), torch.zeros_like(mask)

    def attended() -> tuple[Tensor, Tensor]:
        kept = [coding.encode(given[name]) for name in ("keys", "values")]
        twin = decode_attention_twin(given["q"].float(), *(KVSlots(coding.decode(one).float()) for one in kept), held, mask)
        with_highest = decode_attention(given["q"], *(KVSlots(one, format) for one in kept), held, mask, gathers=MAX)
        out, got = decode_attention(given["q"], *(KVSlots(one, format) for one in kept), held, mask)
        assert torch.equal(with_highest[0].isnan(), out.isnan()) and torch.equal(with_highest[1].isnan(), got.isnan())
        return out, twin[0]

    with used(variant):
        before = attended()[0]
        given[where][1, 1, 0, 5] = what
        after, twin = attended()
    assert torch.equal(after.isfinite(), twin.isfinite()) and (what == torch.inf or not twin.isfinite().all())
    assert torch.equal(after[0], before[0]) and torch.equal(after[1, 0], before[1, 0])


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"bits": [4, 8], "group": [1, 3, 8]})
def test_packed_slots_give_the_same_bits_in_any_company(variant: str, bits: int, group: int) -> None:
    q, keys, values, held, mask = drawn((5, 2, group, 90, 64), torch.bfloat16)
    coding = Coding(f"group{bits}", torch.bfloat16, 64)
    kept = [coding.encode(tensor) for tensor in (keys, values)]
    with used(variant):
        together = decode_attention(q, *(KVSlots(one, coding.format) for one in kept), held, mask)
        for row in range(5):
            one = slice(row, row + 1)
            apart = [tensor[one].permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for tensor in kept]
            alone = decode_attention(q[one], *(KVSlots(each, coding.format) for each in apart), held[one], mask[one])
            assert torch.equal(alone[0], together[0][one]) and torch.equal(alone[1], together[1][one])


@pytest.mark.parametrize("variant", [*VARIANTS, "torch"])
def test_nothing_is_gathered_that_is_not_wanted(variant: str) -> None:
    q, keys, values, held, mask = drawn((3, 2, 2, 17, 64), torch.float32)
    with used(variant):
        out, sums = decode_attention(q, KVSlots(keys), KVSlots(values), held, mask)
        alone, nothing = decode_attention(q, KVSlots(keys), KVSlots(values), held, mask, gathers=None)
    assert torch.equal(alone, out) and sums is not None and nothing is None
