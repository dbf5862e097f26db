"""Cases in which every two values of any two choices meet, or those that a test needs to: few beside all combinations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any

import pytest

from tests.helpers.samples import every_nth, slow

Name = str | tuple[str, ...]  # a tuple names what is chosen together: each of its values is a tuple as well
Value = tuple[Name, int]  # what is chosen, and the number of a value of it
Pair = tuple[Value, Value]
Pairs = list[Pair]  # that a case is there for
Needs = Callable[[Mapping[Name, Any]], bool]  # whether two values, by the names of what is chosen, have to meet


MOST = 0.7  # of the pairs that are needed meet in the cases of the default run
ELSEWHERE = 0.5  # the same where what meets is held by other files as well: here work comes in another way


def covering(
    choices: Mapping[Name, Sequence[object]], seed: int = 0, tries: int = 10, needs: Needs = lambda pair: True
) -> list[dict[str, Any]]:
    """Few cases in which all pairs meet that a test `needs`: the fewest of some ways to draw them, those first that meet most.
    What a case need not have is the first of its choice, which is to be the plainest."""
    return [case for case, _ in _covering(choices, needs, seed, tries)]


def most_of(choices: Mapping[Name, Sequence[object]], needs: Needs = lambda pair: True, share: float = MOST) -> list[Any]:
    """The same cases. In the first of them each value and most pairs meet; the others, of which each adds few, are slow."""
    return _marked(_covering(choices, needs), share)


def _covering(
    choices: Mapping[Name, Sequence[object]], needs: Needs, seed: int = 0, tries: int = 10
) -> list[tuple[dict[str, Any], float]]:
    """Cases, and which share of the pairs has met before each; none, as long as a value has not."""
    names = list(choices)
    places = {name: range(len(choices[name])) for name in names}  # numbers instead of values, which may be long
    lacking: dict[Value, set[Value]] = {(name, place): set() for name in names for place in places[name]}
    for one, other in itertools.combinations(names, 2):
        for first, second in itertools.product(places[one], places[other]):
            if needs({one: choices[one][first], other: choices[other][second]}):
                lacking[one, first].add((other, second))
                lacking[other, second].add((one, first))
    assert all(lacking.values()) or len(names) < 2, "a value is in no case"
    order = {value: place for place, value in enumerate(sorted(lacking, key=str))}
    drawn = (_fewer(list(_drawn(places, lacking, order, Random(f"{seed} {number}")))) for number in range(tries))
    fewest = [{name: values.get(name, 0) for name in names} for values in map(_values, min(drawn, key=len))]
    chosen = [({name: choices[name][case[name]] for name in names}, met) for case, met in _most_first(fewest, lacking)]
    return [(each_apart(case), met) for case, met in chosen]


def _most_first(cases: list[dict[Name, int]], lacking: Mapping[Value, set[Value]]) -> Iterator[tuple[dict[Name, int], float]]:
    """Each next case brings the most values that have not been met, or else the most pairs."""
    left = [(case, set(case.items()), _pairs(case, lacking)) for case in cases]
    values, pairs = set(lacking), set[Pair]().union(*(pairs for _, _, pairs in left))
    every = max(1, len(pairs))
    while left:
        case, of_case, pairs_of_case = best = max(left, key=lambda one: (len(values & one[1]), len(pairs & one[2])))
        yield case, 0.0 if values else 1 - len(pairs) / every
        left.remove(best)
        values -= of_case
        pairs -= pairs_of_case


def _pairs(case: Mapping[Name, int], lacking: Mapping[Value, set[Value]]) -> set[Pair]:
    return {pair for pair in itertools.combinations(case.items(), 2) if pair[1] in lacking[pair[0]]}


def _drawn(
    places: Mapping[Name, Sequence[int]], lacking: Mapping[Value, set[Value]], order: Mapping[Value, int], random: Random
) -> Iterator[Pairs]:
    """The pairs that meet in each case for the first time. A case is built value by value around a pair that has not met, each
    value one that meets most for the first time. `order`: of all values, so that the same cases are drawn every time."""
    missing = {value: set(others) for value, others in lacking.items()}
    while any(missing.values()):
        first = max(missing, key=lambda value: (len(missing[value]), random.random()))
        case = {first, random.choice(sorted(missing[first], key=order.__getitem__))}
        taken = {name for name, _ in case}
        for name in random.sample(list(places), len(places)):
            if name not in taken:
                values = [(name, place) for place in places[name]]
                case.add(max(values, key=lambda one: (len(missing[one] & case), len(missing[one]), random.random())))
        yield [pair for pair in itertools.combinations(sorted(case, key=order.__getitem__), 2) if pair[1] in missing[pair[0]]]
        for value in case:
            missing[value] -= case


def _fewer(cases: list[Pairs]) -> list[Pairs]:
    """Without cases whose pairs can meet in others, where these are free to choose."""
    values = [_values(pairs) for pairs in cases]
    for number in sorted(range(len(cases)), key=lambda number: len(cases[number])):
        if (moved := _moved(cases[number], values, number)) is not None:
            for pair, into in moved:
                cases[into].append(pair)
                values[into].update(pair)
            cases[number], values[number] = [], {}
    return [pairs for pairs in cases if pairs]


def _moved(pairs: Pairs, cases: Sequence[dict[Name, int]], gone: int) -> list[tuple[Pair, int]] | None:
    """The cases that pairs can meet in instead of the one that goes; None where one has no place. The fullest is taken."""
    moved, changed = list[tuple[Pair, int]](), dict[int, dict[Name, int]]()
    others = ((len(values), number) for number, values in enumerate(cases) if values and number != gone)
    fullest_first = [(number, cases[number]) for _, number in sorted(others, reverse=True)]
    for pair in pairs:
        (one, first), (other, second) = pair
        for number, values in fullest_first:
            if values.get(one, first) != first or values.get(other, second) != second:
                continue
            added = changed.get(number, {})
            if added.get(one, first) == first and added.get(other, second) == second:
                changed.setdefault(number, {}).update(pair)
                moved.append((pair, number))
                break
        else:
            return None
    return moved


def _values(pairs: Pairs) -> dict[Name, int]:
    return dict(itertools.chain.from_iterable(pairs))


def pairs_first(choices: Mapping[Name, Sequence[object]]) -> list[Any]:
    """All combinations; those without which most pairs of values meet as well are slow."""
    met = [str(case) for case, share in _covering(choices, lambda pair: True) if share < MOST]
    every = [each_apart(dict(zip(choices, values))) for values in itertools.product(*choices.values())]
    return [case if str(case) in met else slow(case) for case in every]


def _marked(cases: Sequence[tuple[dict[str, Any], float]], share: float) -> list[Any]:
    return [slow(case) if met >= share else case for case, met in cases]


def each_apart(case: Mapping[Name, Any]) -> dict[str, Any]:
    together = {name: value for names, values in case.items() if isinstance(names, tuple) for name, value in zip(names, values)}
    return together | {name: value for name, value in case.items() if isinstance(name, str)}


def on_devices(choices: Mapping[Name, Sequence[object]], needs: Needs = lambda pair: True, share: float = MOST) -> list[Any]:
    """The device is one more choice: the CPU, or the CPU that pretends to have memory of its own."""
    cases = _covering({**choices, "device": ("cpu", "pretended")}, needs)
    return [*_marked(cases, share), *_on_a_gpu([case for case, _ in cases])]


def in_turn(choices: Mapping[str, Sequence[object]], nth: int = 1) -> list[Any]:
    """All combinations, on the CPU and on the CPU that pretends in turn. A default run has each `nth` of them. Where one choice
    alone changes, the device changes with each of its values; so no value goes with one device, as it would if devices
    alternated: the last choice alternates as well."""
    every = itertools.product(*(enumerate(values) for values in choices.values()))
    cases = list[dict[str, Any]]()
    for place, case in enumerate(every):
        turn = sum(number for number, _ in case) + (0 if nth % 2 else place // nth)  # else a default run has one device
        values = zip(choices, (value for _, value in case))
        cases.append({**dict(values), "device": ("cpu", "pretended")[turn % 2]})
    return [*every_nth(cases, nth), *_on_a_gpu(cases)]


def _on_a_gpu(cases: list[dict[str, Any]]) -> list[Any]:
    """Runs every case on a GPU too, if there is one."""
    return [pytest.param({**case, "device": "cuda"}, marks=pytest.mark.cuda) for case in cases]
