"""Pages: on a terminal lines end between words, and nothing is lost."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from h2o_flexgen.cli.terminal import say_document, table, wrapped

WORDS = st.lists(st.text("abcdef,.%", min_size=1, max_size=30), min_size=1, max_size=40).map(" ".join)


@given(WORDS, st.integers(40, 120))
def test_no_word_is_broken_and_none_is_lost(line: str, width: int) -> None:
    pieces = list(wrapped([line], width))
    assert [word for piece in pieces for word in piece.split()] == line.split()
    assert all(len(piece) <= width or len(piece.split()) == 1 for piece in pieces)


def test_what_fits_and_what_goes_to_no_terminal_stays_as_it_is() -> None:
    lines = ["a b\tc", "", "  x " * 40, "y" * 300]
    assert list(wrapped(lines, None)) == lines
    assert list(wrapped(lines[:2], 80)) == lines[:2]


def test_a_document_is_for_programs_and_not_for_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for is_terminal, shown in ((False, '{"one": 1}\n'), (True, "")):
        monkeypatch.setattr(sys.stdout, "isatty", lambda answer=is_terminal: answer)
        say_document({"one": 1})
        assert capsys.readouterr().out == shown


def test_what_stands_behind_a_label_goes_on_below_itself() -> None:
    first, *rest = wrapped(["why       " + "compute is busy " * 8], 60)
    assert first.startswith("why       compute") and rest and all(line.startswith(" " * 10 + "c") for line in rest)


def test_a_number_stays_with_its_unit() -> None:
    for width in range(40, 80):
        for line in wrapped(["weights 2.35 GB, slots 33.60 MB, KV 896.63 MB (94 %), 0.5 s, 12.1 tokens/s " * 2], width):
            assert not line[-1].isdigit()


def test_a_command_to_paste_says_that_it_goes_on() -> None:
    command = "run       python -m h2o_flexgen.run --model facebook/opt-1.3b --num-prompts 100 --percent 0 89 0 100 0 100"
    pieces = list(wrapped([command], 60))
    assert len(pieces) > 1 and all(piece.endswith(" \\") for piece in pieces[:-1]) and len(max(pieces, key=len)) <= 60
    assert " ".join("".join(piece.removesuffix("\\") for piece in pieces).split()) == " ".join(command.split())
    quoted = command.replace("facebook/opt-1.3b", "'my models/opt'")
    assert list(wrapped([quoted], 60)) == [quoted]


def test_cells_of_a_markdown_table_stay_whole() -> None:
    row = "| " + " | ".join(f"1.23{digit} ± 0.01 (x 1.02)" for digit in range(7)) + " |"
    pieces = list(wrapped([row], 80))
    assert all(piece.rstrip().endswith("|") for piece in pieces)
    assert "| " + " ".join(" ".join(pieces).split()).lstrip("| ") == row


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_table_that_is_wider_than_the_page_has_cells_of_several_lines(width: int) -> None:
    rows = [
        ["tier", "needs at most", "limit", "of which"],
        ["CPU", "3.78 GB", "4.00 GB", ", ".join(f"weight slots {number}.60 MB" for number in range(6))],
        ["disk", "286.19 MB", "52.43 GB", "weights 286.19 MB"],
    ]
    assert table(rows)[1] == "CPU   3.78 GB        4.00 GB   " + rows[1][3]
    lines = table(rows, width)
    assert max(map(len, lines)) <= width and len(lines) > 3
    assert sorted(" ".join(lines).split()) == sorted(" ".join(cell for row in rows for cell in row).split())
