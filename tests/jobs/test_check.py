"""The check of a whole file: what is found, what is said of bad lines, and the memory that it takes."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import pytest

from h2o_flexgen.jobs import line as input_files
from h2o_flexgen.jobs.index import ChangedInput, check_file
from h2o_flexgen.jobs.line import BadLine, InputFile
from tests.helpers.refusals import one_line
from tests.jobs.made import DEFAULTS, checked, input_file


def test_a_sound_file_is_indexed_with_the_numbers_of_its_lines(tmp_path: Path) -> None:
    found = checked(tmp_path, {"prompt": "a"}, "", {"custom_id": "x", "prompt": "b"}, " ", {"prompt": "c"})
    assert (found.num_refused, found.refused, found.chats) == (0, (), 0)
    assert found.index.numbers.tolist() == [1, 3, 5]
    assert [found.index.line(place).prompt for place in (2, 0, 1)] == ["c", "a", "b"]
    assert [found.index.request_number(place) for place in range(3)] == [0, 2, 4]
    assert [found.index.place_of_number(number) for number in (0, 2, 4)] == [0, 1, 2]
    assert [found.index.place_of(name) for name in ("line-1", "x", "line-5", "line-3")] == [0, 1, 2, None]


def test_texts_are_lines_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\r\n two \nthree")
    index = check_file(InputFile.of(str(path)), DEFAULTS).index
    assert [index.line(place).prompt for place in range(3)] == ["one", " two ", "three"]


def test_chats_are_counted(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    assert checked(tmp_path, chat, {"prompt": "a"}, chat).chats == 2


def test_bad_lines_are_named_and_counted(tmp_path: Path) -> None:
    lines = [{"prompt": "a"}, "{", {"prompt": "a", "wibble": 1}, *["}"] * 9]
    found = checked(tmp_path, *lines)
    assert found.num_refused == 11 and len(found.refused) == 5
    advice = "--skip-invalid runs the others and records these as errors"
    said = f"{tmp_path}/in.jsonl has 11 of 12 lines that cannot be run ({advice}): line 2: it is not JSON"
    assert found.error().startswith(said)
    assert "line 3: unknown field 'wibble'" in found.error() and found.error().endswith("; and 6 more")
    with pytest.raises(BadLine, match="wibble"):
        found.index.line(2)


def test_a_later_line_with_the_same_id_is_a_bad_one(tmp_path: Path) -> None:
    lines = [{"custom_id": name, "prompt": "x"} for name in ("a", "b", "a", "line-5")]
    found = checked(tmp_path, *lines, {"prompt": "fifth"}, {"custom_id": "b"})
    assert [number for number, _ in found.refused] == [3, 5, 6]
    assert found.refused[0][1] == "its custom_id 'a' is that of line 1, too; give it another one"
    assert found.refused[1][1] == "its custom_id 'line-5' is that of line 4, too; give it another one"
    assert found.refused[2][1].startswith("prompt is missing")
    names = [found.index.id_of(place, line_id) for place, line_id in enumerate(("a", "b", "a", "line-5", None, "b"))]
    assert names == ["a", "b", "refused-line-3", "line-5", "refused-line-5", "refused-line-6"]
    assert [found.index.place_of(name) for name in names] == [0, 1, 2, 3, 4, 5], "every record has an id of its own"


def test_a_line_without_an_end_is_cut_and_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_files, "LONGEST_LINE", 100)
    monkeypatch.setattr("h2o_flexgen.jobs.index.LONGEST_LINE", 100)
    found = checked(tmp_path, {"prompt": "x" * 1000}, {"prompt": "y"})
    assert found.refused == ((1, "it is longer than 100 B"),)
    assert found.index.line(1).prompt == "y"
    with pytest.raises(BadLine, match="longer"):
        found.index.line(0)


def test_what_is_no_input_is_refused(tmp_path: Path) -> None:
    assert "No such file" in one_line(lambda: InputFile.of(str(tmp_path / "none.jsonl")))
    assert "Is a directory" in one_line(lambda: InputFile.of(str(tmp_path)))
    assert "is no plain file" in one_line(lambda: InputFile.of(os.devnull))
    assert "is empty; write a request per line" in one_line(lambda: checked(tmp_path, "", " "))
    said = one_line(lambda: checked(tmp_path, {"prompt": "x"}, name="in.json"))
    assert said.endswith("has JSON in its first line, as requests have, and is not called .jsonl; rename it")
    said = one_line(lambda: checked(tmp_path, "{", '  "prompt": "x"', "}", name="in.json"))
    assert "in.json is called .json, and its lines are no requests; give a request of JSON per line" in said


@pytest.mark.parametrize("name", ["README.md", "table.csv", "in.JSONL", "in.txt.gz"])
def test_a_file_that_is_not_called_as_texts_are_is_refused(name: str, tmp_path: Path) -> None:
    said = one_line(lambda: checked(tmp_path, "# A title", "A line", name=name))
    would = f"{name} is called {Path(name).suffix}, and each of its lines would be a prompt"
    assert said.endswith(f"{would}; if they are, call it .txt, or .jsonl if they are requests")


@pytest.mark.parametrize("name", ["in.txt", "in.TXT", "prompts"])
def test_a_file_that_is_called_as_texts_are_has_a_text_per_line(name: str, tmp_path: Path) -> None:
    assert checked(tmp_path, "{braces are text}", name=name).num_refused == 0


# -- the part that was checked before --------------------------------------------------------------------------------------


def test_a_file_may_have_grown_since_it_was_checked(tmp_path: Path) -> None:
    file = input_file(tmp_path, {"prompt": "a"}, {"prompt": "b"})
    known = check_file(file, DEFAULTS).whole
    assert check_file(file, DEFAULTS, known).begins_as_known
    with file.path.open("a") as opened:
        opened.write('{"prompt": "c"}\n')
    again = check_file(file, DEFAULTS, known)
    assert again.begins_as_known and len(again.index) == 3 and again.whole != known


@pytest.mark.parametrize(
    "changed", ['{"prompt": "a"}\n', '\n{"prompt": "a"}\n{"prompt": "b"}\n', '{"prompt": "a"}\n{"prompt": "c"}\n']
)
def test_another_beginning_is_another_file(tmp_path: Path, changed: str) -> None:
    file = input_file(tmp_path, {"prompt": "a"}, {"prompt": "b"})
    known = check_file(file, DEFAULTS).whole
    file.path.write_text(changed)
    assert not check_file(file, DEFAULTS, known).begins_as_known


def test_the_last_line_may_not_grow(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_text("one\ntwo")
    known = check_file(InputFile.of(str(path)), DEFAULTS).whole
    path.write_text("one\ntwo and more\n")
    assert not check_file(InputFile.of(str(path)), DEFAULTS, known).begins_as_known


def test_a_line_that_changes_while_the_job_runs_is_noticed(tmp_path: Path) -> None:
    index = checked(tmp_path, {"prompt": "a"}, {"prompt": "b"}).index
    index.file.path.write_text('{"prompt": "a"}\n{"prompt": "c"}\n')
    assert index.line(0).prompt == "a"
    with pytest.raises(ChangedInput, match=r"line 2 of .*in\.jsonl is another one than when it was checked; put the file back"):
        index.line(1)


def test_memory_does_not_grow_with_the_texts(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    with path.open("w") as opened:
        opened.writelines(json.dumps({"custom_id": f"id {n}", "prompt": "x" * 1000, "seed": n}) + "\n" for n in range(2000))
    check_file(InputFile.of(str(path)), DEFAULTS)  # what is imported or kept for the process
    tracemalloc.start()
    try:
        found = check_file(InputFile.of(str(path)), DEFAULTS)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found.index) == 2000
    assert held < 100 * 2000 and peak < 300 * 2000, "bytes for each request of a thousand bytes"
