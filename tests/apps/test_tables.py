"""Tables of data wrangling: what is read, what pandas would make of numbers, and errors that name line and column."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from h2o_flexgen.apps.data_wrangling.data_sets import NOTHING, Table


def table(folder: Path, text: str, *needed: str) -> Table:
    path = folder / "t.csv"
    path.write_bytes(text.encode())
    return Table.read(path, needed)


def refused(folder: Path, text: str, *needed: str) -> str:
    with pytest.raises(ValueError) as error:
        table(folder, text, *needed)
    return str(error.value).replace(str(folder / "t.csv"), "t.csv")


def test_values_are_read_with_the_line_where_they_stand(tmp_path: Path) -> None:
    read = table(tmp_path, '\ufeffid,name,\r\n1,"two\nlines, and a comma",x\r\n\r\n2,nan,y\n')
    assert read.columns == ("id", "name")
    assert [(row.line, dict(row.values)) for row in read.rows] == [
        (2, {"id": "1", "name": "two\nlines, and a comma"}),
        (5, {"id": "2", "name": None}),
    ]


def test_numbers_are_written_as_pandas_writes_them(tmp_path: Path) -> None:
    read = table(tmp_path, "whole,gaps,decimals,words\n007,2003,1.50,12\n12,,599,x\n").with_numbers_of_pandas()
    assert [list(row.values.values()) for row in read.rows] == [["7", "2003.0", "1.5", "12"], ["12", None, "599.0", "x"]]


def test_pandas_itself_writes_them_so(tmp_path: Path) -> None:
    """Where pandas is there, it is asked, also for what it takes for nothing."""
    pandas = pytest.importorskip("pandas")
    cells = ["1", "-2", "3.25", "1e3", ".5", "0012", "1999", "12345678901234567", "x", "7%", "1 2", *sorted(NOTHING)]
    pairs = [(first, second) for first in cells for second in cells]
    rows = ([f"c{place}" for place in range(len(pairs))], *zip(*pairs))
    read = table(tmp_path, "".join(",".join(row) + "\n" for row in rows)).with_numbers_of_pandas()
    theirs = pandas.read_csv(tmp_path / "t.csv")
    for column, pair in zip(rows[0], pairs):
        wanted = [None if isinstance(one, float) and math.isnan(one) else str(one) for one in theirs[column]]
        assert [row.values[column] for row in read.rows] == wanted, pair


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "t.csv is empty"),
        ("id,name\n", "t.csv has no rows below its header"),
        ("id,name\n1,a\n2,b,c\n", "line 3 of t.csv has 3 values, and the header has 2 columns"),
        ("id,name\n1\n", "line 2 of t.csv has 1 value, and the header has 2 columns"),
        ("id,label,id\n1,2,3\n", "line 1 of t.csv has the column 'id' twice"),
        ("id,nam\n1,a\n", "line 1 of t.csv has no column 'name'; it has id, nam; did you mean nam?"),
        ('id,name\n1,"a\n', "line 2 of t.csv is no line of a table: unexpected end of data"),
    ],
)
def test_what_is_wrong_is_named_by_line_and_column(tmp_path: Path, text: str, said: str) -> None:
    assert refused(tmp_path, text, "id", "name").startswith(said)


def test_ids_are_there_once(tmp_path: Path) -> None:
    read = table(tmp_path, "name,id\na,1\nb,2\nc,1\n")
    with pytest.raises(ValueError, match=r"line 4 of .*t\.csv, column 'id' \(2\): '1' is that of line 2, too"):
        read.by_id("id")
    with pytest.raises(ValueError, match=r"line 3 of .*, column 'id' \(2\): nothing stands there"):
        table(tmp_path, "name,id\na,1\nb,\n").by_id("id")


def test_a_table_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"id,name\n1,\xff\n")
    with pytest.raises(ValueError, match=r"t\.csv is not UTF-8 text \(byte 10\)"):
        Table.read(tmp_path / "t.csv")
