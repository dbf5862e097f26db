"""Cells that are kept: written whole, found by all that decides their value, and readable behind an interrupted write."""

from __future__ import annotations

from pathlib import Path

from h2o_flexgen.evaluation.cells import FILE, Cell, Cells, Figure

FIGURES = (
    Figure("accuracy", 0.75, 0.1, 4, "hidden questions", examples=(1.0, 1.0, 0.0, 1.0)),
    Figure("accuracy", 1.0, None, 1, "hidden questions", "depth", "50 %"),
)


def cell(number: int) -> Cell:
    return Cell({"task": "recall", "setting": {"policy": "h2o", "kv_budget": number / 100}}, FIGURES, 1.5)


def test_a_cell_is_found_again_as_it_was(tmp_path: Path) -> None:
    Cells(tmp_path).add(cell(1))
    found = Cells(tmp_path).find(cell(1).identity)
    assert found == cell(1)


def test_a_cell_is_found_only_where_all_that_decides_its_value_is_the_same(tmp_path: Path) -> None:
    kept = Cells(tmp_path)
    kept.add(cell(1))
    assert kept.find(cell(2).identity) is None
    assert kept.find({**cell(1).identity, "seed": 1}) is None


def test_a_write_that_was_interrupted_costs_its_own_cell_and_no_other(tmp_path: Path) -> None:
    file = tmp_path / FILE
    kept = Cells(tmp_path)
    for number in range(3):
        kept.add(cell(number))
    file.write_bytes(file.read_bytes()[:-40])
    again = Cells(tmp_path)
    assert [again.find(cell(number).identity) is not None for number in range(3)] == [True, True, False]
    again.add(cell(2))
    assert all(Cells(tmp_path).find(cell(number).identity) == cell(number) for number in range(3))


def test_lines_that_are_no_cells_or_were_changed_count_as_nothing(tmp_path: Path) -> None:
    changed = cell(2).as_line().replace(b'"h2o"', b'"full"')
    (tmp_path / FILE).write_bytes(b"[]\n\nnull\n\xff\xfe\n{}\n" + changed + cell(1).as_line())
    kept = Cells(tmp_path)
    assert kept.find(cell(1).identity) == cell(1)
    assert kept.find(cell(2).identity) is None


def test_cells_are_forgotten_where_that_is_asked_for(tmp_path: Path) -> None:
    Cells(tmp_path).add(cell(1))
    kept = Cells(tmp_path)
    kept.forget()
    assert kept.find(cell(1).identity) is None
    assert Cells(tmp_path).find(cell(1).identity) is None


def test_without_a_folder_cells_live_as_long_as_the_object() -> None:
    kept = Cells()
    kept.add(cell(1))
    assert kept.find(cell(1).identity) == cell(1)
