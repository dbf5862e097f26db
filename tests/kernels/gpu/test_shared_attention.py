"""Attention over a text that many queries share, in Triton against float64, with caps on scores and without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from h2o_flexgen.formats.kernel_table import CUDA, HALVES, TRITON, WIDTH_OF_TILES, Kernel, Processor
from h2o_flexgen.kernels import operations
from h2o_flexgen.kernels.decode_attention import KVSlots
from h2o_flexgen.kernels.gpu import shared_attention as module
from h2o_flexgen.kernels.gpu.shared_attention import shared_attention
from h2o_flexgen.kernels.more_keys import More
from h2o_flexgen.kv.slots import Coding
from tests.helpers.pairwise import most_of
from tests.kernels.gpu.test_cap import CAPS
from tests.kernels.test_shared_attention import drawn, exact

SHAPES = [  # queries, kv_heads, group, tokens of the text, dim
    (1, 1, 1, 1, 64), (13, 2, 3, 33, 80), (8, 1, 4, 37, 64), (3, 1, 1, 40, 3), (2, 1, 12, 20, 200),
]  # fmt: skip


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "CHUNK", 32)
    module.launches_of.cache_clear()  # launches are kept by shape
    yield
    module.launches_of.cache_clear()


NEAR = {torch.float32: 4e-6, torch.bfloat16: 2e-2, torch.float16: 2.5e-3}
CHOICES = {"format": ["plain", "group4"], "dtype": list(NEAR), "shape": SHAPES, "cap": CAPS}


def attended(gpu: torch.device, q: torch.Tensor, *kept: KVSlots, cap: float | None = None) -> More:
    """The text lies slot by slot, as beside an accelerator."""
    slots = (KVSlots(one.data.transpose(0, 1).contiguous().to(gpu).transpose(0, 1), one.format) for one in kept)
    return More(*(one.cpu() for one in shared_attention(q.to(gpu), *slots, cap)))


@pytest.mark.parametrize("values", most_of(CHOICES))
def test_it_is_near_float64(gpu: torch.device, values: dict[str, Any]) -> None:
    format, dtype, shape, cap = (values[name] for name in CHOICES)
    q, *text = drawn(shape, dtype)
    coding = Coding(format, dtype, shape[4])
    kept = [coding.encode(half) for half in text]
    found = attended(gpu, q, *(KVSlots(half, format) for half in kept), cap=cap)
    for ours, wanted in zip(found, exact(q, *(coding.decode(half) for half in kept), cap)):
        assert ours.dtype == torch.float32 and ours.shape == wanted.shape
        assert (ours.double() - wanted).abs().max() <= NEAR[dtype] * wanted.abs().max().clamp(min=1.0)


def test_a_query_depends_neither_on_its_neighbours_nor_on_pieces(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The products that stand for those of tensor cores in the interpreter may round rows of a tile in different ways."""
    q, keys, values = drawn((5, 1, 4, 50, 16), torch.float32)
    together = attended(gpu, q, KVSlots(keys), KVSlots(values))
    monkeypatch.setattr(module, "SCORED_BYTES", 4 * 4 * 2 * 16 * 3)  # three queries at once
    in_pieces, alone = attended(gpu, q, KVSlots(keys), KVSlots(values)), attended(gpu, q[4:5], KVSlots(keys), KVSlots(values))
    for place in range(2):
        torch.testing.assert_close(in_pieces[place], together[place], rtol=0, atol=1e-6)
        torch.testing.assert_close(alone[place][:, 0], together[place][:, 4], rtol=0, atol=1e-6)


@pytest.mark.parametrize("what", [torch.nan, torch.inf])
def test_what_is_no_number_stays_none_and_harms_no_other_head(gpu: torch.device, what: float) -> None:
    q, keys, values = drawn((3, 2, 2, 20, 16), torch.float32)
    before = attended(gpu, q, KVSlots(keys), KVSlots(values))
    keys[1, 7, 5] = what
    after = attended(gpu, q, KVSlots(keys), KVSlots(values))
    assert torch.equal(after.values.isfinite(), exact(q, keys, values)[1].isfinite())
    assert torch.equal(after.values[:, :, :2], before.values[:, :, :2]) and not after.values[:, :, 2:].isfinite().all()


@pytest.mark.parametrize("format", ["plain", "group4"])
def test_heads_that_are_too_wide_for_tiles_are_left_to_torch(
    gpu: torch.device, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, function_of = list[str](), operations.function_of

    def noted(kernel: Kernel) -> object:
        chosen.append(kernel.function)
        return function_of(kernel)

    if gpu.type != CUDA:
        monkeypatch.setattr(operations, "processor", lambda _: Processor(CUDA, TRITON, HALVES))
    monkeypatch.setattr(operations, "function_of", noted)
    shape = 2, 1, 1, 3, WIDTH_OF_TILES + 64
    q, *text = drawn(shape, torch.float32)
    coding = Coding(format, torch.float32, shape[4])
    halves = [coding.encode(half.to(gpu)) for half in text]
    found = operations.shared_attention(q.to(gpu), *(KVSlots(half, format) for half in halves))
    assert chosen[-1] == "shared_attention_twin"
    expected = exact(q, *(coding.decode(half.cpu()) for half in halves))
    torch.testing.assert_close(found.values.cpu().double(), expected[1], rtol=0, atol=1e-4)
