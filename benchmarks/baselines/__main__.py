"""One system in a process of its own: `python -m baselines REQUEST`, started by compare.py in the folder benchmarks/.

Writes READY to standard output when everything is loaded, waits for a line, and at the end writes its answer as JSON. Whatever
else a system prints goes to standard error.
"""

from __future__ import annotations

import os
import sys

from baselines.request import Request
from baselines.systems import system_named

READY = "ready"


def main() -> int:
    request = Request.from_json(sys.argv[1])
    with os.fdopen(os.dup(1), "w") as words:  # peers print, and so do the compilers that they start
        os.dup2(2, 1)

        def ready() -> None:
            print(READY, file=words, flush=True)
            sys.stdin.readline()

        print(system_named(request.system).run(request, ready).to_json(), file=words, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
