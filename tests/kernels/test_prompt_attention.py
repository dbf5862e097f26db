"""Attention of prompts in C against the twin in torch and against float64: every shape of heads, ragged rows, any strides."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from h2o_flexgen.formats.kernel_table import MAX, SUM
from h2o_flexgen.kernels.functions import FUNCTIONS
from h2o_flexgen.kernels.operations import prompt_attention
from h2o_flexgen.kernels.prompt_attention import prompt_attention_twin
from tests.helpers.all_of import all_of
from tests.kernels.variants import VARIANTS, never, used

SHAPES = [  # rows, kv_heads, group, held, tokens, dim
    (1, 1, 1, 0, 1, 64), (3, 2, 1, 0, 17, 64), (2, 1, 4, 5, 33, 128), (4, 2, 3, 0, 130, 80), (5, 1, 2, 9, 3, 3),
    (2, 2, 1, 70, 200, 64), (1, 2, 1, 0, 300, 16), (2, 1, 2, 64, 64, 256), (2, 1, 20, 7, 33, 40),
]  # fmt: skip
TOLERANCES = {
    torch.float32: 3e-6,
    torch.bfloat16: 2e-2,
    torch.float16: 2.5e-3,
}  # of an outcome: the twin rounds shares to 16 bits, and both it
SUMS = 1e-5  # of the largest sum, whatever the dtype: scores and shares are in float32 everywhere


class Drawn(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    before: Tensor
    weights: Tensor

    def rows(self, rows: slice) -> Drawn:
        return Drawn(*(tensor[rows] for tensor in self))

    def attended(self, gathers: str = SUM, window: int | None = None) -> tuple[Tensor, Tensor]:
        out, got = prompt_attention(*self, gathers=gathers, window=window)
        assert got is not None
        return out, got


def drawn(shape: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0) -> Drawn:
    rows, kv_heads, group, held, tokens, dim = shape
    draw = torch.Generator().manual_seed(sum(shape))
    q = (scale * torch.randn(rows, tokens, kv_heads * group, dim, generator=draw)).to(dtype).transpose(1, 2)
    k, v = (torch.randn(rows, held + tokens, kv_heads, dim, generator=draw).to(dtype).transpose(1, 2) for _ in range(2))
    before = torch.randint(0, held + 1, (rows,), generator=draw)
    before[0] = held
    lengths = torch.randint(1, tokens + 1, (rows, 1), generator=draw)
    return Drawn(q, k, v, before, torch.rand(rows, tokens, generator=draw) * (torch.arange(tokens) < lengths))


def with_threads(count: int, given: Drawn, gathers: str) -> tuple[Tensor, Tensor]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return given.attended(gathers)
    finally:
        torch.set_num_threads(before)


def exact(given: Drawn, gathers: str = SUM, window: int | None = None) -> tuple[Tensor, Tensor]:
    (rows, heads, tokens, dim), (kv_heads, keys) = given.q.shape, given.k.shape[1:3]
    k, v = (x.double().repeat_interleave(heads // kv_heads, 1) for x in (given.k, given.v))
    place, held = torch.arange(keys), keys - tokens
    later = place > torch.arange(tokens)[:, None] + held
    missing = (place >= given.before[:, None, None]) & (place < held)
    if window is not None:
        turn = torch.where(place < held, place, place - held + given.before[:, None])[:, None]  # among the row's own keys
        missing = missing | (turn <= torch.arange(tokens)[:, None] + given.before[:, None, None] - window)
    scores = given.q.double() @ k.transpose(2, 3) * dim**-0.5
    shares = scores.masked_fill((later | missing)[:, None], -torch.inf).softmax(-1)
    weighted = (shares * given.weights[:, None, :, None]).view(rows, kv_heads, -1, keys)  # all heads of a group
    got = weighted.amax(2) if gathers == MAX else weighted.sum(2)
    return (shares @ v).transpose(1, 2).reshape(rows, tokens, heads * dim), got


@cache
def known(
    shape: tuple[int, ...], dtype: torch.dtype, scale: float, gathers: str, window: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What torch makes of it and what is exact, each the outcome and the sums: computed once for all libraries."""
    given = drawn(shape, dtype, scale)
    out, got = prompt_attention_twin(*given, gathers=gathers, window=window)
    assert got is not None
    return out, got, *exact(given, gathers, window)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", list(TOLERANCES))
