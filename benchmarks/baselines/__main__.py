"""One system in a process of its own, started by compare.py:

    python -m benchmarks.baselines most REQUEST    # prints how many rows fit, by the planner of a system that has one
    python -m benchmarks.baselines prepare REQUEST # makes what a system needs beside the checkpoint, if it needs something
    python -m benchmarks.baselines run REQUEST     # prints READY when all is loaded, waits for a line, prints the answer

Whatever else a system prints goes to standard error.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import TextIO

from benchmarks.baselines.request import Plans, Prepares, Request
from benchmarks.baselines.systems import system_named

MOST, PREPARE, RUN, READY = "most", "prepare", "run", "ready"


def main() -> int:
    action, request = sys.argv[1], Request.from_json(sys.argv[2])
    system = system_named(request.system)
    make_device_smaller(request)
    with os.fdopen(os.dup(1), "w") as words:  # peers print, and so do the compilers that they start
        os.dup2(2, 1)
        if action == MOST:
            assert isinstance(system, Plans), request.system
            print(system.most_rows(request), file=words)
        elif action == PREPARE:
            assert isinstance(system, Prepares), request.system
            system.prepare(request)
        else:
            answer = system.run(request, lambda: _ready(words))
            print(replace(answer, peak_device_bytes=peak_device_bytes(request)).to_json(), file=words)
    return 0


def make_device_smaller(request: Request) -> None:
    """For whatever system runs in this process: its allocator gets no more of the GPU than was asked for."""
    if request.device == "cuda" and request.device_bytes is not None:
        import torch

        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, request.device_bytes / total))


def peak_device_bytes(request: Request) -> int:
    """The most that torch's allocator has held of the GPU in this process, whichever system ran."""
    if request.device != "cuda":
        return 0
    import torch

    return torch.cuda.max_memory_reserved()


def _ready(words: TextIO) -> None:
    print(READY, file=words, flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    sys.exit(main())
