"""Levels: KV heads that keep equally much, of layers that have heads of one kind. Without head budgets there is one level, of
all heads, where all layers see equally far.

A level's slots are one range in memory, as all slots of a layer are where heads are equal. So head budgets are rounded to a few
levels: every further one costs each layer that has heads of it another attention.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, pairwise
from math import inf, log
from typing import ClassVar

from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.seats import SeatNeed
from h2o_flexgen.policies.by_position import Full, Local
from h2o_flexgen.policies.head_budgets import ByHead, HeadBudgets
from h2o_flexgen.policies.kv_options import DEFAULT_KEPT, KVOptions
from h2o_flexgen.policies.policy import KVPolicy


class Window(Local):
    """What layers with a sliding window keep: the tokens that the next one sees. It is not chosen; models have it. Its `recent`
    tokens and the newest one are the window."""

    name: ClassVar[str] = "window"
    accepts: ClassVar[tuple[str, ...]] = ("recent", "positions")

    @property
    def sees(self) -> int | None:
        return self.options.total(0, 0) + 1


MOST_LEVELS = 6  # with 4 a model of 90 heads lost answers that it has with heads of their own (docs/log/eviction.md)
NEARLY_ALL = 0.9  # heads that would keep more than this keep all
FINENESS = 100  # shares are distinguished to a hundredth
LEAST_SHARE = 1e-9  # instead of 0, which no policy accepts: such a head keeps one slot


@dataclass(frozen=True)
class Level:
    policy: KVPolicy
    heads: tuple[tuple[int, ...], ...]  # of each layer with KV, ascending; a layer may have none at this level

    def only(self, places: Iterable[int]) -> Level:
        """The same of some layers, by their places among those with KV."""
        return replace(self, heads=tuple(self.heads[place] for place in places))


def levels_of(policy: KVPolicy, budgets: HeadBudgets | None, spec: ModelSpec) -> tuple[Level, ...]:
    """The levels of a model: those of a policy, the one that keeps most first, for layers that see everything, and those of
    windows for the others."""
    levels, windows = _levels_of_policy(policy, budgets, spec), spec.windows
    far = [replace(level, heads=_where_all_is_seen(level.heads, windows)) for level in levels] if any(windows) else levels
    near = [_of_window(policy, width, spec) for width in sorted({width for width in windows if width is not None})]
    return tuple(chain.from_iterable(_by_kind(level, spec) for level in (*far, *near)))


def _by_kind(level: Level, spec: ModelSpec) -> Iterator[Level]:
    """The heads of a level, those of layers with equally many of one width by themselves."""
    kinds = [(own.kv_heads, own.head_dim) for own in map(spec.at, spec.kv_layers)]
    for kind in dict.fromkeys(own for own, heads in zip(kinds, level.heads, strict=True) if heads):
        yield replace(level, heads=tuple(heads if own == kind else () for own, heads in zip(kinds, level.heads)))


def _where_all_is_seen(heads: tuple[tuple[int, ...], ...], windows: Sequence[int | None]) -> tuple[tuple[int, ...], ...]:
    return tuple(own if window is None else () for own, window in zip(heads, windows, strict=True))


def _of_window(policy: KVPolicy, width: int, spec: ModelSpec) -> Level:
    keeping = Window(KVOptions(recent=width - 1, positions=policy.options.positions))
    return Level(keeping, tuple(heads if own == width else () for own, heads in zip(spec.windows, _all_heads(spec))))


def _all_heads(spec: ModelSpec) -> tuple[tuple[int, ...], ...]:
    """Those of each layer with KV."""
    return tuple(tuple(range(spec.at(layer).kv_heads)) for layer in spec.kv_layers)


def _levels_of_policy(policy: KVPolicy, budgets: HeadBudgets | None, spec: ModelSpec) -> tuple[Level, ...]:
    if budgets is None:
        return (Level(policy, _all_heads(spec)),)
    budgets.refuse_other(spec)
    rounded = _shares(budgets, policy.options.kv_budget or DEFAULT_KEPT)
    shares = sorted(set(chain.from_iterable(rounded)), reverse=True)
    return tuple(Level(_keeping(policy, share), tuple(_heads(of_layer, share) for of_layer in rounded)) for share in shares)


@lru_cache(maxsize=8)
def _shares(budgets: HeadBudgets, budget: float) -> ByHead:
    """The share of each head, of which few differ. A search asks for the same ones for each of thousands of plans."""
    return _rounded(_with_whole(budgets.at(budget)))


def _heads(of_layer: Sequence[float], share: float) -> tuple[int, ...]:
    return tuple(head for head, own in enumerate(of_layer) if own == share)


def _keeping(policy: KVPolicy, share: float) -> KVPolicy:
    if share == 1:
        return Full(KVOptions(kv_recall=policy.options.kv_recall))
    return replace(policy, options=replace(policy.options, kv_budget=max(share, LEAST_SHARE)), least_slots=1)


def may_keep_one(policy: KVPolicy) -> bool:
    """Whether heads may be left a single token: there are none that the policy cannot do without."""
    try:
        _keeping(policy, 0.0).alone(SeatNeed(1, 1))
    except ValueError:
        return False
    return True


def _with_whole(shares: ByHead) -> ByHead:
    """Heads that need nearly all keep all; the shares of the others shrink for it, in proportion."""
    all_shares = [*chain.from_iterable(shares)]
    rest = [share for share in all_shares if share <= NEARLY_ALL]
    whole = len(all_shares) - len(rest)
    if not rest or whole >= sum(all_shares):
        return shares
    factor = (sum(all_shares) - whole) / sum(rest)
    return tuple(tuple(1.0 if share > NEARLY_ALL else share * factor for share in of_layer) for of_layer in shares)


def _rounded(shares: ByHead) -> ByHead:
    """The same with a few different values, as near as possible and with the same mean."""
    counted = Counter(round(share * FINENESS) for share in chain.from_iterable(shares))
    sums: defaultdict[int, float] = defaultdict(float)
    for share in chain.from_iterable(shares):
        sums[round(share * FINENESS)] += share
    bins = sorted(counted)
    level_of: dict[int, float] = {}
    for start, end in pairwise(_bounds(bins, counted)):
        members = bins[start:end]
        mean = sum(sums[one] for one in members) / sum(counted[one] for one in members)
        level_of |= dict.fromkeys(members, 1.0 if members == [FINENESS] else mean)
    return tuple(tuple(level_of[round(share * FINENESS)] for share in of_layer) for of_layer in shares)


def _bounds(bins: Sequence[int], counted: Counter[int]) -> tuple[int, ...]:
    """Cuts the values so that squared distances of logarithms within the pieces are least: a head with a few slots misses each
    of them more than one with many. What keeps all is a piece of its own."""
    end = len(bins)
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    for _ in range(MOST_LEVELS):
        longer = dict(best)
        for start, (cost, cuts) in best.items():
            for stop in range(start + 1, end + 1):
                total = cost + _spread(bins[start:stop], counted)
                if total < longer.get(stop, (inf, ()))[0]:
                    longer[stop] = total, (*cuts, stop)
        best = longer
    return best[end][1]


def _spread(values: Sequence[int], counted: Counter[int]) -> float:
    if FINENESS in values and len(values) > 1:
        return inf
    logs = {value: log(max(value, 0.5)) for value in values}
    mean = sum(logs[value] * counted[value] for value in values) / sum(counted[value] for value in values)
    return sum(counted[value] * (logs[value] - mean) ** 2 for value in values)
