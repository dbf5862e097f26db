"""Routers choose the highest scores, the first of equals, and rows are gathered expert by expert: in C as in torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from h2o_flexgen.kernels.routing import (
    SIGMOID_OF_EACH,
    SOFTMAX_OF_ALL,
    SOFTMAX_OF_CHOSEN,
    Chosen,
    RouterRule,
    RouterScores,
    gather_chosen,
    gather_chosen_twin,
    route,
    route_twin,
)
from tests.kernels.variants import VARIANTS, used

TOKENS, EXPERTS, CHOSEN, WIDTH = 23, 37, 5, 24
RULES = (
    RouterRule(SOFTMAX_OF_ALL),
    RouterRule(SOFTMAX_OF_ALL, sums_to_one=True),
    RouterRule(SOFTMAX_OF_CHOSEN),
    RouterRule(SIGMOID_OF_EACH, True, 1e-20, 2.5),
)
GROUPED = (
    RouterRule(SOFTMAX_OF_ALL, factor=1.7, groups=6, chosen_groups=2),
    RouterRule(SIGMOID_OF_EACH, True, 1e-20, 2.5, groups=4, chosen_groups=3, best_of_group=2),
    RouterRule(SIGMOID_OF_EACH, groups=12, chosen_groups=5),
)


def scores_of(dtype: torch.dtype) -> Tensor:
    """Rounded ones: some are equal, also where the rule ends."""
    made = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(1))
    scores = (made * 4).round().div(2).to(dtype)
    scores[3] = -0.0
    scores[3, ::2] = 0.0
    scores[4] = float("-inf")
    scores[4, 7] = 1.0
    return scores


def room() -> tuple[Chosen, Tensor]:
    """Parts of something wider, as mixtures have them."""
    wide = torch.full((TOKENS, WIDTH + 2 * CHOSEN + 3), 7.0)
    total, shares, numbers, _ = wide.split((WIDTH, CHOSEN, CHOSEN, 3), dim=1)
    return Chosen(shares, numbers.view(torch.int32)), total


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_routes_in_c_are_those_of_torch(variant: str, rule: RouterRule, dtype: torch.dtype) -> None:
    scores = scores_of(dtype)
    correction = torch.linspace(0, 4, EXPERTS) if rule.way == SIGMOID_OF_EACH else None
    (expected, nothing), (found, total) = room(), room()
    route_twin(RouterScores(scores, correction), rule, expected, nothing)
    with used(variant):
        route(RouterScores(scores, correction), rule, found, total)
    if rule.way != SIGMOID_OF_EACH:  # there the last bits may make two ranks of one
        assert torch.equal(found.numbers, expected.numbers)
    assert torch.allclose(found.shares.sort(dim=1).values, expected.shares.sort(dim=1).values, rtol=1e-5, atol=1e-7)
    assert not total.any() and not nothing.any()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rule", RULES)
def test_a_correction_changes_the_choice_and_factors_the_shares(variant: str, rule: RouterRule) -> None:
    scores = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(3))
    correction, factors = torch.linspace(-2, 2, EXPERTS), torch.linspace(0.5, 3, EXPERTS)
    (whole, _), (plain, _), (expected, _) = room(), room(), room()
    with used(variant):
        route(RouterScores(scores, correction, factors), rule, whole, None)
        route(RouterScores(scores, correction), rule, plain, None)
    route_twin(RouterScores(scores, correction, factors), rule, expected, None)
    assert torch.equal(whole.numbers, expected.numbers) and torch.equal(whole.numbers, plain.numbers)
    assert torch.allclose(whole.shares, expected.shares, rtol=1e-5, atol=1e-7)
    assert torch.allclose(whole.shares, plain.shares * factors[plain.numbers.long()], rtol=1e-6)
    made = {SIGMOID_OF_EACH: torch.sigmoid, SOFTMAX_OF_ALL: lambda x: x.softmax(-1), SOFTMAX_OF_CHOSEN: torch.clone}[rule.way]
    assert torch.equal(whole.numbers.long(), (made(scores) + correction).topk(CHOSEN).indices)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_row_is_routed_alone_as_in_company(variant: str) -> None:
    scores = scores_of(torch.bfloat16)
    with used(variant):
        for rule in RULES:
            whole, _ = room()
            route(RouterScores(scores), rule, whole, None)
            for row in range(TOKENS):
                alone, _ = room()
                route(RouterScores(scores[row : row + 1]), rule, Chosen(*(part[:1] for part in alone)), None)
                assert all(torch.equal(one[:1], other[row : row + 1]) for one, other in zip(alone, whole))


def chosen_by_hand(ranked: list[float], rule: RouterRule) -> list[int]:
    """The experts of a row, the first of equals first."""
    size = len(ranked) // rule.groups
    groups = [range(first, first + size) for first in range(0, len(ranked), size)]
    worth = [sum(sorted((ranked[expert] for expert in own), reverse=True)[: rule.best_of_group]) for own in groups]
    best = sorted(range(rule.groups), key=lambda group: -worth[group])[: rule.chosen_groups]
    among = sorted(expert for group in best for expert in groups[group])
    return sorted(among, key=lambda expert: -ranked[expert])[:CHOSEN]


@pytest.mark.parametrize("variant", [*VARIANTS, None])
@pytest.mark.parametrize("rule", GROUPED)
def test_experts_are_chosen_from_the_best_groups(variant: str | None, rule: RouterRule) -> None:
    scores = torch.randn(TOKENS, 24, generator=torch.Generator().manual_seed(3))
    scores[1] = scores[1].round()
    correction = torch.linspace(1, -1, 24) if rule.way == SIGMOID_OF_EACH else None
    found, _ = room()
    with used(variant or VARIANTS[0]):
        (route if variant else route_twin)(RouterScores(scores, correction), rule, found, None)
    values = scores if correction is None else scores.sigmoid()
    ranked = values if correction is None else values + correction
    for row in range(TOKENS):
        numbers = chosen_by_hand(ranked[row].tolist(), rule)
        assert found.numbers[row].tolist() == numbers, row
        shares = values[row].softmax(-1)[numbers] if correction is None else values[row][numbers]
        shares = shares / shares.sum() if rule.sums_to_one else shares
        torch.testing.assert_close(found.shares[row], shares * rule.factor, rtol=1e-5, atol=1e-7)


def test_a_nan_ranks_above_all_and_spoils_its_row_alone() -> None:
    scores = scores_of(torch.float32)
    scores[5, 9] = float("nan")
    (expected, _), (found, _) = room(), room()
    route_twin(RouterScores(scores), RULES[0], expected, None)
    with used(VARIANTS[0]):
        route(RouterScores(scores), RULES[0], found, None)
    for chosen in (expected, found):
        assert chosen.numbers[5, 0] == 9 and chosen.shares[5].isnan().all() and not chosen.shares[6:].isnan().any()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("experts", [range(EXPERTS), range(4, 9), range(36, 37)])
def test_gathered_rows_in_c_are_those_of_torch(variant: str, dtype: torch.dtype, experts: range) -> None:
    chosen, _ = room()
    route_twin(RouterScores(scores_of(torch.float32)), RULES[0], chosen, None)
    rows = torch.randn(TOKENS, WIDTH + 5, generator=torch.Generator().manual_seed(2)).to(dtype)[:, 2 : 2 + WIDTH]
    seen, left = 0, 1
    for turn in range(2 * EXPERTS):
        expected = gather_chosen_twin(chosen, rows, experts, TOKENS, turn)
        with used(variant):
            found = gather_chosen(chosen, rows, experts, TOKENS, turn)
        there = int(found.begins[-2])
        left = int(found.begins[-1])
        assert torch.equal(found.begins, expected.begins) and there == len(expected.rows)
        for one, other in zip(found[:3], expected):
            assert torch.equal(one[:there], other)
        seen += there
        if not left:
            break
    asked = sum(int((chosen.numbers == number).sum()) for number in experts)
    assert seen == asked and not left
