"""Tokenizers: texts go through them whole, special tokens stay aside, and a broken file is named."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from h2o_flexgen.checkpoints import model_places
from h2o_flexgen.text.load_tokenizer import load_tokenizer
from h2o_flexgen.text.tokenizer import BYTES, TOKENIZER_FILES, ByteTokenizer, ChatInput, Tokenizer
from tests.helpers.real_tokenizers import TEXTS, save_byte_level


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_encoding_and_decoding_gives_the_text_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_put_before_a_prompt_and_not_shown(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    assert tokenizer.encode("hello")[0] == 0
    assert tokenizer.decode([0, *tokenizer.encode("hello"), 1]) == "hello"


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [7, 9]}, {"eos_token_id": 5}, {7, 9}),
        ({"eos_token_id": 0}, None, {0}),
        ({"max_length": 20}, {"eos_token_id": 5}, {5}),
        (None, {"eos_token_id": [5, 6]}, {5, 6}),
        (None, PreTrainedTokenizerFast, {1}),
        (None, None, {1}),
    ],
)
def test_the_ends_of_sequence_come_from_the_first_place_that_names_them(
    tmp_path: Path, generation: dict[str, object] | None, config: object, expected: set[int]
) -> None:
    save_byte_level(tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert load_tokenizer(tmp_path, config, 320).eos_ids == expected


def test_a_folder_without_tokenizer_files_reads_no_text_and_says_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    tokenizer = load_tokenizer(tmp_path, {"eos_token_id": 5}, 300)
    assert tokenizer.eos_ids == {5} and tokenizer.decode([40, 41]) == ""
    for read in (
        tokenizer.encode,
        tokenizer.encode_more,
        lambda text: tokenizer.render_chat(ChatInput([{"role": "user", "content": text}])),
    ):
        with pytest.raises(ValueError, match="has no tokenizer") as caught:
            read("The ferry")
        assert all(part in str(caught.value) for part in (str(tmp_path), *TOKENIZER_FILES, "--tokenizer", "bytes"))


def test_bytes_are_tokens_where_told_so_or_weights_are_random(tmp_path: Path) -> None:
    save_byte_level(tmp_path)
    asked, random = load_tokenizer(tmp_path, {"eos_token_id": 5}, 300, BYTES), load_tokenizer(None, {"eos_token_id": 5}, 300)
    assert isinstance(asked, ByteTokenizer) and asked.eos_ids == {5}
    assert isinstance(random, ByteTokenizer) and random.eos_ids == frozenset(), "random weights never mean an end"


def test_the_tokenizer_of_another_folder_reads_texts_and_the_models_own_files_say_what_ends_them(tmp_path: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    model.mkdir()
    save_byte_level(other)
    tokenizer = load_tokenizer(model, None, 320, other)
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello" and tokenizer.eos_ids == {1} and str(other) in tokenizer.note
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert load_tokenizer(model, None, 320, other).eos_ids == {9}
    assert load_tokenizer(None, None, 320, other).eos_ids == frozenset()
    with pytest.raises(ValueError, match=r"has none of tokenizer\.json"):
        load_tokenizer(other, None, 320, model)


def test_all_tokenizer_files_are_fetched_from_the_hub() -> None:
    fetched = *model_places.TEXTS, *model_places.VOCABULARIES
    assert [name for name in TOKENIZER_FILES if not any(fnmatch(name, one) for one in fetched)] == []


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
def test_a_broken_file_is_named_in_one_line(tmp_path: Path, name: str) -> None:
    save_byte_level(tmp_path)
    (tmp_path / name).write_text('{"cut off')
    with pytest.raises(ValueError, match=str(tmp_path)) as error:
        load_tokenizer(tmp_path, None, 320)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("vocab", [1, 3, 5, 64, 259, 260, 261, 50_272])
def test_bytes_are_total_at_any_vocabulary(vocab: int) -> None:
    tokenizer = ByteTokenizer(vocab)
    ids = tokenizer.encode("".join(map(chr, range(0, 3000, 7))) + "\ud800")
    assert all(0 <= token < vocab for token in ids)
    assert all(isinstance(tokenizer.decode([token]), str) for token in range(0, vocab, max(1, vocab // 500)))


def test_ids_beyond_the_bytes_show_as_numbers() -> None:
    tokenizer = ByteTokenizer(50_272)
    assert tokenizer.decode([*tokenizer.encode("a€"), 31_337, 2]) == "a€<31337>"
