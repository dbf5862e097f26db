"""Documents of others: whatever is wrong with them is one kind of error."""

from __future__ import annotations

from pathlib import Path

import pytest

from h2o_flexgen.core.files import parse_json, parse_yaml
from h2o_flexgen.core.hints import shortened, shown
from h2o_flexgen.planning.machine import Machine

DEEP = 100_000


@pytest.mark.parametrize("text", ["[" * DEEP, '{"a":' * DEEP, "[" * DEEP + "]" * DEEP, "no json", "", "\u0663"])
def test_json_that_is_none_or_too_deep_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


@pytest.mark.parametrize("text", ["[" * 1000, "[" * 1000 + "]" * 1000, "a: [", "\tno", "a: !!python/object:os.system {}"])
def test_yaml_that_is_none_or_too_deep_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        parse_yaml(text)


def test_what_is_right_is_read() -> None:
    assert parse_json(b'{"a": [1, true]}') == {"a": [1, True]} == parse_yaml("a: [1, true]")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 1000, "is not YAML: brackets are nested too deeply"),
        ("a: &a [x, x]\nb: &b [*a, *a]\n", "unknown key 'a'"),
        ("&a [x, x, x, x, x, x]: 1", "is not YAML: .*unhashable"),
    ],
)
def test_a_machine_file_of_that_kind_is_named(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "m.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        Machine.load(file)
    assert str(file) in str(caught.value) and len(str(caught.value)) < 600


def test_values_are_shown_short_however_long_or_deep_they_are() -> None:
    bomb: list[object] = []
    for _ in range(60):
        bomb = [bomb, bomb]
    for value in ("x" * 5000, "a b " * 2000, 10**5000, bomb, {"k": "v" * 999}, b"x" * 5000):
        assert len(shown(value)) < 300
    assert (shown("abc"), shown(7), shown([1, "a"])) == ("'abc'", "7", "[1, 'a']")


def test_a_message_keeps_its_sense_where_a_word_or_a_quotation_is_long() -> None:
    path = "/folder/" + "x" * 150
    assert shortened(f"the file {path} is none") == f"the file {path} is none"
    assert shortened(f"'{'a b ' * 100}' is none") == f"'{'a b ' * 10}...{'a b ' * 10}' (400 characters) is none"
