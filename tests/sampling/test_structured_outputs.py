"""What a text is held to, as it is asked for: each kind, and one line for all that is none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen import SamplingParams, StructuredOutputsParams
from h2o_flexgen.sampling.params import SAMPLING
from tests.helpers.refusals import one_line

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"json": SCHEMA}, "json"),
        ({"json": '{"type": "integer"}'}, "json"),
        ({"json": True}, "json"),
        ({"regex": "a+", "json_object": False}, "regex"),
        ({"choice": ("yes", "no"), "disable_fallback": True}, "choice"),
        ({"grammar": 'start: "a"', "json": None}, "grammar"),
        ({"json_object": True, "whitespace_pattern": " "}, "json_object"),
    ],
)
def test_one_kind_is_asked_for_by_the_names_of_vllm(given: dict[str, Any], kind: str) -> None:
    params = SamplingParams(structured_outputs=given)
    assert params.held_to is not None and params.held_to.kind == kind
    assert replace(params, stop=["x"]).held_to == params.held_to == SamplingParams(structured_outputs=params.held_to).held_to
    assert len({params, SamplingParams(structured_outputs=given)}) == 1, "what is equal has one hash"


def test_names_are_there_for_what_openai_asks() -> None:
    asked = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    assert SamplingParams(response_format=asked) == SamplingParams(structured_outputs={"json": SCHEMA})
    assert SamplingParams(response_format={"type": "text"}) == SamplingParams()
    assert SamplingParams(response_format={"type": "text"}, structured_outputs={"regex": "a"}).held_to is not None
    assert SamplingParams(response_format={"type": "json_object"}).held_to == StructuredOutputsParams(json_object=True)


def test_other_properties_may_be_closed_out_of_a_schema() -> None:
    nested = {"properties": {"a": {"items": [{"properties": {}}]}, "b": {"properties": {}, "additionalProperties": True}}}
    closed = StructuredOutputsParams(json=nested, disable_additional_properties=True).schema
    assert closed["additionalProperties"] is False and closed["properties"]["b"]["additionalProperties"] is True
    assert closed["properties"]["a"]["items"][0]["additionalProperties"] is False
    assert StructuredOutputsParams(json=nested).schema == nested


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "structured_outputs asks for nothing; give one of json, regex, choice, grammar, json_object"),
        ({"json_object": False}, "structured_outputs asks for nothing"),
        ({"json": {}, "regex": "a"}, "structured_outputs asks for json and regex; give one of"),
        ({"regx": "a"}, "unknown field of structured_outputs 'regx'; did you mean regex?"),
        ({"structural_tag": "{}"}, "unknown field of structured_outputs 'structural_tag': write it as a grammar"),
        (
            "yes|no",
            "structured_outputs is 'yes|no'; allowed is an object with one of json, regex, choice, grammar",
        ),
        ({"regex": 5}, "structured_outputs.regex is 5; allowed is a text that is not empty"),
        ({"choice": []}, "structured_outputs.choice is []; allowed is a list of texts, none of them empty"),
        ({"choice": "yes"}, "structured_outputs.choice is 'yes'; allowed is a list of texts"),
        ({"choice": ["a", ""]}, "structured_outputs.choice is ['a', '']; allowed is a list of texts"),
        ({"json": "{"}, "structured_outputs.json is '{', which is not JSON (Expecting property name"),
        ({"json": '{"a": 1, "a": 2}'}, "which is not JSON ('a' stands there twice)"),
        ({"json": [1]}, "structured_outputs.json is [1]; allowed is a JSON schema, an object or a text that has one"),
        ({"json": {"a": {1, 2}}}, "structured_outputs.json is {'a': {1, 2}}; allowed is a JSON schema"),
        ({"json_object": 1}, "structured_outputs.json_object is 1; allowed is true or false"),
        ({"regex": "a", "whitespace_pattern": " "}, "structured_outputs.whitespace_pattern is for json and json_object"),
    ],
)
def test_what_is_no_kind_is_refused_in_one_line(given: Any, said: str) -> None:
    assert said in one_line(lambda: SamplingParams(structured_outputs=given))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("json", "response_format is 'json'; allowed is an object like"),
        ({}, "response_format.type None is unknown; known: text, json_object, json_schema"),
        ({"type": "json_schema"}, "response_format.json_schema is None; write"),
        ({"type": "json_object", "schema": {}}, "unknown field of response_format 'schema'"),
        (
            {"type": "json_schema", "json_schema": {"name": "a"}},
            "response_format.json_schema.schema is None; allowed",
        ),
        ({"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}, "response_format.json_schema.strict is 1"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "name": 1}}, "response_format.json_schema.name is 1"),
        (
            {"type": "json_schema", "json_schema": {"schema": {}, "nam": 1}},
            "field of response_format.json_schema 'nam'",
        ),
    ],
)
def test_formats_that_openai_does_not_have_are_refused_in_one_line(given: Any, said: str) -> None:
    assert said in one_line(lambda: SamplingParams(response_format=given))


def test_a_flag_names_the_file_of_a_schema(tmp_path: Path) -> None:
    flag, file = SAMPLING["structured_outputs"], tmp_path / "person.json"
    assert flag.all_flags == ("--json-schema",)
    file.write_text('{"type": "integer"}')
    assert flag.allowed.typed(str(file)) == StructuredOutputsParams(json={"type": "integer"})
    file.write_text("[]")
    assert one_line(lambda: flag.allowed.typed(str(file))).startswith(f"the file {file} is '[]'; allowed is a JSON schema")
    missing = tmp_path / "none.json"
    assert one_line(lambda: flag.allowed.typed(str(missing))) == f"{missing} cannot be read (No such file or directory)"