@all_of({"shape": SHAPES, "scale": [0.01, 1.0, 30.0]})
def test_c_is_as_near_to_float64_as_torch(
    variant: str, dtype: torch.dtype, shape: tuple[int, ...], scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = drawn(shape, dtype, scale)
    monkeypatch.setitem(FUNCTIONS, "prompt_attention_twin", never)
    for gathers in (SUM, MAX):
        with used(variant):
            out, got = given.attended(gathers)
        twin, twin_got, expected, expected_got = known(shape, dtype, scale, gathers)
        assert out.dtype == twin.dtype == dtype and got.dtype == twin_got.dtype == torch.float32
        for (ours, theirs, wanted), tolerance in (
            ((out, twin, expected), TOLERANCES[dtype]),
            ((got, twin_got, expected_got), SUMS),
        ):
            assert ours.shape == theirs.shape == wanted.shape
            assert (ours.double() - wanted).abs().max() <= tolerance * max(1.0, scale) * wanted.abs().max()
            assert (ours.double() - theirs.double()).abs().max() <= 2 * tolerance * max(1.0, scale) * wanted.abs().max()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", list(TOLERANCES))
@all_of({"shape": SHAPES, "window": [1, 7, 64, 150]})
def test_a_window_hides_what_is_far_away(
    variant: str, dtype: torch.dtype, shape: tuple[int, ...], window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = drawn(shape, dtype)
    monkeypatch.setitem(FUNCTIONS, "prompt_attention_twin", never)
    for gathers in (SUM, MAX):
        with used(variant):
            out, got = given.attended(gathers, window)
        twin, twin_got, expected, expected_got = known(shape, dtype, 1.0, gathers, window)
        for ours, wanted, tolerance in (
            *((one, expected, TOLERANCES[dtype]) for one in (out, twin)),
            *((one, expected_got, SUMS) for one in (got, twin_got)),
        ):
            assert (ours.double() - wanted).abs().max() <= tolerance * wanted.abs().max()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", list(TOLERANCES))
@all_of({"shape": SHAPES})
def test_the_outcome_does_not_depend_on_whether_sums_are_asked(
    variant: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    given = drawn(shape, dtype)
    with used(variant):
        alone, nothing = prompt_attention(*given[:4], None)
        assert nothing is None and torch.equal(alone, given.attended()[0])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", list(TOLERANCES))
@all_of({"gathers": [SUM, MAX]})
def test_neither_strides_nor_neighbours_nor_threads_change_a_bit(variant: str, dtype: torch.dtype, gathers: str) -> None:
    given = drawn((5, 3, 2, 30, 77, 64), dtype)
    by_head = given._replace(q=given.q.contiguous(), k=given.k.contiguous(), v=given.v.contiguous())
    assert not given.k.is_contiguous()
    with used(variant):
        expected = given.attended(gathers)
        turned = by_head.attended(gathers)
        alone = [given.rows(slice(row, row + 1)).attended(gathers) for row in range(5)]
        threaded = [with_threads(count, given, gathers) for count in (1, 3)]
    for place in range(2):
        assert torch.equal(turned[place], expected[place])
        assert all(torch.equal(one[place], expected[place]) for one in threaded)
        assert torch.equal(torch.cat([one[place] for one in alone]), expected[place])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", list(TOLERANCES))
@all_of({"length": [1, 6, 47, 64, 65, 99]})
def test_pads_behind_a_text_change_no_bit_of_it(variant: str, dtype: torch.dtype, length: int) -> None:
    padded = drawn((2, 2, 2, 0, 100, 64), dtype)
    padded = padded._replace(weights=torch.rand(2, 100) * (torch.arange(100) < length))
    text = Drawn(*(x[:, :, :length] for x in padded[:3]), padded.before, padded.weights[:, :length])
    with used(variant):
        for gathers in (SUM, MAX):
            (out, got), (expected, expected_got) = padded.attended(gathers), text.attended(gathers)
            assert torch.equal(out[:, :length], expected) and torch.equal(got[..., :length], expected_got)
            assert (got[..., length:] == 0).all()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_what_a_row_does_not_hold_changes_nothing(variant: str, dtype: torch.dtype) -> None:
    given = drawn((4, 2, 2, 40, 20, 64), dtype)
    missing = (torch.arange(60) >= given.before[:, None]) & (torch.arange(60) < 40)
    with used(variant):
        expected = given.attended()
        given.k.masked_fill_(missing[:, None, :, None], 1e4)
        given.v.masked_fill_(missing[:, None, :, None], -1e4)
        after = given.attended()
    assert torch.equal(after[0], expected[0]) and torch.equal(after[1], expected[1])
    assert (expected[1].masked_select(missing[:, None]) == 0).all() and missing.any()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", list(TOLERANCES))
@all_of({"where": ["q", "k"]})
def test_what_is_no_number_stays_none(variant: str, dtype: torch.dtype, where: str) -> None:
    given = drawn((2, 2, 2, 0, 20, 64), dtype)
    getattr(given, where)[1, 1, 3, 5] = torch.nan
    with used(variant):
        out, got = given.attended()
        assert torch.equal(given.attended(MAX)[1].isnan(), got.isnan())
    twin, _ = prompt_attention_twin(*given)
    assert torch.equal(out.isnan(), twin.isnan()) and out.isnan().any()


def test_other_types_are_attended_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FUNCTIONS, "prompt_attention_twin", lambda *_: ("twin", None))
    given = drawn((1, 2, 1, 0, 7, 64), torch.float64)
    assert prompt_attention(*given)[0] == "twin"
