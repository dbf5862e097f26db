"""The main command: generates text under a plan, and measures.

    python -m h2o_flexgen.run --model facebook/opt-30b --percent 20 80 0 100 0 100 --gpu-batch-size 48 --num-gpu-batches 3

The plan comes first, then the texts, then FlexGen's summary; the last line of stdout is one JSON document, unless that is a
terminal. Progress and errors go to stderr; an error that the user can mend is one line, with exit status 2.
"""

from h2o_flexgen.cli.main import door
from h2o_flexgen.cli.run_request import PROGRAM, parse, request_of

main = door("run", PROGRAM, parse, request_of)

if __name__ == "__main__":
    raise SystemExit(main())
