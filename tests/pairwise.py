"""Cases in which every two values of any two choices meet, or those that a test needs to: few beside all combinations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any

import pytest

Name = str | tuple[str, ...]  # a tuple names what is chosen together: each of its values is a tuple as well
Needs = Callable[[Mapping[Name, Any]], bool]  # whether two values, by the names of what is chosen, have to meet


def covering(
    choices: Mapping[Name, Sequence[object]], seed: int = 0, tries: int = 40, needs: Needs = lambda pair: True
) -> Iterator[dict[str, Any]]:
    """The random cases that add the most pairs which have not met; all pairs that a test `needs` meet."""
    random, names = Random(seed), list(choices)
    places = {name: range(len(choices[name])) for name in names}  # numbers instead of values, which may be long
    missing = {
        ((one, first), (other, second))
        for one, other in itertools.combinations(names, 2)
        for first, second in itertools.product(places[one], places[other])
        if needs({one: choices[one][first], other: choices[other][second]})
    }
    met = {value for pair in missing for value in pair}
    assert all((name, place) in met for name in names for place in places[name]) or len(names) < 2, "a value is in no case"
    in_turn = iter(sorted(missing, key=lambda pair: str([(name, choices[name][place]) for name, place in pair])))
    while missing:
        wanted = dict(next(pair for pair in in_turn if pair in missing))
        drawn = [{name: wanted.get(name, random.choice(places[name])) for name in names} for _ in range(tries)]
        best = max(drawn, key=lambda case: len(missing & _pairs(case)))
        missing -= _pairs(best)
        yield each_apart({name: choices[name][place] for name, place in best.items()})


def pairs_first(choices: Mapping[Name, Sequence[object]]) -> list[Any]:
    """All combinations; those without which any two values meet as well are slow."""
    met = [str(case) for case in covering(choices)]
    every = [each_apart(dict(zip(choices, values))) for values in itertools.product(*choices.values())]
    return [case if str(case) in met else pytest.param(case, marks=pytest.mark.slow) for case in every]


def each_apart(case: Mapping[Name, Any]) -> dict[str, Any]:
    together = {name: value for names, values in case.items() if isinstance(names, tuple) for name, value in zip(names, values)}
    return together | {name: value for name, value in case.items() if isinstance(name, str)}


def on_devices(choices: Mapping[Name, Sequence[object]], needs: Needs = lambda pair: True) -> list[Any]:
    """The device is one more choice: the CPU, or the CPU that pretends to have memory of its own."""
    cases = list(covering({**choices, "device": ("cpu", "pretended")}, needs=needs))
    return [*cases, *_on_a_gpu(cases)]


def in_turn(choices: Mapping[str, Sequence[object]]) -> list[Any]:
    """All combinations, one on the CPU, the next on the CPU that pretends, and so on."""
    every = (dict(zip(choices, values)) for values in itertools.product(*choices.values()))
    cases: list[dict[str, Any]] = [{**case, "device": ("cpu", "pretended")[place % 2]} for place, case in enumerate(every)]
    return [*cases, *_on_a_gpu(cases)]


def _on_a_gpu(cases: list[dict[str, Any]]) -> list[Any]:
    """Runs every case on a GPU too, if there is one."""
    return [pytest.param({**case, "device": "cuda"}, marks=pytest.mark.cuda) for case in cases]


def _pairs(case: Mapping[Name, Any]) -> set[object]:
    return set(itertools.combinations(case.items(), 2))
