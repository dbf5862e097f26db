"""Tokens that are picked in C are those that torch picks, with the same random numbers, whatever is asked for."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from h2o_flexgen.kernels.operations import likeliest, pick_tokens
from h2o_flexgen.kernels.pick_tokens import Draw, ScoreChanges, TokenMasks, likeliest_twin, mask_words, pick_tokens_twin
from tests.helpers.all_of import all_of
from tests.kernels.variants import VARIANTS, used, without

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = {  # nucleus, least, highest
    "all": (math.inf, 0.0, 0),
    "nucleus": (0.9, 0.0, 0),
    "narrow nucleus": (0.2, 0.0, 0),
    "least": (math.inf, 0.05, 0),
    "highest": (math.inf, 0.0, 7),
    "one": (math.inf, 0.0, 1),
    "most": (math.inf, 0.0, 900),
    "highest of nucleus": (0.7, 0.01, 40),
}
AT_ONCE = 1 << 14  # few logits: rows come in portions


def some_logits(rows: int, vocab: int, dtype: torch.dtype, spread: float) -> Tensor:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows + vocab)) * spread
    logits[:, ::7] = logits[:, :1].clone()  # equal ones
    logits[:, 3::11] = -math.inf
    return logits.to(dtype)


def draws_of(rows: int, kinds: list[tuple[float, float, int]], temperature: float) -> list[Draw]:
    each = (kinds[row % len(kinds)] for row in range(rows))
    return [Draw(2**63 + row % 3, row, 2**40 + row, row % 2, temperature * (row % 5), *kind) for row, kind in enumerate(each)]


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"dtype": DTYPES, "shape": [(1, 1), (5, 63), (3, 4097), (99, 1000)], "kind": [None, *KINDS], "temperature": [0.2, 3.0]})
def test_c_and_torch_pick_the_same_tokens(
    variant: str, dtype: torch.dtype, shape: tuple[int, int], kind: str | None, temperature: float
) -> None:
    logits = some_logits(*shape, dtype, 2.0)
    draws = draws_of(shape[0], [KINDS[kind]] if kind else [*KINDS.values()], temperature)
    with used(variant), without("pick_tokens_twin"):
        picked, greedy = pick_tokens(logits, draws, at_once=AT_ONCE), pick_tokens(logits)
    assert torch.equal(picked.found, pick_tokens_twin(logits, draws, None, Tensor.to, AT_ONCE).found)
    assert torch.equal(greedy.found, pick_tokens_twin(logits, None, None, Tensor.to, AT_ONCE).found)
    assert torch.equal(greedy.best, logits.float().amax(-1)) and torch.equal(picked.best, greedy.best)


@cache
def drawn_from_a_wide_vocabulary(kind: str) -> tuple[Tensor, list[Draw], Tensor]:
    """The logits, the draws, and what torch finds."""
    logits = some_logits(2, 20_000, torch.float32, 1.0).repeat(60, 1)
    draws = [draw._replace(temperature=0.8) for draw in draws_of(120, [KINDS[kind]], 1.0)]
    return logits, draws, pick_tokens_twin(logits, draws, None, Tensor.to, 1 << 20).found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_number_draws_the_same_token_from_a_wide_vocabulary(variant: str, kind: str) -> None:
    """Thousands of numbers for a few distributions: sums in another order must not move the borders between tokens."""
    logits, draws, expected = drawn_from_a_wide_vocabulary(kind)
    with used(variant), without("pick_tokens_twin"):
        assert torch.equal(pick_tokens(logits, draws).found, expected)


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"dtype": DTYPES, "draws": [False, True]})
def test_scores_are_changed_with_the_same_bits(variant: str, dtype: torch.dtype, draws: bool) -> None:
    random, rows, vocab = np.random.default_rng(3), 40, 500
    logits = some_logits(rows, vocab, dtype, 3.0)
    counts = [0, 1, 30, 400] * (rows // 4)
    ids = np.concatenate([random.permutation(vocab)[:count] for count in counts])
    added, times = random.standard_normal(len(ids)).astype(np.float32), random.integers(0, 4, len(ids)).astype(np.float32)
    added[::9], times[::5] = -np.inf, np.nan
    penalties = random.uniform(0.1, 2.0, (rows, 3)).astype(np.float32)
    only = [count == 30 for count in counts]
    changes = ScoreChanges([0, *np.cumsum(counts).tolist()], ids, added, times, penalties, only)
    asked = draws_of(rows, [*KINDS.values()], 0.7) if draws else None
    with used(variant), without("pick_tokens_twin"):
        picked = pick_tokens(logits, asked, changes)
    twin = pick_tokens_twin(logits, asked, changes, Tensor.to, 1 << 20)
    assert torch.equal(picked.found, twin.found) and torch.equal(picked.best, twin.best.float())


def some_masks(rows: int, vocab: int, words: int) -> tuple[TokenMasks, Tensor]:
    """Masks of most rows, and which tokens of each row they allow: few, all, nearly all, half of them."""
    random = np.random.default_rng(rows + vocab)
    shares = np.resize([2 / vocab, 1.0, 1 - 2 / vocab, 0.5], rows)
    allowed = random.random((rows, 32 * words)) < shares[:, None]
    allowed[:, 0] = True
    bits = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    of_rows = [-1 if row % 5 == 4 else rows - 1 - row for row in range(rows)]
    found = torch.ones(rows, vocab, dtype=torch.bool)
    for row, mask in enumerate(of_rows):
        if mask >= 0:
            found[row] = torch.zeros(vocab).bool()
            found[row, : 32 * words] = torch.from_numpy(allowed[mask])[:vocab]
    return TokenMasks(torch.from_numpy(bits.copy()), of_rows), found


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"dtype": DTYPES, "vocab": [1, 31, 500, 4097], "draws": [False, True], "changes": [False, True], "lacking": [0, 1]})
def test_tokens_that_a_mask_leaves_out_are_not_picked(
    variant: str, dtype: torch.dtype, vocab: int, draws: bool, changes: bool, lacking: int
) -> None:
    """`lacking`: words that masks are shorter than the vocabulary, of which the tokens may not come."""
    rows = 20
    logits = some_logits(rows, vocab, dtype, 3.0)
    logits[:, 0] = 0.0  # a token that is always allowed
    masks, allowed = some_masks(rows, vocab, max(1, mask_words(vocab) - lacking))
    asked = draws_of(rows, [*KINDS.values()], 0.7) if draws else None
    ids, one = np.arange(rows) % vocab, np.ones(rows, np.float32)
    changed = ScoreChanges([*range(rows + 1)], ids, one, one, np.ones((rows, 3), np.float32), [False] * rows)
    given = changed if changes else None
    with used(variant), without("pick_tokens_twin"):
        picked = pick_tokens(logits, asked, given, masks=masks)
    twin = pick_tokens_twin(logits, asked, given, Tensor.to, 1 << 10, masks)
    assert torch.equal(picked.found, twin.found) and torch.equal(picked.best, twin.best.float())
    assert allowed[torch.arange(rows), picked.found[0]].all()
    if asked is given is None:
        expected = logits.float().masked_fill(~allowed, -math.inf)
        assert torch.equal(picked.found[0], expected.argmax(-1)) and torch.equal(picked.best, expected.amax(-1))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 5, 1023, 1029])
def test_rows_without_a_finite_best_score_are_told(variant: str, value: float, place: int) -> None:
    logits = torch.randn(3, 1030)
    logits[1] = value if value < 0 else logits[1]
    logits[1, place] = value
    draws = [draw._replace(temperature=1.0) for draw in draws_of(3, [KINDS["all"]], 1.0)]
    with used(variant):
        for picked in (pick_tokens(logits), pick_tokens(logits, draws)):
            assert picked.found[1].tolist() == [1, 0, 1]
            assert picked.best[1].item() == pytest.approx(value, nan_ok=True)


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"shape": [(1, 1), (4, 300), (3, 5000), (40, 2000)], "count": [1, 5, 64, 10_000]})
def test_the_likeliest_come_in_order_and_equal_ones_by_their_places(variant: str, shape: tuple[int, int], count: int) -> None:
    values = some_logits(*shape, torch.bfloat16, 1.0).float()
    count = min(count, shape[1])
    with used(variant), without("likeliest_twin"):
        found = likeliest(values, count)
    for mine, of_twin in zip(found, likeliest_twin(values, count, 1 << 20)):
        assert torch.equal(mine, of_twin)
