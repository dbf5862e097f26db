"""Attention over slots in Triton against float64 and the twin: shapes of heads, ragged rows, strides, chunks, one more key,
caps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_flexgen.formats.kernel_table import MAX, SUM
from h2o_flexgen.kernels.decode_attention import KVSlots, decode_attention_twin
from h2o_flexgen.kernels.gpu import decode_attention as module
from h2o_flexgen.kernels.gpu.decode_attention import decode_attention
from h2o_flexgen.kernels.more_keys import More
from h2o_flexgen.kv.slots import Coding
from tests.helpers.pairwise import most_of, pairs_first
from tests.kernels.gpu.test_cap import CAPS
from tests.kernels.test_decode_attention import drawn, exact

SHAPES = [  # rows, kv_heads, group, slots, dim
    (3, 2, 1, 17, 64), (2, 1, 7, 40, 80), (2, 1, 2, 9, 3), (1, 1, 3, 20, 200),
]  # fmt: skip
TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 2.5e-3}  # packed slots are not rounded to 16 bits first
FORMATS = ["plain", "group4", "group8"]


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Chunks that are so short that few slots are several of them."""
    monkeypatch.setattr(module, "CHUNK", 16)
    module.launches_of.cache_clear()  # launches are kept by shape
    yield 16
    module.launches_of.cache_clear()


def by_token(tensor: Tensor, device: torch.device) -> Tensor:
    """The same on the device, slot by slot, as beside an accelerator."""
    return tensor.permute(2, 0, 1, 3).contiguous().to(device).permute(1, 2, 0, 3)


