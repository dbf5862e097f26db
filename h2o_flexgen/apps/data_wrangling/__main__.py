"""Data wrangling: entity matching, imputation and error detection over tables, as a job that can be resumed.

    python -m h2o_flexgen.apps.data_wrangling --task entity_match --data-dir data/datasets --data-set Beer -o beer.jsonl

Tables and examples are checked before anything is loaded. Progress and errors go to stderr; the last line of stdout is one
JSON document, unless that is a terminal. The exit status is 1 if rows have no answer, and 2 if the job cannot run.
"""

from h2o_flexgen.apps.data_wrangling.request import PROGRAM, parse, request_of
from h2o_flexgen.cli.main import door

main = door("data_wrangling", PROGRAM, parse, request_of, "apps.data_wrangling.wrangling_work")

if __name__ == "__main__":
    raise SystemExit(main())
