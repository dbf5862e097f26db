"""Questions in the words of the benchmark, made of tables that are written here by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from h2o_flexgen.apps.data_wrangling.data_sets import DATA_SETS, DETECT, IMPUTE, MATCH, SPLITS, TASKS, Folder
from h2o_flexgen.apps.data_wrangling.questions import Question, Questions, Serialising
from h2o_flexgen.apps.made_up_tables import MadeUpDataSet

GOODS = "id,title,manufacturer,price\n"


def matching(folder: Path, pairs: str, second: str | None = None) -> Path:
    own = folder / "Amazon-Google"
    own.mkdir(exist_ok=True)
    (own / "tableA.csv").write_text(GOODS + "0,red atlas ,hooli,10\n1,blue atlas,,20\n")
    (own / "tableB.csv").write_text(second or GOODS + "7,atlas (red),hooli,\n8,kettle,,15.5\n")
    (own / "test.csv").write_text("ltable_id,rtable_id,label\n" + pairs)
    return own


def asked(own: Path, task: str = MATCH, **serialising: object) -> list[Question]:
    folder = Folder.of(TASKS[task], str(own), None)
    return Questions.of(folder, Serialising(**serialising)).split("test")  # type: ignore[arg-type]


def test_pairs_are_asked_as_in_the_benchmark(tmp_path: Path) -> None:
    same, other = asked(matching(tmp_path, "0,7,1\n1,8,0\n"))
    assert same.text == (
        "Product A is title: red atlas. manufacturer: hooli. price: 10. Product B is title: atlas (red). manufacturer: hooli. "
        "price: . Are Product A and Product B the same? "
    )
    assert (same.line, same.expected, same.by) == (2, "Yes", "hooli")
    assert "Product B is title: kettle. manufacturer: . price: 15.5. Are" in other.text
    assert (other.expected, other.by) == ("No", "nan")


def test_rows_are_written_as_a_person_wants_them(tmp_path: Path) -> None:
    own = matching(tmp_path, "1,7,1\n")
    (one,) = asked(own, columns=("price", "manufacturer"), separator=";", missing="?", numbers_of_pandas=False)
    assert one.text.startswith("Product A is price: 20 ; manufacturer: ?. Product B is price: ? ; manufacturer: hooli. Are")


def test_columns_are_dropped_and_renamed_as_in_the_benchmark(tmp_path: Path) -> None:
    MadeUpDataSet(DATA_SETS["Beer"], 4).write(tmp_path)
    folder = Folder.of(TASKS[MATCH], str(tmp_path), "Beer")
    for one in Questions.of(folder, Serialising()).split("test"):
        assert one.text.startswith("Product A is name: ") and ". factory: " in one.text and "ABV" not in one.text


def test_gaps_are_asked_for_without_their_column(tmp_path: Path) -> None:
    own = tmp_path / "Restaurant"
    own.mkdir()
    (own / "test.csv").write_text("name,addr,phone,type,city\nthe hut,1 main st.,555-1,seafood,oakland\n")
    (one,) = asked(own, IMPUTE)
    assert one.text == "name: the hut. addr: 1 main st.. phone: 555-1. type: seafood. What is the city? "
    assert (one.expected, one.by) == ("oakland", None)
    (own / "test.csv").write_text("name,city\nthe hut,oakland\nthe inn,\n")
    with pytest.raises(ValueError, match=r"line 3 of .*test\.csv, column 'city' \(2\): nothing stands there"):
        asked(own, IMPUTE)


def hospital(folder: Path, cells: str) -> Path:
    own = folder / "Hospital"
    own.mkdir(exist_ok=True)
    (own / "table.csv").write_text("City,Score\nbirminghxm,\noakland,90%\n")
    (own / "test.csv").write_text("row_id,col_name,is_clean\n" + cells)
    return own


def test_errors_are_asked_for_cell_by_cell(tmp_path: Path) -> None:
    wrong, empty = asked(hospital(tmp_path, "0,City,0\n0,Score,1\n"), DETECT)
    assert wrong.text == "Is there a x spelling error in City: birminghxm? " and wrong.expected == "Yes"
    assert empty.text == "Is there a x spelling error in Score: nan? " and empty.expected == "No" and empty.by == "Score"


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ("0,9,1\n", r"line 2 of .*test\.csv, column 'rtable_id' \(2\): .*tableB\.csv has no row with the id '9'"),
        ("0,7,1\n,7,1\n", r"line 3 of .*test\.csv, column 'ltable_id' \(1\): .*tableA\.csv has no row with the id None"),
        ("0,7,yes\n", r"line 2 of .*test\.csv, column 'label' \(3\): 'yes' stands there; known are 1 and 0"),
    ],
)
def test_pairs_that_lead_nowhere_are_named(tmp_path: Path, pairs: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        asked(matching(tmp_path, pairs))


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ("2,City,1\n", r"column 'row_id' \(1\): '2' is no row; .*table\.csv has rows 0 to 1"),
        ("-1,City,1\n", r"column 'row_id' \(1\): '-1' is no row"),
        ("0,Town,1\n", r"column 'col_name' \(2\): .*table\.csv has no column 'Town'"),
        ("0,City,\n", r"column 'is_clean' \(3\): nothing stands there"),
    ],
)
def test_cells_that_are_not_there_are_named(tmp_path: Path, cells: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        asked(hospital(tmp_path, cells), DETECT)


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    own = matching(tmp_path, "0,7,1\n", second="id,title,price\n7,atlas,1\n")
    with pytest.raises(ValueError, match=r"line 1 of .*tableB\.csv has no column 'manufacturer'; it has id, title, price"):
        asked(own)
    own = matching(tmp_path, "0,7,1\n")
    with pytest.raises(ValueError, match=r"--columns has 'colour', and line 1 of .*tableA\.csv has id, title"):
        asked(own, columns=("colour",))
    with pytest.raises(ValueError, match=r"no column .* is left to describe its rows by"):
        asked(tmp_path_of_restaurant(tmp_path), IMPUTE)


def tmp_path_of_restaurant(folder: Path) -> Path:
    own = folder / "Restaurant"
    own.mkdir()
    (own / "test.csv").write_text("city\noakland\n")
    return own


# -- folders ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(DATA_SETS))
def test_every_data_set_is_found_by_name_and_in_its_own_folder(tmp_path: Path, name: str) -> None:
    task = DATA_SETS[name].task
    own = MadeUpDataSet(DATA_SETS[name], 6, seed=3).write(tmp_path / "datasets")
    assert own == tmp_path / "datasets" / task.folder / name
    for given, said in ((tmp_path, name), (tmp_path / "datasets", name), (own, name), (own, None)):
        found = Questions.of(Folder.of(task, str(given), said), Serialising())
        assert [len(found.split(split)) for split in SPLITS] == [6, 6, 6]
    again = MadeUpDataSet(DATA_SETS[name], 6, seed=3).write(tmp_path / "again")
    other = MadeUpDataSet(DATA_SETS[name], 6, seed=4).write(tmp_path / "other")
    texts = [{path.name: path.read_text() for path in folder.iterdir()} for folder in (own, again, other)]
    assert texts[0] == texts[1] != texts[2]


def test_what_is_missing_is_named_with_where_it_comes_from(tmp_path: Path) -> None:
    download = r"unpack https://\S+datasets\.tar\.gz, which has entity_matching/structured/"
    with pytest.raises(ValueError, match=rf"--data-dir none is no folder; {download}"):
        Folder.of(TASKS[MATCH], "none", "Beer")
    with pytest.raises(ValueError, match=rf"has no data set Beer: there is no .*/entity_matching/structured/Beer; {download}"):
        Folder.of(TASKS[MATCH], str(tmp_path), "Beer")
    own = matching(tmp_path, "0,7,1\n")
    (own / "tableB.csv").unlink()
    with pytest.raises(ValueError, match=rf"Amazon-Google has no tableB\.csv: there is no .*; {download}"):
        asked(own)


def test_data_sets_of_other_tasks_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--data-set 'Buy' is one of impute, and --task is entity_match"):
        Folder.of(TASKS[MATCH], str(tmp_path), "Buy")
    with pytest.raises(ValueError, match=r"--data-set 'Bear' is no data set of entity_match; .*; did you mean Beer"):
        Folder.of(TASKS[MATCH], str(tmp_path), "Bear")
    with pytest.raises(ValueError, match="is called like no data set of detect_errors; add --data-set: Hospital"):
        Folder.of(TASKS[DETECT], str(tmp_path), None)
