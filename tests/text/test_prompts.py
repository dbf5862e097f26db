"""Prompts in the forms that other programs have them in: each is what it is meant to be, or one line says what to write."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from h2o_flexgen.core.hints import refuse_unknown
from h2o_flexgen.sampling.foreign_options import ARGUMENTS, OPTIONS
from h2o_flexgen.text.dialogue import PlainStyle, Script
from h2o_flexgen.text.prompts import read_chats, read_pair, read_prompts
from h2o_flexgen.text.tokenizer import ByteTokenizer, ChatInput, Tokenizer

TOKENS = ByteTokenizer(300)
AB, C = tuple(TOKENS.encode("ab")), tuple(TOKENS.encode("c"))
PADDED = [[AB[0], AB[1]], [C[0], 0]]
MASK = [[1, 1], [1, 0]]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("ab", [("ab", AB)]),
        (["ab", "c"], [("ab", AB), ("c", C)]),
        (("ab",), [("ab", AB)]),
        ({"prompt": "ab"}, [("ab", AB)]),
        ([{"prompt": "ab"}, {"prompt_token_ids": list(C)}, "c"], [("ab", AB), (None, C), ("c", C)]),
        ({"prompt": "written", "prompt_token_ids": list(C)}, [("written", C)]),
        ({"prompt": "ab", "multi_modal_data": None}, [("ab", AB)]),
        (list(AB), [(None, AB)]),
        (AB, [(None, AB)]),
        ([list(AB), C], [(None, AB), (None, C)]),
        (np.array(AB), [(None, AB)]),
        (np.array([AB, AB]), [(None, AB), (None, AB)]),
        (torch.tensor(AB), [(None, AB)]),
        (torch.tensor([AB]), [(None, AB)]),
        ([torch.tensor(AB), np.array(C, dtype=np.int32)], [(None, AB), (None, C)]),
        ([np.int64(AB[0]), torch.tensor(AB[1])], [(None, AB)]),
        (BatchEncoding({"input_ids": list(AB), "attention_mask": [1, 1]}), [(None, AB)]),
        (BatchEncoding({"input_ids": torch.tensor(PADDED), "attention_mask": torch.tensor(MASK)}), [(None, AB), (None, C)]),
        ({"input_ids": PADDED}, [(None, AB), (None, (C[0], 0))]),
        ([], []),
        ((), []),
        ([[], ""], [(None, ()), ("", ())]),
        (np.zeros((0, 3), dtype=int), []),
    ],
    ids=repr,
)
def test_every_form_is_read_as_the_prompts_that_it_means(given: Any, expected: list[Any]) -> None:
    assert [(prompt.text, prompt.ids) for prompt in read_prompts(given, TOKENS)] == expected


def test_what_is_made_one_by_one_is_read_once() -> None:
    texts = (text for text in ("ab", "c"))
    assert [prompt.text for prompt in read_prompts(texts, TOKENS)] == ["ab", "c"]
    assert read_prompts(iter(AB), TOKENS)[0].ids == AB
    assert [prompt.text for prompt in read_prompts(dict.fromkeys(("ab", "c")).keys(), TOKENS)] == ["ab", "c"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "the prompts are None; a prompt is a text"),
        (3, "the prompts are 3; a prompt"),
        (b"ab", "the prompts are b'ab'; a prompt"),
        ([b"ab"], "prompt 0 is b'ab'; a prompt"),
        (["ab", None], "prompt 1 is None; a prompt"),
        (["ab", 5], "prompt 1 is 5; a prompt"),
        ([[1, "b"]], "prompt 0 has the token id 'b'; token ids are whole numbers"),
        ([[1, 2.5]], r"prompt 0 has the token id 2\.5"),
        ([[True]], "prompt 0 has the token id True"),
        (torch.zeros(1, 2), r"prompt 0 has the token id 0\.0"),
        (np.zeros((1, 2, 3), dtype=int), r"prompt 0 has the token id \[0, 0, 0\]"),
        ({"text": "ab"}, r"the prompt is a dict of \['text'\]; a prompt is"),
        ({"prompt": "ab", "multi_modal_data": {"image": 1}}, "the prompt has multi_modal_data"),
        ([{"role": "user", "content": "ab"}], r"write llm\.chat\(messages\)"),
        ([[{"role": "user", "content": "ab"}]], r"write llm\.chat\(messages\)"),
        ([{"input_ids": PADDED}], "prompt 0 is a batch of 2; give it by itself"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 1]}, r"have \[3\] tokens, and those of attention_mask \[2\]; give"),
        ({"input_ids": PADDED, "attention_mask": [[1, 1]]}, r"have \[2, 2\] tokens, and those of attention_mask \[2\];"),
        ([{"input_ids": [[1] * 9], "attention_mask": [[1] * 10]}], r"have \[9\] tokens, and those of attention_mask \[10\]"),
    ],
    ids=repr,
)
def test_anything_else_is_refused_in_a_line_that_says_what_to_write(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        read_prompts(given, TOKENS)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 250


def test_two_texts_of_a_pair_are_tokens_of_one_text(tokenizer: Tokenizer) -> None:
    before, after = read_pair(0, ("hello", " world"), tokenizer)
    assert [*before, *after] == tokenizer.encode("hello world") and list(before) == tokenizer.encode("hello")
    assert read_pair(0, (AB, np.array(C)), tokenizer) == (AB, C)
    for wrong in ("ab", {"a": 1, "b": 2}, (1,), 5):
        with pytest.raises(ValueError, match="pair 3 is"):
            read_pair(3, wrong, tokenizer)


def test_a_chat_is_one_or_several_and_its_parts_of_text_are_joined() -> None:
    hello, parts = {"role": "user", "content": "hello"}, [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    assert read_chats([hello]) == read_chats(([hello],)) == read_chats([[{"role": "user", "content": parts}]]) == [[hello]]
    assert read_chats(iter([[hello], [hello, hello]])) == [[hello], [hello, hello]] and read_chats([]) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("hello", "the messages are 'hello'; a chat is a list like"),
        (["hello"], "chat 0 is 'hello'; a chat is a list like"),
        ([[]], "chat 0 is empty"),
        ([{"role": "user"}], "message 0 of chat 0 is"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "only text is read"),
    ],
)
def test_what_is_no_chat_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_chats(given)


def test_a_script_of_a_whole_chat_is_what_its_turns_make() -> None:
    system, first, second = ({"role": role, "content": text} for role, text in (("system", "s"), ("user", "a"), ("user", "b")))
    script = Script(TOKENS, "s")
    assert list(script.whole(ChatInput([system, first])).ids) == script.turn("a", None)
    said = {"role": "assistant", "content": "x"}
    assert script.whole(ChatInput([system, first, said, second])).text == "s\n\nUser: a\nAssistant: x\nUser: b\nAssistant:"
    assert PlainStyle(TOKENS).whole(ChatInput([system, first, second])).text == "s\n\nab"
    with pytest.raises(ValueError, match="role 'tool' needs a chat template"):
        script.whole(ChatInput([{"role": "tool", "content": "x"}]))


@pytest.mark.parametrize(
    ("given", "table", "message"),
    [
        (
            "tensor_parallel_size",
            OPTIONS,
            "unknown option 'tensor_parallel_size': no layer is divided among GPUs; write pipeline=",
        ),
        ("quantization", OPTIONS, 'write weight_codec="group4"'),
        ("max_new_tokens", ARGUMENTS, "in SamplingParams: it is called max_tokens"),
        ("temperature", ARGUMENTS, r"write SamplingParams\(temperature=\.\.\.\)"),
        ("slotz", OPTIONS, r"unknown option 'slotz'; did you mean slots\?"),
        ("zzz", ARGUMENTS, "unknown option 'zzz'$"),
    ],
)
def test_names_of_other_engines_are_answered_with_what_to_write_here(given: str, table: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        refuse_unknown("option", ["slots", given], ["slots", "percent"], table)


def test_all_unknown_names_are_answered_at_once() -> None:
    with pytest.raises(ValueError, match=r"unknown option 'seed': .*, and 'slotz'; did you mean slots"):
        refuse_unknown("option", ["seed", "slotz"], ["slots"], OPTIONS)
