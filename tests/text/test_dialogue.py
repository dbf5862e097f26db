"""Dialogue: what a style puts behind the text, turn by turn, is what it would have written at once."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from h2o_flexgen.sampling.completion import Completion
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.text.dialogue import PlainStyle, Script, Style, Template, choose_style
from h2o_flexgen.text.load_tokenizer import FolderTokenizer
from h2o_flexgen.text.prompts import read_chat
from h2o_flexgen.text.tokenizer import ChatInput, Tokenizer, read_settings
from tests.helpers.real_tokenizers import save_byte_level
from tests.helpers.refusals import one_line
from tests.helpers.tool_templates import HERMES, LLAMA, MISTRAL, TEXT_ARGUMENTS, called, tool

CHATML = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
FORGETS = CHATML.replace("m['content'] | trim", "m['content'].split('</think>')[-1] | trim")
LEAVES_OUT = CHATML.replace("m['content'] | trim", "m['content'] if m['role'] == 'user' else ''")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    save_byte_level(folder)
    return folder


def with_template(folder: Path, template: str) -> FolderTokenizer:
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder / "with")
    return FolderTokenizer(folder / "with")


def reply(text: str, tokenizer: Tokenizer, ends_with: int | None = None, reason: str = "length") -> Completion:
    ids = [*tokenizer.encode_more(text), *([] if ends_with is None else [ends_with])]
    return Completion(0, None, (), text, tuple(ids), None, reason)


def whole(tokenizer: Tokenizer, style: Style, talk: list[tuple[str, Completion]]) -> list[int]:
    """All tokens of a talk: what the style puts and what the model says, in turns."""
    ids, before = list[int](), None
    for turn, said in talk:
        ids += [*style.turn(turn, before), *said.token_ids]
        before = said
    return ids


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("system", ["", "Be brief."])
def test_turns_by_template_are_the_template_of_all_turns(folder: Path, closed: bool, system: str) -> None:
    """Whether the model closed its reply itself, or was cut off."""
    tokenizer = with_template(folder, CHATML)
    [end] = tokenizer.eos_ids
    talk = [
        (turn, reply(said, tokenizer, end if closed else None, "stop" if closed else "length"))
        for turn, said in (("hello world", "the quick fox"), ("jumps?", "over a dog\n\n"), ("then rest", "ok"))
    ]
    style = Template(tokenizer, system)
    messages = [{"role": "system", "content": system}] if system else []
    for turn, said in talk:
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": said.text.rstrip("\n")}]
    expected = tokenizer.render_chat(ChatInput(messages)).removesuffix("<s>assistant\n").removesuffix("\n")
    ids = whole(tokenizer, style, talk)
    text = tokenizer._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert text.replace("\n\n</s>", "</s>") + ("" if closed else "</s>") == expected


def test_a_template_that_rewrites_what_was_said_is_only_asked_for_what_is_new(folder: Path) -> None:
    """Some drop the thoughts of earlier replies, which stand in the cache all the same."""
    tokenizer = with_template(folder, FORGETS)
    said = reply("<think>hm</think> a reply", tokenizer, *tokenizer.eos_ids, "stop")
    assert tokenizer.decode(Template(tokenizer).turn("hello again", said)) == "\nuser\nhello again\nassistant\n"
    with pytest.raises(ValueError, match="leaves out what was replied before; choose the style script or plain"):
        Template(with_template(folder, LEAVES_OUT)).turn("hello again", said)


@pytest.mark.parametrize("turn", ["say \N{REFERENCE MARK}", "\N{REFERENCE MARK}\N{REFERENCE MARK}", "..."])
def test_whatever_is_said_arrives(folder: Path, turn: str) -> None:
    tokenizer = with_template(folder, CHATML)
    ids = Template(tokenizer).turn(turn, reply("yes", tokenizer, *tokenizer.eos_ids, "stop"))
    assert tokenizer.decode(ids) == f"\nuser\n{turn}\nassistant\n"


def test_a_template_that_refuses_is_one_line(folder: Path) -> None:
    tokenizer = with_template(folder, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match=r"refuses this turn .*roles must alternate.*; try another --style"):
        Template(tokenizer).turn("hello", None)


def test_a_script_goes_on_where_the_reply_ended(tokenizer: Tokenizer) -> None:
    style = Script(tokenizer, "Be brief.")
    opening = tokenizer.decode(style.turn("hello world", None))
    assert opening == "Be brief.\n\nUser: hello world\nAssistant:"
    cut = reply(" the fox", tokenizer)
    assert tokenizer.decode(style.turn("hello", cut)).lstrip() == "User: hello\nAssistant:"
    stopped = reply(" the fox\nUser:", tokenizer, reason="stop")  # as the cache has it: with the stop
    assert tokenizer.decode(style.turn("hello", stopped)).lstrip() == "hello\nAssistant:"
    elsewhere = reply(" the fox STOP", tokenizer, reason="stop")
    assert tokenizer.decode(style.turn("hello", elsewhere)).lstrip() == "User: hello\nAssistant:"
    assert style.stops == ("\nUser:",)


def test_plain_turns_are_only_put_behind(tokenizer: Tokenizer) -> None:
    style = PlainStyle(tokenizer, "hello")
    assert style.turn("world", None) == tokenizer.encode("hello\n\nworld")
    assert style.turn(" hello", reply("x", tokenizer)) == tokenizer.encode_more(" hello")


def test_the_style_is_the_models_own_where_it_has_one(folder: Path, tokenizers: dict[str, Tokenizer]) -> None:
    assert isinstance(choose_style("auto", with_template(folder, CHATML)), Template)
    assert isinstance(choose_style("auto", tokenizers["byte_level"]), Script)
    assert isinstance(choose_style("plain", with_template(folder, CHATML)), PlainStyle)
    with pytest.raises(ValueError, match="has no chat template; choose the style script or plain"):
        choose_style("template", tokenizers["bytes"])


def test_another_template_is_rendered_as_the_models_own_would_be(folder: Path) -> None:
    own = with_template(folder, CHATML)
    other = with_template(folder, LEAVES_OUT)
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    chosen = choose_style("auto", other, template=CHATML)
    assert chosen.whole(ChatInput(talk)) == choose_style("template", own).whole(ChatInput(talk))
    for template, style in ((3, "auto"), (CHATML, "script")):
        with pytest.raises(ValueError, match="give a template as text and no style"):
            choose_style(style, own, template=template)  # type: ignore[arg-type]


def chat(*calls: tuple[str, str, str]) -> list[Mapping[str, object]]:
    answers = [{"role": "tool", "tool_call_id": identity, "content": "9"} for identity, _, _ in calls]
    asked = {"role": "assistant", "content": None, "tool_calls": called(*calls)}
    return read_chat("messages", [{"role": "user", "content": "Go."}, asked, *answers])


def rendered(folder: Path, template: str, *calls: tuple[str, str, str], tools: bool = False) -> str:
    style = Template(FolderTokenizer(folder), template=template)
    text = style.whole(ChatInput(chat(*calls), [tool("go")] if tools else [])).text
    assert text is not None
    return text


def test_a_template_is_told_of_tools_and_of_earlier_calls(folder: Path) -> None:
    written = rendered(folder, HERMES, ("call_1", "go", '{"city": "Bö"}'), tools=True)
    assert json.dumps(tool("go")) in written
    assert '<tool_call>\n{"name": "go", "arguments": {"city": "Bö"}}\n</tool_call></s>\n<s>tool\n9</s>' in written
    assert "<tools>" not in rendered(folder, HERMES, ("call_1", "go", "{}"))
    indented = rendered(folder, LLAMA, ("call_1", "go", "{}"), tools=True)
    assert json.dumps(tool("go"), indent=4) in indented and '{"name": "go", "parameters": {}}</s>' in indented


def test_a_template_gets_arguments_as_it_takes_them(folder: Path) -> None:
    assert '<call>{"a": 1}</s>' in rendered(folder, TEXT_ARGUMENTS, ("call_1", "go", '{"a": 1}'))
    refused = one_line(lambda: rendered(folder, LLAMA, ("1", "go", "{}"), ("2", "go", "{}")))
    assert "only supports single tool-calls" in refused


def test_ids_of_calls_are_as_long_as_the_template_wants(folder: Path) -> None:
    mistral = rendered(folder, MISTRAL, ("call_of_another_server", "go", "{}"), ("123456789", "go", "{}"))
    first, second = re.findall(r'"id": "(\w{9})"', mistral)
    assert second == "123456789" != first and f"9 of {first}[/TOOL" in mistral and "9 of 123456789[/TOOL" in mistral


SETS = CHATML + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{{ mood }}"


def test_a_template_is_told_of_settings_that_it_looks_at(folder: Path) -> None:
    style = Template(FolderTokenizer(folder), template=SETS)
    hello: list[Mapping[str, object]] = [{"role": "user", "content": "hello"}]

    def end(given: object, effort: object = None) -> str:
        text = style.asked(hello, SamplingParams(), None, read_settings(given, effort))[0].text
        assert text is not None
        return text.rpartition("assistant\n")[2]

    assert end(None) == end({}) == end({"enable_thinking": True}) == end(None, "high") == ""
    assert end({"enable_thinking": False, "mood": "good"}) == "<think></think>good"
    assert end(None, "none") == "<think></think>" and end({"enable_thinking": True}, "none") == ""
    for given, said in (
        ({"enable_thinkng": 1}, "chat_template_kwargs has 'enable_thinkng', at which the chat template does not look"),
        ({"messages": []}, "chat_template_kwargs has 'messages', which is made of the request itself"),
        ({"a b": 1}, "chat_template_kwargs is {'a b': 1}; allowed is an object with names"),
        ([1], "chat_template_kwargs is [1]; allowed is an object"),
        ({"mood": {1, 2}}, "chat_template_kwargs is {'mood': {1, 2}}; allowed are values of JSON"),
    ):
        assert one_line(lambda given=given: end(given)).startswith(said)  # type: ignore[misc]
    for without in (Script(style.tokenizer), PlainStyle(style.tokenizer)):
        no_template = one_line(lambda style=without: style.asked(hello, SamplingParams(), None, read_settings({"a": 1})))  # type: ignore[misc]
        assert no_template.startswith("chat_template_kwargs is {'a': 1}; chats are not written by a template here")
        prompt, _ = without.asked(hello, SamplingParams(), None, read_settings(None, "low"))
        assert prompt.text == without.whole(ChatInput(hello)).text


def test_a_folder_may_have_a_template_for_tools_alone(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    tokenizer.chat_template = {"default": CHATML, "tool_use": HERMES}
    tokenizer.save_pretrained(folder / "two")
    own = FolderTokenizer(folder / "two")
    style, told = choose_style("template", own), chat(("1", "go", "{}"))
    assert own.chat_template == CHATML and style.form(with_tools=False).calls is None is not style.form(with_tools=True).calls
    assert "<tools>" in str(style.whole(ChatInput(told, [tool("go")])).text) and "<tools>" not in str(
        style.whole(ChatInput(told)).text
    )