def attended(
    gpu: torch.device, *given: Tensor | KVSlots, more: More | None = None, gathers: str | None = SUM, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """q, keys, values, held, mask as for decode_attention, on a CPU."""
    moved = [KVSlots(by_token(one.data, gpu), one.format) if isinstance(one, KVSlots) else one.to(gpu) for one in given]
    elsewhere = None if more is None else More(*(None if one is None else one.to(gpu) for one in more))
    out, got = decode_attention(*moved, elsewhere, gathers, cap)
    return out.cpu(), torch.empty(0) if got is None else got.cpu()


def near(found: Tensor, wanted: Tensor, tolerance: float) -> bool:
    return found.shape == wanted.shape and bool((found.double() - wanted).abs().max() <= tolerance * wanted.abs().max())


NEAR = {"format": FORMATS, "dtype": list(TOLERANCES), "shape": SHAPES, "gathers": (SUM, MAX), "cap": CAPS}


@pytest.mark.parametrize("values", most_of(NEAR))
def test_it_is_near_float64(gpu: torch.device, values: dict[str, Any], short_chunks: int) -> None:
    format, dtype, shape, gathers, cap = (values[name] for name in NEAR)
    q, *text, held, mask = drawn(shape, dtype)
    coding = Coding(format, dtype, shape[4])
    kept = [KVSlots(coding.encode(one), format) for one in text]
    expected, expected_got = exact(q, *(coding.decode(one.data) for one in kept), mask, gathers, cap)
    out, got = attended(gpu, q, *kept, held, mask, gathers=gathers, cap=cap)
    assert out.dtype == dtype and near(out, expected, TOLERANCES[dtype])
    assert got.dtype == torch.float32 and near(got, expected_got, 3e-6 if format == "plain" else TOLERANCES[dtype])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("group", [1, 3])
def test_a_row_depends_on_nothing_but_itself(gpu: torch.device, format: str, group: int, short_chunks: int) -> None:
    """Neither on its neighbours, nor on strides, nor on slots behind those that it holds, however many there are."""
    q, keys, values, held, mask = drawn((2, 2, group, 40, 64), torch.float32)
    coding = Coding(format, torch.float32, 64)
    kept = [coding.encode(one) for one in (keys, values)]
    together = attended(gpu, q, *(KVSlots(one, format) for one in kept), held, mask)
    for row, count in enumerate(held.tolist()):
        longer = [torch.full((1, 2, 70, one.shape[3]), 0, dtype=one.dtype) for one in kept]
        for new, old in zip(longer, kept):
            new[:, :, count:] = torch.nan if format == "plain" else 255
            new[:, :, :count] = old[row, :, :count]
        there = [KVSlots(one.to(gpu), format) for one in longer]
        alone, sums = decode_attention(q[row : row + 1].to(gpu), *there, held[row : row + 1].to(gpu), mask)
        assert sums is not None and torch.equal(alone[0].cpu(), together[0][row])
        assert torch.equal(sums[0, :, :40].cpu(), together[1][row]) and not sums[:, :, count:].any()


def test_chunks_are_joined_as_one_chunk_is_attended(gpu: torch.device) -> None:
    """Bits are the same whether there is a second pass or not, and whether sums are wanted or not."""
    q, keys, values, held, mask = drawn((1, 1, 1, module.CHUNK + 9, 128), torch.float32)
    expected, _ = exact(q, keys, values, mask)
    assert near(attended(gpu, q, KVSlots(keys), KVSlots(values), held, mask)[0], expected, 3e-6)
    held -= 10
    with_sums, sums = attended(gpu, q, KVSlots(keys), KVSlots(values), held, mask)
    without, nothing = attended(gpu, q, KVSlots(keys), KVSlots(values), held, mask, gathers=None)
    fewer = (KVSlots(one[:, :, : module.CHUNK]) for one in (keys, values))
    in_one_pass, _ = attended(gpu, q, *fewer, held, mask, gathers=None)
    assert torch.equal(with_sums, without) and torch.equal(without, in_one_pass) and sums.numel() and not nothing.numel()


WRONG = {
    "format": ["plain", "group4"],
    ("where", "what"): [("q", torch.nan), ("keys", torch.inf), ("keys", torch.nan), ("values", torch.inf)],
    "group": [1, 3],
}


@pytest.mark.parametrize("values", pairs_first(WRONG))
def test_what_is_no_number_stays_none_and_harms_no_other_head(gpu: torch.device, values: dict[str, Any]) -> None:
    format, where, what, group = (values[name] for name in ("format", "where", "what", "group"))
    q, *text, held, mask = drawn((2, 2, group, 7, 64), torch.float32)
    given = {"q": q, "keys": text[0], "values": text[1]}
    coding, held, mask = Coding(format, torch.float32, 64), torch.full_like(held, 7), torch.zeros_like(mask)
    before = attended(gpu, q, *(KVSlots(coding.encode(given[name]), format) for name in ("keys", "values")), held, mask)[0]
    given[where][1, 1, 0, 5] = what
    kept = [coding.encode(given[name]) for name in ("keys", "values")]
    after, got = attended(gpu, q, *(KVSlots(one, format) for one in kept), held, mask)
    highest = attended(gpu, q, *(KVSlots(one, format) for one in kept), held, mask, gathers=MAX)[1]
    assert torch.equal(highest.isnan(), got.isnan())
    twin = decode_attention_twin(q, *(KVSlots(coding.decode(one)) for one in kept), held, mask)[0]
    assert torch.equal(after.isfinite(), twin.isfinite()) and (what == torch.inf or not twin.isfinite().all())
    assert torch.equal(after[0], before[0]) and torch.equal(after[1, 0], before[1, 0])


@pytest.mark.parametrize("slots", [12, 35])
def test_one_more_key_is_like_another_slot(gpu: torch.device, slots: int, short_chunks: int) -> None:
    """Also where a query attended nothing elsewhere, or nothing else counts beside it."""
    q, keys, values, held, mask = drawn((3, 2, 2, slots, 64), torch.float32)
    draw = torch.Generator().manual_seed(1)
    scores, elsewhere = torch.randn(3, 1, 4, generator=draw), torch.randn(3, 1, 4, 64, generator=draw)
    scores[1], scores[2] = -torch.inf, 200.0
    exactly = q.double(), KVSlots(keys.double()), KVSlots(values.double()), held, mask
    for gathers, cap in ((SUM, 2.0), (MAX, None)):  # which the key elsewhere does not have
        more = More(scores, elsewhere)
        out, got = attended(gpu, q, KVSlots(keys), KVSlots(values), held, mask, more=more, gathers=gathers, cap=cap)
        twin, twin_got = decode_attention_twin(*exactly, more, gathers, cap)
        assert twin_got is not None and near(out, twin.double(), 3e-6) and near(got, twin_got.double(), 3e-6)
    assert torch.equal(out[2], elsewhere[2].view(2, 2, 64)) and torch.isfinite(out).all()
    sinks, zeros = More(scores, None), More(scores, torch.zeros_like(elsewhere))
    given = q, KVSlots(keys), KVSlots(values), held, mask
    assert all(map(torch.equal, attended(gpu, *given, more=sinks), attended(gpu, *given, more=zeros)))


def test_packed_values_are_attended_beside_plain_keys(gpu: torch.device) -> None:
    q, keys, values, held, mask = drawn((2, 2, 2, 20, 64), torch.float32)
    coding = Coding("group4", torch.float32, 64)
    expected, _ = exact(q, keys, coding.decode(packed := coding.encode(values)), mask)
    assert near(attended(gpu, q, KVSlots(keys), KVSlots(packed, "group4"), held, mask)[0], expected, 3e-6)


def test_no_rows_are_attended_as_none(gpu: torch.device) -> None:
    q, keys, values, held, mask = (one[:0] for one in drawn((2, 2, 2, 20, 64), torch.float32))
    out, sums = attended(gpu, q, KVSlots(keys), KVSlots(values), held, mask)
    assert out.shape == (0, 2, 2, 64) and sums.shape == (0, 2, 20)
