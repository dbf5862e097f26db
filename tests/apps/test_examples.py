"""Examples before questions: drawn ones, and those of a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from h2o_flexgen.apps.data_wrangling.data_sets import DATA_SETS
from h2o_flexgen.apps.data_wrangling.questions import Examples, Question, asked, by_hand, drawn, requests_of

ROWS = [Question(line, f"Is {line} odd? ", "Yes" if line % 8 == 1 else "No") for line in range(2, 26)]
TRAIN = Path("train.csv")
KEYED, PLAIN = DATA_SETS["Amazon-Google"], DATA_SETS["Beer"]


def test_examples_are_drawn_once_for_all_and_the_same_for_the_same_seed() -> None:
    one = drawn(ROWS, TRAIN, 3, seed=1, balanced=False)
    assert one == drawn(ROWS, TRAIN, 3, seed=1, balanced=False) != drawn(ROWS, TRAIN, 3, seed=2, balanced=False)
    lines = one.text.split("\n\n")
    assert len(lines) == 3 and one.text.endswith("\n") and {one.before(row) for row in ROWS} == {one.text}
    assert {line.strip() for line in lines} < {f"{row.text}{row.expected}" for row in ROWS}


def test_balanced_examples_come_from_as_many_of_each_answer() -> None:
    text = drawn(ROWS, TRAIN, 6, seed=0, balanced=True).text  # three rows are answered Yes
    assert (text.count("? Yes"), text.count("? No")) == (3, 3)
    with pytest.raises(ValueError, match=r"7 is more than there are: train\.csv has 24 rows, 6 of them balanced; give 6 or"):
        drawn(ROWS, TRAIN, 7, seed=0, balanced=True)


def test_more_examples_than_rows_are_refused() -> None:
    assert drawn(ROWS, TRAIN, 24, seed=0, balanced=False).text.count("\n\n") == 23
    with pytest.raises(ValueError, match=r"--examples 25 is more than there are: train\.csv has 24 rows; give 24 or fewer"):
        drawn(ROWS, TRAIN, 25, seed=0, balanced=False)


def test_examples_by_hand_are_a_text_or_one_for_each_value(tmp_path: Path) -> None:
    text, whole, keyed = tmp_path / "a.txt", tmp_path / "a.json", tmp_path / "b.json"
    text.write_text("A? Yes\n")
    whole.write_text(json.dumps("A? Yes\n"))
    keyed.write_text(json.dumps({"hooli": "B? No\n", "nan": ""}))
    assert by_hand(str(text), KEYED) == by_hand(str(whole), PLAIN) == Examples("A? Yes\n")
    found = by_hand(str(keyed), KEYED)
    assert found.before(Question(5, "", "Yes", "hooli")) == "B? No\n" and found.before(Question(6, "", "No", "nan")) == ""
    with pytest.raises(ValueError, match=r"b\.json has no examples under 'acme', which line 7 of the rows has"):
        found.before(Question(7, "", "No", "acme"))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", " \n", "is empty; for no examples say --examples 0"),
        ("a.json", '"', "is not JSON: Unterminated string"),
        ("a.json", '{"a": "x", "a": "y"}', "is not JSON: 'a' stands there twice"),
        ("a.json", "[1]", r"has \[1\]; it takes a text, or an object with texts as its values"),
        ("a.json", '{"a": 1}', "it takes a text, or an object"),
        ("a.json", '{"a": "x"}', "has texts by value, and Beer has one for all rows"),
        ("none.txt", None, "cannot be read"),
    ],
)
def test_a_file_of_examples_that_is_broken_is_refused(tmp_path: Path, name: str, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=rf"--examples-file .*{name} {said}|--examples-file .*{name} .*{said}"):
        by_hand(str(tmp_path / name), PLAIN)


def test_a_prompt_is_instruction_examples_and_question_without_space_at_its_ends() -> None:
    question = Question(2, "C the same? ", "Yes")
    (one,) = asked([question], "test", Examples("A? Yes\n\nB? No\n"), "The same?")
    assert (one.id, one.prompt) == ("test-2", "The same? A? Yes\n\nB? No\n\nC the same?")
    (bare,) = asked([question], "valid", Examples(), None)
    assert (bare.id, bare.prompt) == ("valid-2", "C the same?")
    assert json.loads(requests_of([bare], 3)) == {
        "custom_id": "valid-2", "prompt": "C the same?", "max_tokens": 3, "temperature": 0, "stop": ["\n"]
    }  # fmt: skip
