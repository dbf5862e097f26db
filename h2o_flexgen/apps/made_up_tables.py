"""Writes small tables that are made up, laid out as a data set of data wrangling, for tests and for a first try without a
download. The same seed makes the same tables."""

from __future__ import annotations

import csv
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from random import Random

from h2o_flexgen.apps.data_wrangling.data_sets import DATA_SETS, DETECT, IMPUTE, MATCH, SPLITS, DataSet
from h2o_flexgen.cli.flags import Parser
from h2o_flexgen.cli.main import status_of
from h2o_flexgen.core.allowed_values import Bounds
from h2o_flexgen.core.files import local_path, write_text
from h2o_flexgen.sampling.params import SEED

MAKERS = ("northwind", "acme", "globex", "initech", "umbrella works", "stark tools", "wayne press", "hooli")
THINGS = ("camera", "printer", "guitar", "lager", "atlas", "compiler", "tripod", "ledger", "kettle", "speaker")
TRAITS = ("blue", "compact", "deluxe", "second edition", "for windows", "wireless", "classic", "pocket", "professional", "live")
CITIES = ("springfield", "new york", "denver", "san diego", "oakland", "boston")
NUMBERS = (
    "price",
    "Price",
    "year",
    "ABV",
    "ZipCode",
    "PhoneNumber",
    "phone",
    "ProviderNumber",
    "Score",
    "class",
    "modelno",
    "Time",
)
GAP = 0.1  # share of values that are missing
SAME = 0.4  # share of pairs that are one thing
TYPO = "x"  # what errors are made with, as in Hospital
Rows = list[dict[str, str]]


@dataclass(frozen=True)
class MadeUpDataSet:
    data_set: DataSet
    rows: int  # of each split
    seed: int = 0

    def write(self, folder: Path) -> Path:
        """Writes the data set where the download has it, below the folder; returns its own folder."""
        own = folder / self.data_set.task.folder / self.data_set.name
        own.mkdir(parents=True, exist_ok=True)
        for name, rows in WRITERS[self.data_set.task.name](self, Random(f"{self.data_set.name} {self.seed}")).items():
            write_text(own / name, _csv(rows))
        return own

    # -- tasks -------------------------------------------------------------------------------------------------------------

    def pairs(self, random: Random) -> Mapping[str, Rows]:
        """Two tables; a thing of the first stands in the second in other words."""
        count = max(4, self.rows)
        things = [self._thing(random) for _ in range(count)]
        first = [{"id": str(number), **_with_gaps(thing, random)} for number, thing in enumerate(things)]
        second = [{"id": str(number), **_with_gaps(_retold(thing, random), random)} for number, thing in enumerate(things)]
        splits = {file: [_pair(random, count) for _ in range(self.rows)] for file in SPLITS.values()}
        return {"tableA.csv": first, "tableB.csv": second, **splits}

    def gaps(self, random: Random) -> Mapping[str, Rows]:
        """Tables in which the imputed column can be found from others."""
        return {file: [self._thing(random) for _ in range(self.rows)] for file in SPLITS.values()}

    def errors(self, random: Random) -> Mapping[str, Rows]:
        """One table, and splits that name cells of it; in some of these, letters are replaced."""
        table = [self._thing(random) for _ in range(max(4, self.rows))]
        splits: dict[str, Rows] = {file: [] for file in SPLITS.values()}
        cells = [(row, column) for row in range(len(table)) for column in self.data_set.columns]
        chosen = random.sample(cells, 3 * self.rows)
        for place, (row, column) in enumerate(chosen):
            is_clean = random.random() > SAME
            if not is_clean:
                table[row][column] = _misspelt(table[row][column], random)
            cell = {"row_id": str(row), "col_name": column, "is_clean": str(int(is_clean))}
            splits[list(SPLITS.values())[place % len(SPLITS)]].append(cell)
        return {"table.csv": table, **splits}

    # -- rows --------------------------------------------------------------------------------------------------------------

    def _thing(self, random: Random) -> dict[str, str]:
        maker, city = random.choice(MAKERS), random.choice(CITIES)
        title = f"{maker} {random.choice(THINGS)} {' '.join(random.sample(TRAITS, 3))} {random.randrange(1000)}"
        known = {"manufacturer": maker, "brand": maker, "venue": maker, "city": city, "City": city}
        addressed = {"addr": f"{random.randrange(1, 999)} main st., {city}", "title": title, "name": title}
        told = {**known, **addressed}
        return {column: told.get(column) or _value(column, random) for column in self.data_set.columns}


def _value(column: str, random: Random) -> str:
    if column in NUMBERS:
        return str(random.randrange(10, 3000))
    return f"{random.choice(MAKERS)} {random.choice(THINGS)} {random.choice(TRAITS)}"


def _with_gaps(thing: Mapping[str, str], random: Random) -> dict[str, str]:
    """Some values are missing, but never the first, by which things are known."""
    first = next(iter(thing))
    return {name: "" if name != first and random.random() < GAP else value for name, value in thing.items()}


def _retold(thing: Mapping[str, str], random: Random) -> dict[str, str]:
    """The same thing in other words: its name in another order."""
    first, *others = thing
    words = thing[first].split()
    random.shuffle(words)
    return {first: " ".join(words), **{name: thing[name] for name in others}}


def _pair(random: Random, count: int) -> dict[str, str]:
    one = random.randrange(count)
    is_same = random.random() < SAME
    other = one if is_same else (one + random.randrange(1, count)) % count
    return {"ltable_id": str(one), "rtable_id": str(other), "label": str(int(is_same))}


def _misspelt(text: str, random: Random) -> str:
    places = random.sample(range(len(text)), min(len(text), 2))
    return "".join(TYPO if place in places else letter for place, letter in enumerate(text))


WRITERS: Mapping[str, Callable[[MadeUpDataSet, Random], Mapping[str, Rows]]] = {
    MATCH: MadeUpDataSet.pairs,
    IMPUTE: MadeUpDataSet.gaps,
    DETECT: MadeUpDataSet.errors,
}


def _csv(rows: Sequence[Mapping[str, str]]) -> str:
    text = StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


PROGRAM = "python -m h2o_flexgen.apps.made_up_tables"
MOST_ROWS = 100_000


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    return status_of(lambda: _parser().parse(words), _write)


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
    own = MadeUpDataSet(DATA_SETS[flags.data_set], flags.rows, flags.seed).write(local_path(flags.folder))
    print(own)


if __name__ == "__main__":
    raise SystemExit(main())
