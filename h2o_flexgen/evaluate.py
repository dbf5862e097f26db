"""The evaluate command: how good the text is under each policy and budget, measured through the real cache.

    python -m h2o_flexgen.evaluate --policies full,h2o,local --budgets 100,20 --tasks perplexity,recall --output quality

Tables go to stdout; its last line is one JSON document, unless that is a terminal. With --output every finished cell is kept,
and an interrupted command continues where it stopped.
"""

from h2o_flexgen.cli.evaluate_request import PROGRAM, parse, request_of
from h2o_flexgen.cli.main import door

main = door("evaluate", PROGRAM, parse, request_of)

if __name__ == "__main__":
    raise SystemExit(main())
