"""Tokenizers of folders that need no transformers: their tokens are those of that library, which gets what it alone
understands."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Rules
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, GPT2Tokenizer, Qwen2Tokenizer

from h2o_flexgen.text.json_tokenizer import JsonFiles, JsonTokenizer
from h2o_flexgen.text.load_tokenizer import FolderTokenizer, load_tokenizer
from h2o_flexgen.text.tokenizer import ChatInput
from tests.helpers.real_tokenizers import SENTENCES, TEXTS, VOCABS, save_byte_fallback, save_byte_level
from tests.helpers.tiny import save_tiny

TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"
ROLES = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "</s>")
Change = Callable[[dict[str, Any], dict[str, Any]], object]  # of tokenizer.json, and of tokenizer_config.json


def save_with_template(folder: Path) -> None:
    save_byte_level(folder)
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def saved_by(kind: type[Any], folder: Path) -> None:
    """One that transformers builds anew."""
    save_byte_level(folder)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    vocab, merges = model["vocab"], [tuple(merge) for merge in model["merges"]]
    (folder / "tokenizer.json").unlink()
    kind(vocab=vocab, merges=merges, **ROLES).save_pretrained(folder)


SAVED: dict[str, Callable[[Path], None]] = {
    "as it is": save_byte_level,
    "with a template": save_with_template,
    "pieces": save_byte_fallback,
    "gpt2": lambda folder: saved_by(GPT2Tokenizer, folder),
    "qwen2": lambda folder: saved_by(Qwen2Tokenizer, folder),
}


@pytest.mark.parametrize("kind", SAVED)
def test_texts_and_tokens_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    SAVED[kind](tmp_path)
    ours, theirs = load_tokenizer(tmp_path, None, 400), FolderTokenizer(tmp_path)
    assert isinstance(ours, JsonTokenizer)
    for text in (*TEXTS, *SENTENCES, "it's 1234 <s>x</s> y", ""):
        assert (made := ours.encode(text)) == theirs.encode(text) and ours.encode_more(text) == theirs.encode_more(text)
        assert [ours.decode(made, special) for special in (True, False)] == [
            theirs.decode(made, special) for special in (True, False)
        ]
        assert [*map(ours.name_of, made)] == [*map(theirs.name_of, made)]
    assert ours.special_tokens == theirs.special_tokens and ours.eos_ids == theirs.eos_ids != frozenset()
    assert ours.template_for(True) == theirs.template_for(True) and ours.chat_template == theirs.chat_template
    assert ours.of_transformers.get_vocab() == theirs.of_transformers.get_vocab()


NAMED: tuple[dict[str, Any], ...] = (
    {"extra_special_tokens": {"image_token": "<s>", "end_of_turn": "</s>"}},
    {"additional_special_tokens": {"image_token": "<s>"}},
    {"image_token": "<s>", "add_bos_token": True, "extra_special_tokens": {"eot_token": "</s>"}},
)


@pytest.mark.parametrize("named", NAMED)
def test_chat_templates_may_name_special_tokens_that_have_no_role(named: dict[str, Any], tmp_path: Path) -> None:
    save_byte_level(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    template = "{{ image_token }}|{{ eot_token }}|{{ end_of_turn }}|{{ bos_token }}"
    file.write_text(json.dumps({**json.loads(file.read_text()), **named, "chat_template": template}))
    ours, theirs = load_tokenizer(tmp_path, None, 400), FolderTokenizer(tmp_path)
    assert isinstance(ours, JsonTokenizer) and ours.special_tokens == theirs.special_tokens
    chat = ChatInput([{"role": "user", "content": "x"}])
    assert ours.render_chat(chat) == theirs.render_chat(chat) and ours.render_chat(chat).startswith("<s>|")


def test_pairs_have_the_special_tokens_that_the_files_put_between_and_behind_them(tmp_path: Path) -> None:
    save_byte_level(tmp_path)
    rules = Rules.from_file(str(tmp_path / "tokenizer.json"))
    start, end = ((text, rules.token_to_id(text)) for text in ("<s>", "</s>"))
    pair = "<s> $A </s> <s>:1 $B:1 </s>:1"
    rules.post_processor = TemplateProcessing(single="<s> $A </s>", pair=pair, special_tokens=[start, end])
    rules.save(str(tmp_path / "tokenizer.json"))
    ours, theirs = load_tokenizer(tmp_path, None, 400), FolderTokenizer(tmp_path)
    assert isinstance(ours, JsonTokenizer)
    made = ours.encode_pair("When?", "At nine.")
    before, after = ours.encode("When?"), ours.encode("At nine.")
    assert made == theirs.encode_pair("When?", "At nine.") == [*before, *after]
    assert [made[place] for place in (0, len(before) - 1, len(before), -1)] == [start[1], end[1]] * 2


def of_model(key: str, value: object) -> Change:
    return lambda said, settings: said["model"].update({key: value})


CHANGES: dict[str, tuple[str, Change]] = {
    "no class": ("as it is", lambda said, settings: settings.pop("tokenizer_class")),
    "a class that is not known": ("as it is", lambda said, settings: settings.update(tokenizer_class="BertTokenizer")),
    "code of its own": ("as it is", lambda said, settings: settings.update(auto_map={"AutoTokenizer": ["a", "b"]})),
    "spaces": ("as it is", lambda said, settings: settings.update(add_prefix_space=True)),
    "a token that is nowhere": ("as it is", lambda said, settings: settings.update(pad_token="<pad>")),
    "a token that is not marked": ("as it is", lambda said, settings: said["added_tokens"][1].update(special=False)),
    "another token": ("as it is", lambda said, settings: settings.update(extra_special_tokens=["<tool>"])),
    "a named token that is nowhere": ("as it is", lambda said, settings: settings.update(image_token="<image>")),
    "a named token that is no text": ("as it is", lambda said, settings: settings.update(image_token={"content": "<s>"})),
    "marked otherwise": (
        "as it is",
        lambda said, settings: settings.update(added_tokens_decoder={"0": {**said["added_tokens"][0], "lstrip": True}}),
    ),
    "several templates": ("as it is", lambda said, settings: settings.update(chat_template=[{"name": "a", "template": "b"}])),
    "other words": ("gpt2", lambda said, settings: said.update(pre_tokenizer={"type": "Digits", "individual_digits": True})),
    "another class's words": ("qwen2", lambda said, settings: settings.update(tokenizer_class="GPT2Tokenizer")),
    "a normalizer": ("gpt2", lambda said, settings: said.update(normalizer={"type": "NFC"})),
    "words as they are": ("qwen2", of_model("ignore_merges", True)),
    "no role": ("gpt2", lambda said, settings: settings.pop("unk_token")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_transformers_alone_understands_is_left_to_it(change: str, tmp_path: Path) -> None:
    kind, harm = CHANGES[change]
    SAVED[kind](tmp_path)
    files = [tmp_path / name for name in ("tokenizer.json", "tokenizer_config.json")]
    said, settings = (json.loads(file.read_text()) for file in files)
    assert JsonFiles.of(tmp_path) is not None
    harm(said, settings)
    for file, values in zip(files, (said, settings)):
        file.write_text(json.dumps(values))
    assert JsonFiles.of(tmp_path) is None


@pytest.mark.parametrize(("model_type", "is_read"), [("llama", True), ("phi3", False), ("qwen2", False)])
def test_models_whose_tokenizers_transformers_changes_are_left_to_it(model_type: str, is_read: bool, tmp_path: Path) -> None:
    save_byte_level(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert (JsonFiles.of(tmp_path) is not None) == is_read


def test_older_folders_name_special_tokens_in_a_file_of_its_own(tmp_path: Path) -> None:
    save_byte_level(tmp_path)
    named = tmp_path / "special_tokens_map.json"
    named.write_text(json.dumps({"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>"}))
    assert JsonFiles.of(tmp_path) is not None
    for other in ({"eos_token": "<s>"}, {"image_token": "<s>"}, {"extra_special_tokens": {"image_token": "<s>"}}):
        named.write_text(json.dumps(other))
        assert JsonFiles.of(tmp_path) is None


def test_texts_are_neither_cut_off_nor_filled_up(tmp_path: Path) -> None:
    save_byte_level(tmp_path)
    rules = Rules.from_file(str(tmp_path / "tokenizer.json"))
    rules.enable_truncation(2)
    rules.enable_padding(length=9)
    rules.save(str(tmp_path / "tokenizer.json"))
    files = JsonFiles.of(tmp_path)
    assert files is not None and len(files.rules.encode("hello world").ids) not in (2, 9)


def test_a_folder_that_says_all_answers_without_transformers(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_tiny("llama-gqa", folder, vocab_size=VOCABS["byte_level"])
    save_byte_level(folder)
    code = (
        "import sys\nfrom h2o_flexgen import LLM, SamplingParams\n"
        f"with LLM({str(folder)!r}, offload_dir={str(tmp_path / 'offload')!r}) as llm:\n"
        "    print(len(llm.generate(['hello'], SamplingParams(max_tokens=2))))\n"
        "print([name for name in sys.modules if name.partition('.')[0] == 'transformers'])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout.split("\n")[:2] == ["1", "[]"], run.stderr
