"""What the results of a plan mean, and what would say more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tests.delayed.ways import (
    A_BLOCKING,
    A_BY_TORCH,
    A_STEP_BY_STEP,
    AGAIN,
    ALARM,
    ALL,
    B_BLOCKING,
    B_BY_TORCH,
    B_STEP_BY_STEP,
    BAD,
    CRASH,
    ERROR,
    OK,
    TIMEOUT,
    A,
    B,
    C,
    D,
    Result,
    Way,
    late,
)

Results = Mapping[str, Result]  # of a plan, by the name of the way

SOUND = "sound"
UNTOLD_QUERY = "sound; the sanitizer alone alarms, as it is not told of queries"
RACE = "a race"
NOT_HIT = "a race that was not hit yet, or a false alarm"
NUMERICS_OF_TRITON = "numerics of a kernel in Triton"
NUMERICS = "numerics, of torch or of the engine"
ATOMICS = "a race beside lanes, or atomics"
NOT_RUN = "not run"


def is_sound(results: Results) -> bool:
    """Whether the contract holds: what the sanitizer says when it is not told of queries proves nothing."""
    return all(_is(results, way, OK) for way in (A, B, C))


def verdict(results: Results) -> str:
    if broken := next((results[way.name] for way in ALL if _is_broken(results, way)), None):
        return _of_broken(broken, results)
    if _is(results, A, BAD):
        return _of_plain(results)
    if _is(results, B, BAD, ERROR):
        return _of_late(results)
    if _is(results, C, ALARM, BAD):
        return f"{NOT_HIT}: {'; '.join(results[C.name].pairs[:2]) or results[C.name].words}"
    if lacking := [way.name for way in ALL[:3] if way.name not in results]:
        return f"{NOT_RUN}: {', '.join(lacking)}"
    if D.name not in results:
        return SOUND
    return SOUND if _is(results, D, OK) else UNTOLD_QUERY


def more(results: Results, lanes: tuple[str, ...], has_graphs: bool) -> Iterator[Way]:
    """The ways that say more of a failure, the first most of all."""
    if _is(results, A, BAD, ERROR, TIMEOUT, CRASH):
        yield from (AGAIN, A_BY_TORCH)
        if has_graphs:
            yield A_STEP_BY_STEP
        yield A_BLOCKING
    elif _is(results, B, BAD, ERROR, TIMEOUT, CRASH):
        yield from (late(lane) for lane in lanes)
        yield B_BY_TORCH
        if has_graphs:
            yield B_STEP_BY_STEP
        yield B_BLOCKING


def _is_broken(results: Results, way: Way) -> bool:
    """Whether it says nothing of values. An error where lanes are late is what wrong values have led to."""
    return _is(results, way, TIMEOUT, CRASH) or (way is not B and _is(results, way, ERROR))


def _is(results: Results, way: Way, *verdicts: str) -> bool:
    return way.name in results and results[way.name].verdict in verdicts


def _of_plain(results: Results) -> str:
    first, again = results[A.name], results.get(AGAIN.name)
    if again is not None and (again.verdict != BAD or again.bits != first.bits):
        return f"{RACE}, which blocking launches mend" if _is(results, A_BLOCKING, OK) else ATOMICS
    if _is(results, A_STEP_BY_STEP, OK):
        return "graphs: without them it is well"
    return NUMERICS_OF_TRITON if _is(results, A_BY_TORCH, OK) else NUMERICS


def _of_late(results: Results) -> str:
    named = [name.partition(" ")[2] for name, one in results.items() if _is_late_lane(name) and one.verdict != OK]
    also = (" in graphs" * _is(results, B_STEP_BY_STEP, OK)) + (" in a kernel in Triton" * _is(results, B_BY_TORCH, OK))
    words = f" ({results[B.name].words[:80]})" if results[B.name].words else ""
    return f"{RACE}{also}; late lanes: {', '.join(named) or 'not one alone'}{words}"


def _of_broken(broken: Result, results: Results) -> str:
    others = (AGAIN, A_BY_TORCH, A_STEP_BY_STEP, A_BLOCKING, B_BY_TORCH, B_STEP_BY_STEP, B_BLOCKING)
    mends = [way.name for way in others if _is(results, way, OK)]
    told = f"{broken.verdict} in {broken.way}: {' '.join(filter(None, (broken.error, broken.words)))}".rstrip(": ")
    return told + (f"; well: {', '.join(mends)}" if mends else "")


def _is_late_lane(name: str) -> bool:
    fixed = {way.name for way in (B, B_BY_TORCH, B_STEP_BY_STEP, B_BLOCKING)}
    return name.startswith("B ") and name not in fixed
