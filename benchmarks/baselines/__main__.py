"""One system in a process of its own: `python -m baselines REQUEST`, started by compare.py in the folder benchmarks/.

Writes READY to standard output when everything is loaded, waits for a line, and at the end writes its answer as JSON.
"""

from __future__ import annotations

import sys

from baselines.request import Request
from baselines.systems import system_named

READY = "ready"


def main() -> int:
    request = Request.from_json(sys.argv[1])

    def ready() -> None:
        print(READY, flush=True)
        sys.stdin.readline()

    print(system_named(request.system).run(request, ready).to_json(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
