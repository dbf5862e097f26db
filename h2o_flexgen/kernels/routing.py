"""Routers and what comes of them: the experts that rows are given to, and the rows of each. In C and in torch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from h2o_flexgen.kernels.native import KINDS, pointer, run, threads_for
from h2o_flexgen.kernels.raw_memory import address_of

SOFTMAX_OF_ALL, SOFTMAX_OF_CHOSEN, SIGMOID_OF_EACH = range(3)  # as in C: what makes a share of a score
WORK_OF_A_SCORE = 16  # values that take as long as choosing from one score

# -- route -----------------------------------------------------------------------------------------------------------------
# The experts with the highest scores of each row, and their shares in fp32. Among equals the one with the lowest number comes
# first, and a NaN ranks above all. C and torch differ in the last bits of a share. With C what becomes of a row depends on
# nothing but the row.


@dataclass(frozen=True)
class RouterRule:
    """How a router chooses."""

    way: int
    sums_to_one: bool = False  # the shares of the chosen ones
    least_sum: float = 0.0  # is added to their sum first
    factor: float = 1.0  # of shares
    groups: int = 1  # of experts, equally many side by side
    chosen_groups: int = 1  # of them; experts of others are not chosen
    best_of_group: int = 1  # so many of its experts, which rank highest, say what a group ranks by: the sum of these


class RouterScores(NamedTuple):
    """What a router says of rows."""

    scores: Tensor  # (rows, experts)
    correction: Tensor | None = None  # (experts,), fp32: is added for the choice alone, to shares or to what is made one
    factors: Tensor | None = None  # alike: of shares


class Chosen(NamedTuple):
    shares: Tensor  # (rows, chosen), fp32; rows may lie apart
    numbers: Tensor  # alike, int32


def route(scored: RouterScores, rule: RouterRule, out: Chosen, total: Tensor | None) -> None:
    """total (rows, width), fp32, becomes zeros"""
    scores, (rows, experts), of_experts = scored.scores.contiguous(), scored.scores.shape, scored[1:]
    chosen, width = out.numbers.shape[1], 0 if total is None else total.shape[1]
    assert all(each is None or (each.dtype == torch.float32 and each.shape == (experts,)) for each in of_experts)
    assert experts % rule.groups == 0 and chosen * rule.groups <= experts * rule.chosen_groups
    assert 0 < chosen <= experts and out.shares.stride(1) == out.numbers.stride(1) == 1
    given = _Routing(
        *(pointer(scores), *(None if each is None else pointer(each) for each in of_experts)),
        *(address_of(part, writes=True) for part in out),
        None if total is None else address_of(total, writes=True),
        *(rows, experts, chosen, width),
        *(part.stride(0) * part.itemsize for part in out),
        0 if total is None else total.stride(0) * total.itemsize,
        *(rule.least_sum, rule.factor, KINDS[scores.dtype], rule.way, rule.sums_to_one),
        *(rule.groups, rule.chosen_groups, rule.best_of_group),
    )
    run("route", given, threads_for(scores.numel() * WORK_OF_A_SCORE))


def route_twin(scored: RouterScores, rule: RouterRule, out: Chosen, total: Tensor | None) -> None:
    (scores, correction, factors), chosen = scored, out.numbers.shape[1]
    wide, is_corrected = scores.float(), correction is not None
    values = wide.neg().exp_().add_(1.0).reciprocal_() if rule.way == SIGMOID_OF_EACH else wide
    if rule.way == SOFTMAX_OF_ALL and is_corrected:
        values = functional.softmax(values, dim=-1)
    ranked = values if correction is None else values + correction
    if rule.groups > 1:
        ranked = _of_best_groups(ranked, rule)
    numbers = ranked.sort(dim=-1, descending=True, stable=True).indices[:, :chosen]
    if rule.way == SOFTMAX_OF_ALL and not is_corrected:
        values = functional.softmax(values, dim=-1)
    shares = values.gather(-1, numbers)
    if rule.way == SOFTMAX_OF_CHOSEN:
        shares = functional.softmax(shares, dim=-1)
    if rule.sums_to_one:
        shares = shares / (shares.sum(dim=-1, keepdim=True) + rule.least_sum)
    out.shares.copy_(shares * rule.factor if factors is None else shares * rule.factor * factors[numbers])
    out.numbers.copy_(numbers)
    if total is not None:
        total.zero_()


def _of_best_groups(ranked: Tensor, rule: RouterRule) -> Tensor:
    """What experts (rows, experts) rank by, with those of other groups behind all."""
    by_group = ranked.view(len(ranked), rule.groups, -1)
    best = by_group.sort(dim=-1, descending=True).values[..., : rule.best_of_group]
    of_groups = sum(best.unbind(-1)[1:], best[..., 0])  # in their order, as in C
    groups = of_groups.sort(dim=-1, descending=True, stable=True).indices[:, : rule.chosen_groups]
    is_chosen = torch.zeros_like(of_groups, dtype=torch.bool).scatter(-1, groups, True)
    return by_group.masked_fill(~is_chosen[..., None], -torch.inf).flatten(-2)


class _Routing(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("scores", "correction", "factors", "shares", "numbers", "total")),
        *((name, ctypes.c_long) for name in ("rows", "experts", "chosen", "width")),
        *((name, ctypes.c_long) for name in ("shares_row", "numbers_row", "total_row")),
        *((name, ctypes.c_float) for name in ("least_sum", "factor")),
        *((name, ctypes.c_int) for name in ("kind", "way", "sums_to_one")),
        *((name, ctypes.c_long) for name in ("groups", "chosen_groups", "best_of_group")),
    )


# -- gather chosen ---------------------------------------------------------------------------------------------------------
# The rows that some experts were given, expert by expert. C and torch give the same bits.


class GatheredRows(NamedTuple):
    """The rows of some experts. There are as many as `begins` says; what lies behind them is nothing."""

    rows: Tensor  # (most, width)
    to: Tensor  # (most,), int64: the token of each
    weights: Tensor  # (most,), fp32: its share
    begins: Tensor  # (experts + 2,), int64: the first row of each, where the last one ends, and the rows left to later turns


def gather_chosen(chosen: Chosen, rows: Tensor, experts: range, most: int, turn: int) -> GatheredRows:
    """The rows (tokens, width) that these experts were given. In one turn come as many whole experts as have no more than
    `most` rows together, or one of them, which may have as many as there are tokens."""
    tokens, width = rows.shape
    assert rows.stride(1) == 1 and tokens <= most
    out = GatheredRows(
        rows.new_empty(most, width),
        torch.empty(most, dtype=torch.long),
        torch.empty(most, dtype=torch.float32),
        torch.empty(len(experts) + 2, dtype=torch.long),
    )
    given = _Gathering(
        *(address_of(part) for part in (chosen.numbers, chosen.shares, rows)),
        *map(pointer, out),
        *(tokens, chosen.numbers.shape[1], width * rows.itemsize),
        *(part.stride(0) * part.itemsize for part in (chosen.numbers, chosen.shares, rows)),
        *(experts.start, len(experts), most, turn),
    )
    run("gather_chosen", given, threads_for(most * width))
    return out


def gather_chosen_twin(chosen: Chosen, rows: Tensor, experts: range, most: int, turn: int) -> GatheredRows:
    table = chosen.numbers.flatten()
    places = ((table >= experts.start) & (table < experts.stop)).nonzero().squeeze(1)
    numbers = table[places] - experts.start
    counts = torch.bincount(numbers, minlength=len(experts)).tolist()
    turns = _turns(counts, most)
    here = [count if its == turn else 0 for count, its in zip(counts, turns)]
    before, later = (sum(count for count, its in zip(counts, turns) if others(its)) for others in (turn.__gt__, turn.__lt__))
    own = places[numbers.argsort(stable=True)][before : before + sum(here)]
    to = own.div(chosen.numbers.shape[1], rounding_mode="floor")
    begins = torch.tensor([0, *here]).cumsum(0)
    return GatheredRows(rows[to], to, chosen.shares.flatten()[own], torch.cat((begins, torch.tensor([later]))))


def _turns(counts: list[int], most: int) -> list[int]:
    """The turn of each expert."""
    turns, turn, together = list[int](), 0, 0
    for count in counts:
        if together and together + count > most:
            turn, together = turn + 1, 0
        together += count
        turns.append(turn)
    return turns


class _Gathering(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("numbers", "shares", "rows", "out", "to", "weights", "begins")),
        *((name, ctypes.c_long) for name in ("tokens", "chosen", "nbytes", "numbers_row", "shares_row", "rows_row")),
        *((name, ctypes.c_long) for name in ("first", "experts", "most", "turn")),
    )
