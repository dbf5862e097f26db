"""Fields of a request: what they mean, which are let pass, and what is said of the others."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as OfChats
from openai.types.completion_create_params import CompletionCreateParamsBase as OfPrompts

from h2o_flexgen.jobs.line_fields import Options, read_options
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.sampling.structured_outputs import StructuredOutputsParams
from h2o_flexgen.text.tokenizer import TemplateSettings
from tests.helpers.refusals import one_line

DEFAULTS = Options(SamplingParams(max_tokens=7, temperature=0.5, stop=["end"]))


def options(is_chat: bool = False, **given: Any) -> Options:
    return read_options(given, is_chat, DEFAULTS)


def refused(is_chat: bool = False, **given: Any) -> str:
    return one_line(lambda: options(is_chat, **given))


def test_what_a_line_leaves_open_is_taken_from_the_defaults() -> None:
    assert options().params is DEFAULTS.params
    assert options(top_p=0.9, seed=3).params == SamplingParams(max_tokens=7, temperature=0.5, stop=["end"], top_p=0.9, seed=3)
    assert options(stop=None, max_tokens=None).params == DEFAULTS.params, "null leaves a field open"
    assert options(stop=[]).params.stop_strings == ()


def test_max_tokens_has_two_names() -> None:
    assert options(max_completion_tokens=3).params.max_tokens == options(True, max_tokens=3).params.max_tokens == 3
    assert options(max_tokens=3, max_completion_tokens=3).params.max_tokens == 3
    assert refused(max_tokens=3, max_completion_tokens=4) == (
        "max_tokens is 3 and max_completion_tokens is 4; give one of them"
    )


def test_logprobs_are_a_number_for_prompts_and_a_truth_for_chats() -> None:
    assert options(logprobs=2).params.logprobs == 2
    assert options(True, logprobs=True).params.logprobs == 0
    assert options(True, logprobs=True, top_logprobs=3).params.logprobs == 3
    assert options(True, logprobs=False).params.logprobs is None
    assert refused(logprobs=True) == "logprobs is True; allowed is a whole number from 0 to 2147483647"
    assert refused(True, logprobs=2) == "logprobs is 2; allowed is true or false"
    assert refused(True, top_logprobs=2) == "top_logprobs is 2, and logprobs is not true; add it"


def test_an_echo_with_logprobs_asks_for_those_of_the_prompt_too() -> None:
    echoed = options(echo=True, logprobs=1)
    assert echoed.echo and echoed.params.prompt_logprobs == 1
    assert options(echo=True).params.prompt_logprobs is None
    assert "unknown field 'echo'" in refused(True, echo=True)


def test_biases_have_token_ids_as_names() -> None:
    assert options(logit_bias={"5": -100, "17": 1.5}).params.logit_bias == {5: -100, 17: 1.5}
    assert refused(logit_bias={"cat": 1}).startswith("logit_bias is {'cat': 1}; its names are token ids")
    assert refused(logit_bias=[1]).startswith("logit_bias is [1]; allowed is a dict")


def test_what_changes_no_answer_is_let_pass() -> None:
    harmless = {"model": "x", "user": "me", "metadata": {"a": "b"}, "stream": False, "store": False, "tools": []}
    neutral = {"response_format": {"type": "text"}, "tool_choice": "none", "suffix": "", "modalities": ["text"]}
    assert options(**harmless, **neutral).params == DEFAULTS.params


def test_what_a_text_is_held_to_has_the_names_of_openai_and_of_vllm() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    as_openai = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    for is_chat in (False, True):
        asked = options(is_chat, structured_outputs={"json": schema, "regex": None}).params
        assert asked == options(is_chat, response_format=as_openai).params
        assert asked.held_to is not None and json.loads(str(asked.held_to.json)) == schema
        assert list(asked.held_to.schema["properties"]) == ["b", "a"], "in which an answer has them"
        assert options(is_chat, response_format={"type": "json_object"}).params.held_to == StructuredOutputsParams(
            json_object=True
        )
    both = refused(response_format=as_openai, structured_outputs={"choice": ["a"]})
    assert both == "response_format stands beside structured_outputs; give one of them"


def test_what_templates_are_told_is_read() -> None:
    asked = options(True, chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low")
    assert asked.settings == TemplateSettings({"enable_thinking": False}, "low") and asked.params == DEFAULTS.params
    assert refused(True, chat_template_kwargs=5).startswith("chat_template_kwargs is 5; allowed is an object")


def test_a_line_is_held_to_what_it_says_and_not_to_the_defaults() -> None:
    held = Options(SamplingParams(structured_outputs={"choice": ["a", "b"]}))
    assert read_options({}, True, held).params.held_to == StructuredOutputsParams(choice=["a", "b"])
    other = read_options({"response_format": {"type": "json_object"}}, True, held).params.held_to
    assert other == StructuredOutputsParams(json_object=True)
    assert read_options({"response_format": {"type": "text"}}, True, held).params.held_to is None
    assert read_options({"structured_outputs": {"regex": "a"}}, True, held).params.held_to == StructuredOutputsParams(regex="a")


@pytest.mark.parametrize(
    ("name", "wrong", "sound"),
    [
        *((name, 5, "x") for name in ("model", "user", "safety_identifier", "prompt_cache_key")),
        ("reasoning_effort", [], "low"),
        ("parallel_tool_calls", "yes", True),
        ("metadata", {"a": 1}, {}),
        ("metadata", "a", {"a": "b"}),
    ],
)
def test_what_changes_no_answer_has_a_type_all_the_same(name: str, wrong: object, sound: object) -> None:
    for is_chat in (False, True):
        assert options(is_chat, **{name: sound}).params == options(is_chat, **{name: None}).params == DEFAULTS.params
        assert refused(is_chat, **{name: wrong}).startswith(f"{name} is {wrong!r}; allowed is ")


@pytest.mark.parametrize(
    ("name", "wrong", "sound", "words"),
    [
        *(("store", wrong, False, "; nothing is kept; leave it out") for wrong in ("yes", True, 0)),
        *(("service_tier", wrong, "default", "; all requests are alike; leave it out") for wrong in (5, "flex")),
        ("prompt_cache_retention", "for ever", "24h", " is unknown; known: in_memory, in-memory, 24h"),
    ],
)
def test_what_asks_for_more_than_is_done_is_refused(name: str, wrong: object, sound: object, words: str) -> None:
    for is_chat in (False, True):
        assert options(is_chat, **{name: sound}).params == DEFAULTS.params
        assert refused(is_chat, **{name: wrong}).endswith(words) and repr(wrong) in refused(is_chat, **{name: wrong})


def test_how_much_is_said_is_told_to_a_template_that_looks_at_it() -> None:
    asked = {one: options(True, verbosity=one).settings for one in ("low", "medium", "high")}
    assert asked["low"].of("{{ verbosity }}") == {"verbosity": "low"} and asked["medium"].of("{{ messages }}") == {}
    with pytest.raises(ValueError, match="verbosity is 'high', at which the chat template does not look; say it in a message"):
        asked["high"].of("{{ messages }}")
    with pytest.raises(ValueError, match="verbosity is 'low', and chats are not written by a template here"):
        asked["low"].refuse_without_template()
    asked["medium"].refuse_without_template()
    assert "unknown" in refused(True, verbosity="brief") and "unknown field 'verbosity'" in refused(False, verbosity="low")


@pytest.mark.parametrize(("is_chat", "body"), [(True, OfChats), (False, OfPrompts)])
def test_each_official_field_is_known_or_refused(is_chat: bool, body: type) -> None:
    """None is ignored: a value that no field has is refused, wherever it stands."""
    for name in {*body.__annotations__} - {"messages", "prompt", "model"}:
        assert name in refused(is_chat, **{name: {"no": ["such value"]}}), name


def test_what_is_to_be_said_back_is_kept() -> None:
    assert options(metadata={"a": "b"}).metadata == {"a": "b"} and options().metadata is None


@pytest.mark.parametrize(
    "given",
    [{"best_of": 1}, {"best_of": 5, "temperature": 0}, {"best_of": 3, "n": 3}],
)
def test_the_best_of_as_many_as_are_returned_is_let_pass_and_of_greedy_ones(given: dict[str, Any]) -> None:
    without = {name: value for name, value in given.items() if name != "best_of"}
    assert options(**given) == options(**without)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"stream": True}, "stream is True; records come whole; leave it out"),
        ({"stream": 0}, "stream is 0; records come whole; leave it out"),
        ({"tools": [{}]}, "tools[0] is {}; only functions are known, as"),
        ({"tools": [{"type": "function", "function": {"name": "go"}}]}, "tools is [{'function': {'name': 'go'}, 'type': 'fun"),
        ({"chat_template_kwargs": {"a": 1}}, "unknown field 'chat_template_kwargs'"),
        ({"tool_choice": "auto"}, "tool_choice is 'auto', and there are no tools; give tools, or leave it out"),
        ({"best_of": True}, "best_of is True; make n completions"),
        ({"best_of": 0}, "best_of is 0; make n completions"),
        ({"best_of": 3, "n": 2, "temperature": 1}, "best_of is 3; make n completions and choose by cumulative_logprob"),
        ({"response_format": {"type": "xml"}}, "response_format.type 'xml' is unknown; known: text, json_object, json_schema"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex is ''; allowed is a text that is not empty"),
        ({"guided_json": {}}, "unknown field 'guided_json': write structured_outputs={\"json\": ...}"),
        ({"temprature": 1}, "unknown field 'temprature'; did you mean temperature?"),
        ({"max_new_tokens": 1}, "unknown field 'max_new_tokens': it is called max_tokens"),
        ({"id": "a"}, "unknown field 'id': it is called custom_id"),
        ({"wibble": 1, "wobble": 2}, "unknown field 'wibble', and 'wobble'"),
        ({"temperature": "hot"}, "temperature is 'hot'; allowed is a number from 0 to 100; 0 is greedy"),
        ({"stop": ""}, "stop is ''; allowed is a text that is not empty, or a list of such; [] is none"),
        ({"stop": ["a", ""]}, "stop is ['a', '']; allowed is a text that is not empty"),
        ({"best_of": 1, "n": 2, "temperature": 0}, "best_of is 1; make n completions"),
        ({"max_completion_tokens": 0}, "max_completion_tokens is 0, which is for prompts that are only scored"),
        ({"max_completion_tokens": "5"}, "max_completion_tokens is '5'; allowed is a whole number"),
        ({"temperature": 101}, "temperature is 101; allowed is a number from 0 to 100"),
        ({"echo": 1}, "echo is 1; allowed is true or false"),
        ({"return_token_ids": "yes"}, "return_token_ids is 'yes'; allowed is true or false"),
        ({"max_tokens": 0}, "max_tokens is 0, which is for prompts that are only scored; add echo and logprobs"),
        ({"prompt_logprobs": 1}, "unknown field 'prompt_logprobs': add echo and logprobs"),
    ],
)
def test_a_refusal_names_the_field_and_says_what_to_do(given: dict[str, Any], said: str) -> None:
    assert said in refused(**given)


@pytest.mark.parametrize(
    ("is_chat", "given", "fields"),
    [
        (False, {"temperature": -1, "top_p": 0.5, "n": 0, "best_of": "x"}, ["temperature", "n"]),
        (
            False,
            {"max_completion_tokens": -4, "min_tokens": -1, "wibble": 1},
            ["unknown", "max_completion_tokens", "min_tokens"],
        ),
        (False, {"max_tokens": 0, "echo": True, "logprobs": 1, "min_tokens": 0, "user": 3, "stop": [""]}, ["user", "stop"]),
        (True, {"logprobs": True, "top_logprobs": 2, "tools": 3, "tool_choice": "none"}, ["tools"]),
        (True, {"response_format": {"type": "xml"}, "metadata": 1}, ["response_format.type", "metadata"]),
    ],
)
def test_all_is_said_that_is_wrong_with_fields_one_without_the_other(
    is_chat: bool, given: dict[str, Any], fields: list[str]
) -> None:
    said = refused(is_chat, **given).split("; also ")
    assert sorted(one.split(" ")[0] for one in said) == sorted(fields)
