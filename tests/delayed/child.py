"""A process that tries plans: it reads orders, one JSON line each, and writes a line for each result. What else it says goes
to a file of its own."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from tests.delayed.planted import FAULTS
from tests.delayed.stand import STANDS
from tests.delayed.trying import Bench
from tests.delayed.ways import Way
from tests.helpers.contract import Checkpoints

READY = "ready"


def serve(stand: str, fault: str, folder: Path, orders: int, results: int) -> None:
    """Until there are no more orders. `folder` is shared by all; `orders` and `results` are open files."""
    own = folder / str(os.getpid())
    own.mkdir()
    _say_into(own / "said")
    torch.set_num_threads(1)
    there = STANDS[stand]()
    plans, references = there.plans(), folder / "references"
    references.mkdir(exist_ok=True)
    bench = Bench(there, Checkpoints(own), references)
    with open(orders, encoding="utf-8") as read, open(results, "w", encoding="utf-8", buffering=1) as write:
        write.write(f"{READY}\n")
        for line in read:
            order = json.loads(line)
            number, way = order["plan"], Way(**order["way"])
            with FAULTS[fault](way):
                result = bench.tried(number, plans[number], way)
            write.write(json.dumps(result.as_json()) + "\n")


def _say_into(file: Path) -> None:
    """Nothing that libraries say gets among results, and none of it is printed."""
    said = os.open(file, os.O_WRONLY | os.O_CREAT, 0o644)
    for stream in (1, 2):
        os.dup2(said, stream)


def main() -> None:
    stand, fault, folder, orders, results = sys.argv[1:]
    serve(stand, fault, Path(folder), int(orders), int(results))


if __name__ == "__main__":
    main()
