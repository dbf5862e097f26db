"""The plan command: finds the plan that generates fastest on a machine within its memory, says why, and predicts its seconds.

    python -m h2o_flexgen.plan --model facebook/opt-6.7b --prompt-len 512 --gen-len 32 --cpu-mem 8GB

No weights are needed: shapes say all. With --evaluate it prices one plan instead. The last line of stdout is one JSON
document, unless that is a terminal.
"""

from h2o_flexgen.cli.main import door
from h2o_flexgen.cli.plan_request import PROGRAM, parse, request_of

main = door("plan", PROGRAM, parse, request_of)

if __name__ == "__main__":
    raise SystemExit(main())
