"""Attention over a text that many queries share, in C and in torch against float64. With what stands behind that text it is the
attention over both."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from h2o_flexgen.kernels.decode_attention import KVSlots
from h2o_flexgen.kernels.functions import FUNCTIONS
from h2o_flexgen.kernels.more_keys import More
from h2o_flexgen.kernels.operations import decode_attention, prompt_attention, shared_attention
from h2o_flexgen.kv.slots import Coding
from tests.helpers.all_of import all_of
from tests.kernels.test_cap import capped
from tests.kernels.variants import VARIANTS, never, used

SHAPES = [  # queries, kv_heads, group, tokens of the text, dim
    (1, 1, 1, 1, 64), (3, 2, 1, 17, 64), (50, 3, 4, 33, 128), (4, 2, 7, 530, 80), (5, 1, 2, 256, 3), (97, 2, 1, 257, 64),
    (2, 1, 8, 70, 200), (1, 2, 12, 600, 16),
]  # fmt: skip
LINKS = ["torch", *VARIANTS]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NEAR = 4e-6  # of the largest value: everything is in float32, whatever it is made of


def drawn(shape: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    queries, kv_heads, group, tokens, dim = shape
    draw = torch.Generator().manual_seed(sum(shape))
    q = (scale * torch.randn(queries, kv_heads * group, dim, generator=draw)).to(dtype)
    keys, values = (torch.randn(kv_heads, tokens, dim, generator=draw).to(dtype) for _ in range(2))
    return q, keys, values


def exact(q: Tensor, keys: Tensor, values: Tensor, cap: float | None = None) -> tuple[Tensor, Tensor]:
    of_heads = (x.double().repeat_interleave(q.shape[1] // len(x), 0) for x in (keys, values))
    k, v = of_heads
    scores = capped(q.double().transpose(0, 1) @ k.transpose(1, 2) * q.shape[2] ** -0.5, cap)
    return scores.logsumexp(-1).T[None], (scores.softmax(-1) @ v).transpose(0, 1)[None]


@pytest.mark.parametrize("variant", LINKS)
@pytest.mark.parametrize("format", ["plain", "group4", "group8"])
@all_of({"dtype": DTYPES, "shape": SHAPES, "scale": [0.01, 30.0]})
def test_it_is_as_near_to_float64_as_float32_is(
    variant: str, format: str, dtype: torch.dtype, shape: tuple[int, ...], scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, *text = drawn(shape, dtype, scale)
    coding = Coding(format, dtype, shape[4])
    kept = [coding.encode(half) for half in text]
    if variant != "torch":
        monkeypatch.setitem(FUNCTIONS, "shared_attention_twin", never)
    with used(variant):
        found = shared_attention(q, *(KVSlots(half, format) for half in kept))
    # where torch attends packed text, that has been decoded to the type of queries
    expected = exact(q, *(coding.decode(half) if variant == "torch" else decoded_exactly(half, coding) for half in kept))
    for ours, wanted in zip(found, expected):
        assert ours.dtype == torch.float32 and ours.shape == wanted.shape
        assert (ours.double() - wanted).abs().max() <= NEAR * max(1.0, scale) * wanted.abs().max()


def decoded_exactly(kept: Tensor, coding: Coding) -> Tensor:
    return kept if coding.is_plain else Coding(coding.format, torch.float32, coding.head_dim).decode(kept)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("format", ["plain", "group4"])
@all_of({"dtype": DTYPES})
def test_neither_strides_nor_company_nor_threads_change_a_bit(variant: str, format: str, dtype: torch.dtype) -> None:
    q, *text = drawn((60, 3, 2, 300, 64), dtype)
    coding = Coding(format, dtype, 64)
    kept = [KVSlots(coding.encode(half), format) for half in text]
    by_token = [KVSlots(half.data.transpose(0, 1).contiguous().transpose(0, 1), format) for half in kept]
    before = torch.get_num_threads()
    with used(variant):
        expected = shared_attention(q, *kept)
        turned = shared_attention(q.transpose(0, 1).contiguous().transpose(0, 1), *by_token)
        alone = [shared_attention(q[start : start + 7], *kept) for start in range(0, 60, 7)]
        torch.set_num_threads(7)
        threaded = shared_attention(q, *kept)
        torch.set_num_threads(before)
    for place in range(2):
        assert torch.equal(turned[place], expected[place])
        assert torch.equal(threaded[place], expected[place])
        assert torch.equal(torch.cat([one[place] for one in alone], 1), expected[place])


@pytest.mark.parametrize("variant", LINKS)
@all_of({"where": ["q", "keys", "values"], "what": [torch.nan, torch.inf], "token": [3, 290]})
def test_what_is_no_number_stays_none_and_harms_no_other_head(variant: str, where: str, what: float, token: int) -> None:
    q, keys, values = drawn((8, 2, 2, 300, 64), torch.float32)
    with used(variant):
        before = shared_attention(q, KVSlots(keys), KVSlots(values))
        if where == "q":
            q[5, 2, 7] = what
        else:
            {"keys": keys, "values": values}[where][1, token, 7] = what
        after = shared_attention(q, KVSlots(keys), KVSlots(values))
    assert torch.equal(after.values[:, :, :2], before.values[:, :, :2])
    assert torch.equal(after.scores[:, :, :2], before.scores[:, :, :2])
    hit = ~after.values[0, :, 2:].isfinite()
    assert hit.any() and (where != "q" or not hit[torch.arange(8) != 5].any())


# -- with what stands behind the text ------------------------------------------------------------------------------------


def none_for(more: More, rows: Tensor) -> More:
    """These rows have nothing elsewhere."""
    return More(
        more.scores.masked_fill(rows[:, None, None], -torch.inf), more.values.masked_fill(rows[:, None, None, None], 0.0)
    )


@pytest.mark.parametrize("variant", LINKS)
@all_of(
    {
        "shape": [(4, 2, 1, 20, 64), (3, 2, 4, 37, 128), (5, 1, 3, 9, 80)],  # rows, kv_heads, group, slots, dim
        "text": [5, 300],
    }
)
def test_a_step_over_both_parts_is_a_step_over_the_whole(variant: str, shape: tuple[int, ...], text: int) -> None:
    rows, kv_heads, group, slots, dim = shape
    draw = torch.Generator().manual_seed(sum(shape))
    q = torch.randn(rows, kv_heads, group, dim, generator=draw)
    own = [torch.randn(rows, kv_heads, slots, dim, generator=draw) for _ in range(2)]
    shared = [torch.randn(kv_heads, text, dim, generator=draw) for _ in range(2)]
    whole = [torch.cat((of_all.expand(rows, -1, -1, -1), of_row), 2) for of_all, of_row in zip(shared, own)]
    held, alone = torch.arange(rows) % slots + 1, torch.arange(rows) == 1
    with used(variant):
        more = shared_attention(q.view(rows, kv_heads * group, dim), *map(KVSlots, shared))
        more = none_for(More(more.scores.view(rows, 1, -1), more.values.view(rows, 1, -1, dim)), alone)
        out, sums = decode_attention(q, *map(KVSlots, own), held, mask_behind(held, slots), more)
        wanted, shares = decode_attention(q, *map(KVSlots, whole), text + held, mask_behind(text + held, text + slots))
        without = decode_attention(q, *map(KVSlots, own), held, mask_behind(held, slots))
    assert (out - wanted)[~alone].abs().max() <= 4e-6 * wanted.abs().max()
    assert (sums - shares[..., text:])[~alone].abs().max() <= 4e-6 * shares.max()
    same = torch.equal if variant != "torch" else torch.allclose
    assert same(out[alone], without[0][alone]) and same(sums[alone], without[1][alone])


def mask_behind(held: Tensor, slots: int) -> Tensor:
    behind = torch.arange(slots) >= held[:, None]
    return torch.zeros(len(held), slots).masked_fill(behind, -torch.inf)[:, None, None]


@pytest.mark.parametrize("variant", LINKS)
@pytest.mark.parametrize("format", ["group4", "group8"])
@all_of({"group": [1, 4]})
def test_a_step_over_packed_parts_is_one_over_what_they_decode_to(variant: str, format: str, group: int) -> None:
    draw, coding = torch.Generator().manual_seed(group), Coding(format, torch.bfloat16, 64)
    q = torch.randn(3, 2, group, 64, generator=draw).bfloat16()
    own = [coding.encode(torch.randn(3, 2, 20, 64, generator=draw).bfloat16()) for _ in range(2)]
    shared = [coding.encode(torch.randn(2, 70, 64, generator=draw).bfloat16()) for _ in range(2)]
    whole = [coding.decode(torch.cat((of_all.expand(3, -1, -1, -1), of_row), 2)) for of_all, of_row in zip(shared, own)]
    held = torch.tensor([20, 7, 1])
    with used(variant):
        more = shared_attention(q.view(3, -1, 64), *(KVSlots(half, format) for half in shared))
        more = More(more.scores.view(3, 1, -1), more.values.view(3, 1, -1, 64))
        out, sums = decode_attention(q, *(KVSlots(half, format) for half in own), held, mask_behind(held, 20), more)
        wanted, shares = decode_attention(q, *map(KVSlots, whole), 70 + held, mask_behind(70 + held, 90))
    assert (out - wanted).abs().max() <= 2e-2 * wanted.abs().max()
    assert (sums - shares[..., 70:]).abs().max() <= 2e-2 * shares.max()


@pytest.mark.parametrize("variant", LINKS)
@all_of(
    {
        "dtype": DTYPES,
        "shape": [(3, 2, 1, 0, 17, 64), (2, 2, 4, 5, 60, 128), (4, 1, 3, 9, 3, 80)],  # rows, kv_heads, group, held, tokens, dim
        "text": [5, 300],
    }
)
def test_a_prompt_behind_a_shared_text_is_a_prompt_behind_its_own_copy(
    variant: str, dtype: torch.dtype, shape: tuple[int, ...], text: int
) -> None:
    rows, kv_heads, group, held, tokens, dim = shape
    draw = torch.Generator().manual_seed(sum(shape))
    q = torch.randn(rows, tokens, kv_heads * group, dim, generator=draw).to(dtype).transpose(1, 2)
    own = [torch.randn(rows, kv_heads, held + tokens, dim, generator=draw).to(dtype) for _ in range(2)]
    shared = [torch.randn(kv_heads, text, dim, generator=draw).to(dtype) for _ in range(2)]
    whole = [torch.cat((of_all.expand(rows, -1, -1, -1), of_row), 2) for of_all, of_row in zip(shared, own)]
    before, alone = torch.arange(rows) % (held + 1), torch.arange(rows) == 1
    weights = torch.rand(rows, tokens, generator=draw)
    # the copy stands before what is held: places that a row does not hold lie behind both
    gap = torch.cat([torch.arange(text), torch.arange(held + tokens) + text])
    with used(variant):
        more = shared_attention(q.transpose(1, 2).reshape(rows * tokens, -1, dim), *map(KVSlots, shared))
        more = none_for(More(more.scores.view(rows, tokens, -1), more.values.view(rows, tokens, -1, dim)), alone)
        out, sums = prompt_attention(q, *own, before, weights, more)
        assert torch.equal(out, prompt_attention(q, *own, before, None, more)[0])
        wanted, shares = prompt_attention(q, *(half[:, :, gap] for half in whole), before + text, weights)
        without = prompt_attention(q, *own, before, weights)
    assert sums is not None and shares is not None and without[1] is not None
    near = {torch.float32: 4e-6, torch.bfloat16: 2e-2, torch.float16: 2.5e-3}[dtype]
    assert (out - wanted)[~alone].abs().max() <= near * wanted.abs().max()
    assert (sums - shares[..., text:])[~alone].abs().max() <= 1e-5 * shares.max()
    if variant != "torch":
        assert torch.equal(out[alone], without[0][alone]) and torch.equal(sums[alone], without[1][alone])


# -- sinks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", LINKS)
@all_of({"dtype": DTYPES, "group": [1, 4]})
def test_a_sink_is_a_key_whose_value_is_zero(variant: str, dtype: torch.dtype, group: int) -> None:
    draw, rows, kv_heads, tokens, dim = torch.Generator().manual_seed(group), 2, 2, 20, 64
    q = torch.randn(rows, kv_heads * group, tokens, dim, generator=draw).to(dtype)
    keys, values = (torch.randn(rows, kv_heads, tokens, dim, generator=draw).to(dtype) for _ in range(2))
    scores, held = 3 * torch.randn(kv_heads * group, generator=draw), torch.tensor([tokens, 7])
    sinks, step = More.of_sink_scores(scores, rows, tokens), More.of_sink_scores(scores, rows, 1)
    newest = q[:, :, -1].view(rows, kv_heads, group, dim)
    nothing = torch.zeros(rows, dtype=torch.int64)
    with used(variant):
        found = decode_attention(newest, KVSlots(keys), KVSlots(values), held, mask_behind(held, tokens), step)
        zeros = More(step.scores, torch.zeros(rows, 1, kv_heads * group, dim))
        assert all(
            map(
                torch.equal,
                found,
                decode_attention(newest, KVSlots(keys), KVSlots(values), held, mask_behind(held, tokens), zeros),
            )
        )
        given, zeros = (
            (q, keys, values, nothing, torch.ones(rows, tokens)),
            More(sinks.scores, torch.zeros(rows, tokens, kv_heads * group, dim)),
        )
        prompts = prompt_attention(*given, sinks)
        assert all(map(torch.equal, prompts, prompt_attention(*given, zeros)))
    near = {torch.float32: 4e-6, torch.bfloat16: 2e-2, torch.float16: 2.5e-3}[dtype]
    of_heads = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    k, v = of_heads
    logits = (q.double() @ k.transpose(2, 3) * dim**-0.5).masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf)
    shares = torch.cat((logits, scores.double()[None, :, None, None].expand(rows, -1, tokens, 1)), -1).softmax(-1)[..., :-1]
    assert (prompts[0] - (shares @ v).transpose(1, 2).flatten(2)).abs().max() <= 2 * near
    assert (prompts[1] - shares.view(rows, kv_heads, -1, tokens).sum(2)).abs().max() <= 1e-4
    assert (found[0][0] - (shares @ v)[0, :, -1].view(kv_heads, group, dim)).abs().max() <= 2 * near
