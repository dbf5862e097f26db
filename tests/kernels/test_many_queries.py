"""Attention of a step where many query heads attend a KV head, in C against float64: in tiles of registers where there are some
and values are bfloat16, and in float32. Several pieces of slots, several parts of queries, and what does not fill them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from h2o_flexgen.formats.kernel_sizes import ManyQueries
from h2o_flexgen.formats.kernel_table import MAX, SUM
from h2o_flexgen.kernels.decode_attention import KVSlots
from h2o_flexgen.kernels.more_keys import More
from h2o_flexgen.kernels.operations import decode_attention
from h2o_flexgen.kv.slots import Coding
from tests.helpers.all_of import all_of
from tests.kernels.test_cap import capped
from tests.kernels.test_decode_attention import drawn
from tests.kernels.variants import VARIANTS, used

SHAPES = [  # rows, kv_heads, group, slots, dim
    (2, 1, 128, 70, 96), (3, 2, 17, 260, 32), (1, 1, 33, 9, 64), (1, 1, 161, 520, 32), (2, 1, 20, 33, 576), (1, 2, 40, 300, 40),
    (1, 1, 64, 1030, 64), (2, 1, 16, 300, 576),
]  # fmt: skip
NEAR = {torch.float32: 3e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}  # of the largest outcome: rounded once
MISROUNDED = 0.02  # of outcomes in 16 bits, at most; of shares in 16 bits a tenth would be, or more


def more_of(q: Tensor) -> More:
    draw = torch.Generator().manual_seed(7)
    rows, heads, dim = q.shape[0], q.shape[1] * q.shape[2], q.shape[3]
    scores = torch.randn(rows, 1, heads, generator=draw)
    scores[:, :, ::3] = -torch.inf  # these have attended nothing elsewhere
    return More(scores, torch.randn(rows, 1, heads, dim, generator=draw))


def exact(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, more: More | None, cap: float | None) -> tuple[Tensor, Tensor]:
    """The outcome and the shares, with one more key where there is one."""
    scores = capped(q.double() @ keys.double().transpose(2, 3) * q.shape[-1] ** -0.5, cap) + mask
    if more is None:
        return scores.softmax(-1) @ values.double(), scores.softmax(-1)
    assert more.values is not None
    shares = torch.cat((scores, more.scores.view(*q.shape[:3], 1).double()), dim=-1).softmax(-1)
    return shares[..., :-1] @ values.double() + shares[..., -1:] * more.values.view(q.shape).double(), shares[..., :-1]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", list(NEAR))
@all_of({"shape": SHAPES, "scale": [1.0, 20.0], "cap": [None, 2.0], "beside": [False, True]})
def test_many_queries_are_as_near_as_their_type(
    variant: str, dtype: torch.dtype, shape: tuple[int, ...], scale: float, cap: float | None, beside: bool
) -> None:
    q, keys, values, held, mask = drawn(shape, dtype, scale)
    more = more_of(q) if beside else None
    expected, shares = exact(q, keys, values, mask, more, cap)
    for gathers in (SUM, MAX):
        with used(variant):
            out, got = decode_attention(q, KVSlots(keys), KVSlots(values), held, mask, more, gathers, cap)
        wanted = shares.amax(2) if gathers == MAX else shares.sum(2)
        assert got is not None and out.dtype == dtype
        assert dtype == torch.float32 or (out != expected.to(dtype)).double().mean() < MISROUNDED
        assert (out.double() - expected).abs().max() <= (NEAR[dtype] + 3e-6 * scale) * max(1.0, expected.abs().max())
        assert (got.double() - wanted).abs().max() <= 1e-5 * max(1.0, scale) * wanted.max()


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"dtype": list(NEAR), "shape": [(3, 2, 70, 300, 64), (2, 1, 128, 257, 32)]})
def test_bits_do_not_depend_on_strides_company_threads_or_what_is_gathered(
    variant: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    q, keys, values, held, mask = drawn(shape, dtype)
    by_token = [tensor.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for tensor in (keys, values)]
    threads = torch.get_num_threads()
    with used(variant):
        expected = decode_attention(q, KVSlots(keys), KVSlots(values), held, mask)
        turned = decode_attention(q, *map(KVSlots, by_token), held, mask)
        ungathered = decode_attention(q, KVSlots(keys), KVSlots(values), held, mask, gathers=None)
        alone = [
            decode_attention(q[one], KVSlots(keys[one]), KVSlots(values[one]), held[one], mask[one])
            for one in (slice(row, row + 1) for row in range(shape[0]))
        ]
        torch.set_num_threads(7)
        threaded = decode_attention(q, KVSlots(keys), KVSlots(values), held, mask)
        torch.set_num_threads(threads)
        for row, count in enumerate(held.tolist()):
            keys[row, :, count:] = torch.nan
            values[row, :, count:] = torch.inf
        beside_others = decode_attention(q, KVSlots(keys), KVSlots(values), held, mask)
    for place in range(2):
        for found in (turned, threaded, beside_others, tuple(torch.cat(one) for one in zip(*alone))):
            assert torch.equal(found[place], expected[place])
    assert torch.equal(ungathered[0], expected[0])


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"dtype": list(NEAR), "bits": [4, 8], "shape": [(3, 1, 20, 300, 96), (2, 2, 64, 513, 64), (1, 1, 128, 40, 576)]})
def test_packed_latents_are_attended_as_what_they_decode_to(
    variant: str, dtype: torch.dtype, bits: int, shape: tuple[int, ...]
) -> None:
    """As what they are in float32, or rounded to the type of the queries. And bits do not depend on company."""
    q, keys, _, held, mask = drawn(shape, dtype)
    kept = Coding(f"group{bits}", dtype, shape[4]).encode(keys)
    decoded = [Coding(f"group{bits}", kind, shape[4]).decode(kept) for kind in (dtype, torch.float32)]
    wanted = [exact(q, values, values, mask, None, None) for values in decoded]

    def attended(rows: slice, gathers: str | None) -> tuple[Tensor, Tensor | None]:
        slots = KVSlots(kept[rows], f"group{bits}")
        with used(variant):
            return decode_attention(q[rows], slots, slots, held[rows], mask[rows], gathers=gathers)

    out, got = attended(slice(None), SUM)
    assert got is not None and torch.equal(out, attended(slice(None), None)[0])
    alone = [attended(slice(row, row + 1), MAX)[0] for row in range(shape[0])]
    assert torch.equal(torch.cat(alone), out)
    if dtype != torch.float32:
        assert min(float((out != expected.to(dtype)).double().mean()) for expected, _ in wanted) < MISROUNDED
    near = [float((out.double() - expected).abs().max() / expected.abs().max()) for expected, _ in wanted]
    assert min(near) <= NEAR[dtype] + 3e-6
    sums = [shares.sum(2) for _, shares in wanted]
    assert min(float((got.double() - expected).abs().max() / expected.max()) for expected in sums) <= 1e-5


@pytest.mark.parametrize(("group", "dim", "are_many"), [(17, 64, True), (16, 512, False), (16, 576, True), (8, 1024, False)])
def test_sixteen_heads_are_many_where_they_attend_latents(group: int, dim: int, are_many: bool) -> None:
    assert (ManyQueries.of(group, 100, dim) is not None) == are_many


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"dtype": list(NEAR), "where": ["q", "keys", "values"], "what": [torch.nan, torch.inf]})
def test_what_is_no_number_harms_no_other_head(variant: str, dtype: torch.dtype, where: str, what: float) -> None:
    q, keys, values, held, mask = drawn((2, 2, 20, 37, 64), dtype)
    held, mask = torch.full_like(held, 37), torch.zeros_like(mask)

    def attended() -> Tensor:
        with used(variant):
            return decode_attention(q, KVSlots(keys), KVSlots(values), held, mask)[0]

    before = attended()
    {"q": q, "keys": keys, "values": values}[where][1, 1, 0, 5] = what
    after, expected = attended(), exact(q, keys, values, mask, None, None)[0]
    assert torch.equal(after.isfinite(), expected.isfinite()) and not after.isfinite().all()
    assert torch.equal(after[0], before[0]) and torch.equal(after[1, 0], before[1, 0])
