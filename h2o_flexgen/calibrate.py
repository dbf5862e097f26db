"""The calibrate command: measures which share of a text each KV head of a model needs, and writes it as a file of head budgets.

    python -m h2o_flexgen.calibrate --model facebook/opt-1.3b --text a.txt b.txt --output head_budgets.json

A table goes to stdout; its last line is one JSON document, unless that is a terminal.
"""

from h2o_flexgen.cli.calibrate_request import PROGRAM, parse, request_of
from h2o_flexgen.cli.main import door

main = door("calibrate", PROGRAM, parse, request_of)

if __name__ == "__main__":
    raise SystemExit(main())
