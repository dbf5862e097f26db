"""The contract on a GPU whose lanes are late, with the reason where it does not hold: a runner of its own.

    python -m tests.delayed.contract OUT.jsonl --seconds 540

Every plan is tried in four ways by four processes: A as it is; B with lanes that are late at random, and with freed buffers
that are spoilt; C so, and watched by torch's stream sanitizer, which is told of all; D so, and the sanitizer as torch has it.
What fails is tried further: again, with torch's kernels, without graphs, with launches that wait, and with one late lane at a
time. Each result is a line of JSON in OUT.jsonl at once. Then every plan that is not sound has a line with what its results
mean. The last line is one JSON document. Exit status: 0 if all plans are sound in A, B and C, 1 if not.

`--pretended FAULT ...` plants faults on pretended devices instead, one after the other, and needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.delayed.dealing import Dealer, Order, Start, forked, spawned
from tests.delayed.late import ALSO_LATE
from tests.delayed.planted import FAULTS, HANGS
from tests.delayed.stand import STANDS
from tests.delayed.trying import Bench
from tests.delayed.verdict import is_sound, more, verdict
from tests.delayed.ways import ALL, TIMEOUT, A, D, Result, Way

SHARES = (0.17, 0.42, 0.62, 0.72)  # of all the time: when A, B, C and D have to be over; the rest is for what failed
PLAN_SECONDS = 12.0
CHILDREN = 4
NOTHING = "nothing"


@dataclass
class Found:
    """All results, in the file and by plan and way. Of several tries the last counts."""

    file: Path
    by_plan: dict[int, dict[str, Result]] = field(default_factory=lambda: defaultdict(dict))

    def heard(self, result: Result) -> None:
        self.by_plan[result.plan][result.way] = result
        with self.file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(result.as_json()) + "\n")
            lines.flush()


def try_all(stand_name: str, numbers: Sequence[int], found: Found, dealer: Dealer, seconds: float) -> None:
    began, stand = time.monotonic(), STANDS[stand_name]()
    plans = stand.plans()
    dealer.prepare(A.environment)
    for way, share in zip(ALL, SHARES, strict=True):
        if way is not D:
            dealer.prepare(way.environment)  # for the next way, while this one is at work
        until = began + share * seconds
        dealer.deal([Order(number, way) for number in _that_need(way, numbers, found)], until)
        slow = [number for number in numbers if _is(found, number, way, TIMEOUT)]
        dealer.deal([Order(number, way) for number in slow], until)  # kernels were compiled meanwhile
    lanes = [(*stand.lanes, *ALSO_LATE) if one.is_pipeline else stand.lanes for one in plans]
    further = [list(more(found.by_plan[number], lanes[number], plans[number].has_graphs)) for number in numbers]
    for place in range(max(map(len, further), default=0)):  # the ways that say most come first, for all plans
        orders = [Order(number, ways[place]) for number, ways in zip(numbers, further) if place < len(ways)]
        dealer.deal(orders, began + seconds)


def _that_need(way: Way, numbers: Sequence[int], found: Found) -> Iterator[int]:
    """Plans that failed in one way say nothing in the next one; D is for plans that C has passed."""
    before = ALL[: ALL.index(way)]
    return (number for number in numbers if all(_is(found, number, one, "ok") for one in before))


def _is(found: Found, number: int, way: Way, said: str) -> bool:
    result = found.by_plan[number].get(way.name)
    return result is not None and result.verdict == said


def summary(numbers: Sequence[int], found: Found, seconds: float) -> dict[str, object]:
    """What is found, for a program to read."""
    verdicts = {number: verdict(found.by_plan[number]) for number in numbers}
    sound = [number for number in numbers if is_sound(found.by_plan[number])]
    counts = Counter(f"{way.name} {one.verdict}" for of in found.by_plan.values() for way in ALL if (one := of.get(way.name)))
    return {
        "sound": len(sound) == len(numbers),
        "plans": len(numbers),
        "verdict": f"{len(sound)} of {len(numbers)} plans are sound" + "".join(f"; {each}" for each in _told(verdicts, sound)),
        "counts": dict(counts),
        "verdicts": {str(number): told for number, told in verdicts.items()},
        "seconds": round(seconds, 1),
    }


def _told(verdicts: Mapping[int, str], sound: Sequence[int]) -> Iterator[str]:
    each = Counter(told for number, told in verdicts.items() if number not in sound)
    alike = Counter(told for number, told in verdicts.items() if number in sound and told != "sound")
    yield from (f"{count}: {told}"[:300] for told, count in (*each.most_common(4), *alike.items()))


def lines_of(stand_name: str, numbers: Sequence[int], found: Found) -> Iterator[str]:
    plans = STANDS[stand_name]().plans()
    for number in numbers:
        results, told = found.by_plan[number], verdict(found.by_plan[number])
        if told != "sound":
            ways = ", ".join(f"{name} {result.verdict}" for name, result in results.items())
            yield f"plan {number}: {told} [{ways}]\n    {str(plans[number])[:300]}"


def run(stand_name: str, fault: str, options: argparse.Namespace, start: Start, folder: Path) -> dict[str, object]:
    began, found = time.monotonic(), Found(options.out)
    numbers = list(range(len(STANDS[stand_name]().plans())))[:: options.every]
    most = options.hanging_seconds if fault == HANGS else None
    dealer = Dealer(start, found.heard, folder, options.children, most or options.plan_seconds)
    try:
        try_all(stand_name, numbers, found, dealer, options.seconds)
    finally:
        dealer.close()
    for line in lines_of(stand_name, numbers, found):
        print(line, flush=True)
    return {"fault": fault, "every": options.every, **summary(numbers, found, time.monotonic() - began)}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.delayed.contract", description="Tries plans where lanes are late.")
    parser.add_argument("out", type=Path, metavar="OUT.jsonl", help="takes a line for each result, behind those it has")
    parser.add_argument("--seconds", type=float, default=540.0, help="for all of it (default: %(default)s)")
    parser.add_argument("--plan-seconds", type=float, default=PLAN_SECONDS, help="for a plan in a way (default: %(default)s)")
    parser.add_argument(
        "--hanging-seconds", type=float, help="for a plan in a way under a fault that hangs (default: --plan-seconds)"
    )
    parser.add_argument("--children", type=int, default=CHILDREN, help="processes (default: %(default)s)")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="take every Nth plan alone")
    parser.add_argument("--pretended", nargs="+", choices=FAULTS, metavar="FAULT", help="faults to plant, without a GPU")
    return parser.parse_args(arguments)


def _prepared(folder: Path) -> Bench:
    """What forks try plans on pretended devices with."""
    bench = Bench.of(STANDS["pretended"](), folder / "checkpoints", folder / "references")
    bench.prepare()
    return bench


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    is_sound = True
    with tempfile.TemporaryDirectory() as place:
        start = partial(forked, _prepared(Path(place))) if options.pretended else partial(spawned, "gpu")
        for number, fault in enumerate(options.pretended or [NOTHING]):
            folder = Path(place) / str(number)
            folder.mkdir()
            document = run("pretended" if options.pretended else "gpu", fault, options, partial(start, fault, folder), folder)
            is_sound &= bool(document["sound"])
            print(json.dumps(document), flush=True)
    return 0 if is_sound else 1


if __name__ == "__main__":
    sys.exit(main())
