"""Parts of error messages."""

from __future__ import annotations

import pytest

from h2o_flexgen.core.hints import as_in_json, shown


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("stream is True; leave it out", "stream is true; leave it out"),
        (f"tools is {shown([None, {'strict': False}])}.", "tools is [null, {'strict': false}]."),
        (f"name is {shown('it is None')}; the model's is None", "name is 'it is None'; the model's is null"),
        (f"name is {shown(chr(39) + ' True')}; known are None", 'name is "\' True"; known are null'),
        (f"name is {shown(chr(34) + chr(39) + ' True')}", "name is '\"\\' True'"),
        ("the model None-7B, and /a/True.txt, and Nonesuch", "the model None-7B, and /a/True.txt, and Nonesuch"),
    ],
)
def test_a_message_about_json_has_its_words_and_leaves_texts_alone(message: str, said: str) -> None:
    assert as_in_json(message) == said
