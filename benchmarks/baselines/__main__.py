"""One system in a process of its own, started by compare.py in the folder benchmarks/:

    python -m baselines most REQUEST    # prints how many rows fit, where the system can say so without trying
    python -m baselines run REQUEST     # prints READY when everything is loaded, waits for a line, prints its answer as JSON

Whatever else a system prints goes to standard error.
"""

from __future__ import annotations

import os
import sys
from typing import TextIO

from baselines.request import Plans, Request
from baselines.systems import system_named

MOST, RUN, READY = "most", "run", "ready"


def main() -> int:
    action, request = sys.argv[1], Request.from_json(sys.argv[2])
    system = system_named(request.system)
    with os.fdopen(os.dup(1), "w") as words:  # peers print, and so do the compilers that they start
        os.dup2(2, 1)
        if action == MOST:
            print(system.most_rows(request) if isinstance(system, Plans) else "unknown", file=words)
        else:
            print(system.run(request, lambda: _ready(words)).to_json(), file=words)
    return 0


def _ready(words: TextIO) -> None:
    print(READY, file=words, flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    sys.exit(main())
