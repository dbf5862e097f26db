"""A process that tries plans: it reads orders, one JSON line each, and writes a line for each result. What else it says goes
to a file of its own, also where its threads are if a plan takes too long."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from pathlib import Path

from tests.delayed.planted import FAULTS
from tests.delayed.stand import STANDS
from tests.delayed.trying import Bench
from tests.delayed.ways import ERROR, Way

READY = "ready"
LEAVING = "leaving"  # in front of the last result of a process
AHEAD_SECONDS = 1.0  # of its end, when it says where its threads are
STDOUT, STDERR = 1, 2


def told_after(seconds: float) -> float:
    """When a process says where its threads are, if a plan may take so many seconds."""
    return max(seconds - AHEAD_SECONDS, seconds / 2)


def serve(bench: Bench, fault: str, orders: int, results: int) -> None:
    """Until there are no more orders; both are open files."""
    plans = bench.stand.plans()
    with open(orders, encoding="utf-8") as read, open(results, "w", encoding="utf-8", buffering=1) as write:
        write.write(f"{READY}\n")
        for line in read:
            order = json.loads(line)
            number, way = order["plan"], Way(**order["way"])
            faulthandler.dump_traceback_later(told_after(order["seconds"]), file=STDERR)
            with FAULTS[fault](way):
                result = bench.tried(number, plans[number], way)
                is_lost = result.verdict == ERROR and not bench.stand.works()
            faulthandler.cancel_dump_traceback_later()
            write.write(f"{LEAVING}\n" * is_lost + json.dumps(result.as_json()) + "\n")
            if is_lost:  # what this process tries from now on would fail for the same reason
                return


def own_folder(folder: Path) -> Path:
    """The folder of this process in one that all share. Nothing that libraries say gets among results, and none of it is
    printed: it goes to a file there."""
    own = folder / str(os.getpid())
    own.mkdir()
    said = os.open(own / "said", os.O_WRONLY | os.O_CREAT, 0o644)
    for stream in (STDOUT, STDERR):
        os.dup2(said, stream)
    return own


def main() -> None:
    stand, fault, folder, orders, results = sys.argv[1:]
    own = own_folder(Path(folder))
    serve(Bench.of(STANDS[stand](), own, Path(folder) / "references"), fault, int(orders), int(results))


if __name__ == "__main__":
    main()
