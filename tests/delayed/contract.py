"""The contract on a GPU whose lanes are late, with the reason where it does not hold: a runner of its own.

    python -m tests.delayed.contract OUT.jsonl --seconds 540

Every plan is tried in four ways by several processes: A as it is; B with lanes that are late at random, and with freed buffers
that are spoilt; C so, and watched by torch's stream sanitizer, which is told of all; D so, and the sanitizer as torch has it.
What fails is tried further: again, with torch's kernels, without graphs, with launches that wait, and with one late lane at a
time. Each result is a line of JSON in OUT.jsonl at once. Then every plan that is not sound has a line with what its results
mean. The last line is one JSON document. Exit status: 0 if all plans are sound in A, B and C, 1 if not.

A call goes on where an earlier one has ended: what OUT.jsonl has of the same code on the same kind of GPU is not tried again,
but for plans that took too long.

`--pretended FAULT ...` plants faults on pretended devices instead, one after the other, and needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import psutil

from h2o_flexgen.formats.kernel_table import TORCH
from h2o_flexgen.kernels.native import in_use
from h2o_flexgen.memory.device import CudaDevice
from h2o_flexgen.profiling.gpu_checks import digest_of, what_is_checked, written_in
from tests.delayed.dealing import Dealer, Order, Start, forked, spawned
from tests.delayed.late import ALSO_LATE
from tests.delayed.planted import FAULTS, HANGS
from tests.delayed.stand import STANDS
from tests.delayed.trying import Bench
from tests.delayed.verdict import NOT_RUN, is_sound, more, verdict
from tests.delayed.ways import ALL, OK, TIMEOUT, A, B, C, D, Result, Way

SHARES = (A, 0.17), (B, 0.42), (C, 0.62)  # of all the time: when they have to be over
REST, LAST = 0.85, 0.9  # what no time was left for, then D; what remains is for what failed
PLAN_SECONDS = 12.0
LONGER = 3.0  # times as long may a plan take that has taken too long
CHILDREN, MOST_CHILDREN, CORES_LEFT = 4, 12, 4  # processes: more where there are many cores, of which some are left
ROOT = Path(__file__).resolve().parents[2]
CODE = "h2o_flexgen", "tests/delayed", "tests/helpers", "tests/whole/test_contract.py"  # on which results depend
WRITTEN = ".py", ".c", ".h"  # how files of it end
NOTHING = "nothing"


@dataclass
class Found:
    """All results, in the file and by plan and way. Of several tries the last counts."""

    file: Path
    by_plan: dict[int, dict[str, Result]] = field(default_factory=lambda: defaultdict(dict))
    late: Counter[tuple[int, str]] = field(default_factory=Counter)  # in this call, by plan and way

    @classmethod
    def of_earlier_calls(cls, file: Path, code: str) -> Found:
        """With what the file has of this code, which then stands in its first line. All else is taken out of it."""
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        head, found = json.dumps({"code": code}), cls(file)
        kept = [line for line in lines[1:] if line.endswith("}")] if lines[:1] == [head] else []  # a last one may be cut
        file.write_text("".join(f"{line}\n" for line in (head, *kept)), encoding="utf-8")
        for result in map(Result.of_json, map(json.loads, kept)):
            found.by_plan[result.plan][result.way] = result
        return found

    def heard(self, result: Result) -> None:
        self.by_plan[result.plan][result.way] = result
        self.late[result.plan, result.way] += result.verdict == TIMEOUT
        with self.file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(result.as_json()) + "\n")
            lines.flush()

    def seconds_of(self, number: int) -> float:
        """The most that a plan took in any way."""
        return max((result.seconds for result in self.by_plan[number].values()), default=0.0)

    def was_late(self, number: int, way: Way) -> bool:
        result = self.by_plan[number].get(way.name)
        return result is not None and result.verdict == TIMEOUT

    def is_known(self, number: int, way: Way) -> bool:
        """What took too long is tried again, once in a call."""
        result = self.by_plan[number].get(way.name)
        return result is not None and (result.verdict != TIMEOUT or self.late[number, way.name] > 1)


def try_all(stand_name: str, numbers: Sequence[int], found: Found, dealer: Dealer) -> None:
    began, stand = time.monotonic(), STANDS[stand_name]()
    plans = stand.plans()

    def deal(way: Way, share: float = 1.0) -> None:
        until = began + share * (dealer.ends - began)
        wanted = sorted(_that_need(way, numbers, found), key=found.seconds_of, reverse=True)  # or the longest are waited for
        dealer.deal([Order(number, way, LONGER if found.was_late(number, way) else 1.0) for number in wanted], until)

    dealer.prepare(A.environment)
    for way, share in SHARES:
        deal(way, share)
        deal(way, share)  # what took too long: kernels were compiled meanwhile, and it gets more time
    for way, _ in SHARES:
        deal(way, REST)
    deal(D, LAST)
    lanes = [(*stand.lanes, *ALSO_LATE) if one.is_pipeline else stand.lanes for one in plans]
    further = [list(more(found.by_plan[number], lanes[number], plans[number].has_graphs)) for number in numbers]
    for place in range(max(map(len, further), default=0)):  # the ways that say most come first, for all plans
        asked = [(number, ways[place]) for number, ways in zip(numbers, further) if place < len(ways)]
        dealer.deal([Order(*one) for one in asked if not found.is_known(*one)], dealer.ends)
    for way in ALL:
        deal(way)


def _that_need(way: Way, numbers: Sequence[int], found: Found) -> Iterator[int]:
    """Plans that failed in one way say nothing in the next one; D is for plans that C has passed."""
    before = ALL[: ALL.index(way)]
    tried = (number for number in numbers if all(_is(found, number, one, OK) for one in before))
    return (number for number in tried if not found.is_known(number, way))


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
        "failed": [number for number in numbers if number not in sound and not verdicts[number].startswith(NOT_RUN)],
        "verdict": "; ".join([f"{len(sound)} of {len(numbers)} plans are sound", *_told(verdicts, sound), *lacks()]),
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
    is_on_gpu = not options.pretended
    began = time.monotonic() - (time.time() - psutil.Process().create_time() if is_on_gpu else 0.0)  # imports take seconds
    found = Found.of_earlier_calls(options.out, code_of_results()) if is_on_gpu else Found(options.out)
    numbers = list(range(len(STANDS[stand_name]().plans())))[:: options.every]
    most = (options.hanging_seconds if fault == HANGS else None) or options.plan_seconds
    dealer = Dealer(start, found.heard, folder, options.children, most, began + options.seconds)
    try:
        try_all(stand_name, numbers, found, dealer)
    finally:
        dealer.close()
    for line in lines_of(stand_name, numbers, found):
        print(line, flush=True)
    return {"fault": fault, "every": options.every, **summary(numbers, found, time.monotonic() - began)}


def code_of_results() -> str:
    """A digest of all that results depend on."""
    return digest_of(sources(), what_is_checked(CudaDevice.kind), lacks())


def sources() -> list[Path]:
    """The files of this code: kernels in C, too, by which the processor attends."""
    return written_in((ROOT / place for place in CODE), WRITTEN)


def lacks() -> list[str]:
    """What is not tried, or otherwise than elsewhere, as something is missing here."""
    grammars = [] if find_spec("llguidance") else ["no text is held to a form: llguidance is not installed"]
    kernels = ["the processor attends with torch: no kernels in C are built"] if in_use() == TORCH else []
    return [*grammars, *kernels]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.delayed.contract", description="Tries plans where lanes are late.")
    parser.add_argument("out", type=Path, metavar="OUT.jsonl", help="takes a line for each result, behind those it has")
    parser.add_argument("--seconds", type=float, default=540.0, help="for all of it, imports too (default: %(default)s)")
    parser.add_argument("--plan-seconds", type=float, default=PLAN_SECONDS, help="for a plan in a way (default: %(default)s)")
    parser.add_argument(
        "--hanging-seconds", type=float, help="for a plan in a way under a fault that hangs (default: --plan-seconds)"
    )
    many = max(CHILDREN, min(MOST_CHILDREN, (os.cpu_count() or 1) - CORES_LEFT))
    parser.add_argument("--children", type=int, default=many, help="processes (default here: %(default)s)")
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
