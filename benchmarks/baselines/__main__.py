"""One system in a process of its own, started by compare.py in the folder benchmarks/:

python -m baselines most REQUEST    # prints how many rows fit, where the system can say so without trying
python -m baselines run REQUEST     # prints READY when everything is loaded, waits for a line, prints its answer as JSON
"""

from __future__ import annotations

import sys

from baselines.request import Plans, Request
from baselines.systems import system_named

MOST, RUN, READY = "most", "run", "ready"


def main() -> int:
    action, request = sys.argv[1], Request.from_json(sys.argv[2])
    system = system_named(request.system)
    if action == MOST:
        print(system.most_rows(request) if isinstance(system, Plans) else "unknown")
    else:
        print(system.run(request, _ready).to_json())
    return 0


def _ready() -> None:
    print(READY, flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    sys.exit(main())
