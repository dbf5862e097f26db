"""A process that tries plans: it reads orders, one JSON line each, and writes a line for each result. What else it says goes
to a file of its own."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.delayed.planted import FAULTS
from tests.delayed.stand import STANDS
from tests.delayed.trying import Bench
from tests.delayed.ways import Way

READY = "ready"


def serve(bench: Bench, fault: str, orders: int, results: int) -> None:
    """Until there are no more orders; both are open files."""
    plans = bench.stand.plans()
    with open(orders, encoding="utf-8") as read, open(results, "w", encoding="utf-8", buffering=1) as write:
        write.write(f"{READY}\n")
        for line in read:
            order = json.loads(line)
            number, way = order["plan"], Way(**order["way"])
            with FAULTS[fault](way):
                result = bench.tried(number, plans[number], way)
            write.write(json.dumps(result.as_json()) + "\n")


def own_folder(folder: Path) -> Path:
    """The folder of this process in one that all share. Nothing that libraries say gets among results, and none of it is
    printed: it goes to a file there."""
    own = folder / str(os.getpid())
    own.mkdir()
    said = os.open(own / "said", os.O_WRONLY | os.O_CREAT, 0o644)
    for stream in (1, 2):
        os.dup2(said, stream)
    return own


def main() -> None:
    stand, fault, folder, orders, results = sys.argv[1:]
    own = own_folder(Path(folder))
    serve(Bench.of(STANDS[stand](), own, Path(folder) / "references"), fault, int(orders), int(results))


if __name__ == "__main__":
    main()
