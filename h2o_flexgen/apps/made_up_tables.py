"""Writes small tables that are made up, laid out as a data set of data wrangling, for a first try without a download.

python -m h2o_flexgen.apps.made_up_tables Beer tables --rows 40
python -m h2o_flexgen.apps.data_wrangling --task entity_match --data-dir tables --data-set Beer -o beer.jsonl
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from h2o_flexgen.apps.data_wrangling.data_sets import DATA_SETS
from h2o_flexgen.apps.data_wrangling.made_up_data import MadeUpDataSet
from h2o_flexgen.cli.errors import exit_status
from h2o_flexgen.cli.flags import Parser
from h2o_flexgen.core.allowed_values import Bounds
from h2o_flexgen.sampling.params import SEED

PROGRAM = "python -m h2o_flexgen.apps.made_up_tables"
MOST_ROWS = 100_000


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    return exit_status(lambda: _parser().parse(words), _write)


def _parser() -> Parser:
    parser = Parser(PROGRAM, "Writes small tables that are made up, laid out as a data set of data wrangling.")
    parser.set_defaults(verbose=0)
    parser.add_argument("data_set", choices=tuple(DATA_SETS), metavar="NAME", help=f"one of {', '.join(DATA_SETS)}")
    parser.add_argument("folder", metavar="FOLDER", help="the tables go below it, where the download has them")
    group = parser.group()
    group.value("--rows", "N", "of each of train.csv, valid.csv and test.csv", Bounds(1, MOST_ROWS), 40)
    group.value("--seed", "N", "makes up others", SEED, 0)
    return parser


def _write(flags: Namespace) -> None:
    own = MadeUpDataSet(DATA_SETS[flags.data_set], flags.rows, flags.seed).write(Path(flags.folder).expanduser())
    print(own)


if __name__ == "__main__":
    raise SystemExit(main())
