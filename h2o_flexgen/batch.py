"""Jobs over files: a record for every request of a file, written as it finishes; what was interrupted goes on.

    python -m h2o_flexgen.batch -i in.jsonl -o out.jsonl --model facebook/opt-1.3b

The whole file is checked before anything is loaded. Progress and errors go to stderr; the last line of stdout is one JSON
document, unless that is a terminal. The exit status is 1 if requests failed, and 2 if the job cannot run.
"""

from h2o_flexgen.cli.batch_request import PROGRAM, parse, request_of
from h2o_flexgen.cli.main import door

main = door("batch", PROGRAM, parse, request_of)

if __name__ == "__main__":
    raise SystemExit(main())
