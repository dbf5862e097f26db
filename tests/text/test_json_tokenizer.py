"""Tokenizers of folders that need no transformers: their tokens are those of that library, which gets what it alone
understands."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Rules
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, GemmaTokenizer, GPT2Tokenizer, GPTNeoXTokenizer, Qwen2Tokenizer
from transformers.models.auto.tokenization_auto import MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS, TOKENIZER_MAPPING_NAMES

from h2o_flexgen.models import MODELS
from h2o_flexgen.models.whole_configs import TEXT_PARTS
from h2o_flexgen.text import tokenizer_classes
from h2o_flexgen.text.json_tokenizer import JsonFiles, JsonTokenizer
from h2o_flexgen.text.load_tokenizer import FolderTokenizer, load_tokenizer
from h2o_flexgen.text.tokenizer import ChatInput
from h2o_flexgen.text.tokenizer_classes import AS_IT_IS, OF_ONE_CLASS, OF_THE_NAMED_CLASS, TAKEN_AS_THEY_ARE
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


def saved_as(kind: str, folder: Path, model_type: str | None = None, **settings: Any) -> None:
    """Pieces of characters with merges, as files of LLaMA have them, and settings that name a class."""
    save_byte_fallback(folder)
    files = [folder / name for name in ("tokenizer.json", "tokenizer_config.json")]
    said, known = (json.loads(file.read_text()) for file in files)
    for left, right in (("▁", "h"), ("h", "e"), ("l", "l"), ("he", "ll"), ("▁he", "ll"), ("▁", "he")):
        said["model"]["merges"].append([left, right])
        said["model"]["vocab"].setdefault(left + right, len(said["model"]["vocab"]))
    settings = {key: value for key, value in {**known, "tokenizer_class": kind, **settings}.items() if value is not None}
    for file, values in zip(files, (said, settings)):
        file.write_text(json.dumps(values))
    if model_type is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))


def marked(token: int, text: str, **more: bool) -> dict[str, dict[str, Any]]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {str(token): {"content": text, **flags, "special": True, **more}}


def save_gemma(folder: Path) -> None:
    """Its class has a token for masks that this file does not mark as special."""
    pieces = [f"<{role}>" for role in ("pad", "eos", "bos", "unk", "mask")] + [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["▁", *map(chr, range(33, 127)), "he", "ll", "hell", "▁hell"]
    vocab = {piece: at for at, piece in enumerate(pieces)}
    GemmaTokenizer(vocab=vocab, merges=[("h", "e"), ("l", "l"), ("he", "ll"), ("▁", "hell")]).save_pretrained(folder)
    file = folder / "tokenizer.json"
    said = json.loads(file.read_text())
    said["added_tokens"] = [{**token, "special": token["content"] != "<mask>"} for token in said["added_tokens"]]
    file.write_text(json.dumps(said))
    settings = folder / "tokenizer_config.json"
    known = {key: value for key, value in json.loads(settings.read_text()).items() if key != "mask_token"}
    settings.write_text(json.dumps(known))


NORMALIZED = {**marked(0, "<unk>"), **marked(1, "<s>", normalized=True), **marked(2, "</s>", normalized=True, lstrip=True)}
SAVED: dict[str, Callable[[Path], None]] = {
    "as it is": save_byte_level,
    "with a template": save_with_template,
    "pieces": save_byte_fallback,
    "gpt2": lambda folder: saved_by(GPT2Tokenizer, folder),
    "qwen2": lambda folder: saved_by(Qwen2Tokenizer, folder),
    "neox": lambda folder: saved_by(GPTNeoXTokenizer, folder),
    "gemma": save_gemma,
    "llama": lambda folder: saved_as("LlamaTokenizer", folder, "llama"),
    "llama, every piece": lambda folder: saved_as("LlamaTokenizerFast", folder, legacy=True, add_prefix_space=True),
    "llama, no space": lambda folder: saved_as("LlamaTokenizer", folder, "llama", add_prefix_space=False),
    "llama, no roles": lambda folder: saved_as("LlamaTokenizer", folder, bos_token=None, eos_token=None, unk_token=None),
    "llama, other marks": lambda folder: saved_as("LlamaTokenizer", folder, "llama", added_tokens_decoder=NORMALIZED),
    "mistral": lambda folder: saved_as("LlamaTokenizer", folder, "mistral", add_prefix_space=True),
    "phi3": lambda folder: saved_as("LlamaTokenizerFast", folder, "phi3", add_bos_token=False),
    "llama of bytes": lambda folder: (save_byte_level(folder), renamed(folder, "LlamaTokenizerFast"))[-1],
}


def renamed(folder: Path, kind: str) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tokenizer_class": kind}))


@pytest.mark.parametrize("kind", SAVED)
def test_texts_and_tokens_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    SAVED[kind](tmp_path)
    ours, theirs = load_tokenizer(tmp_path, None, 400), FolderTokenizer(tmp_path)
    assert isinstance(ours, JsonTokenizer)
    for text in (*TEXTS, *SENTENCES, "it's 1234 <s>x</s> y", "hello</s> hell</s>\nhell <mask>hell<bos>hell", ""):
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
    "no padding": ("qwen2", lambda said, settings: settings.pop("pad_token")),
    "another start": ("neox", lambda said, settings: said.update(post_processor=BEFORE_TEXTS)),
    "a start in a sequence": ("neox", lambda said, settings: said.update(post_processor=AMONG_OTHERS)),
    "a start as of BERT": ("neox", lambda said, settings: said.update(post_processor=OF_BERT)),
    "a token of the class": ("gemma", lambda said, settings: said["added_tokens"].pop()),
    "no pieces": ("gemma", of_model("byte_fallback", False)),
    "another unknown token": ("gemma", of_model("unk_token", "<pad>")),
    "another decoder": ("gemma", lambda said, settings: said.update(decoder={"type": "Fuse"})),
    "no token is added": ("llama", lambda said, settings: settings.update(added_tokens_decoder={})),
    "a model of words": ("llama", of_model("type", "WordLevel")),
    "spaces before bytes": ("llama of bytes", lambda said, settings: settings.update(add_prefix_space=True)),
}
SAYS_PLACES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
BEFORE_TEXTS = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
}

AMONG_OTHERS = {"type": "Sequence", "processors": [SAYS_PLACES, BEFORE_TEXTS]}
OF_BERT = {"type": "BertProcessing", "sep": ["</s>", 1], "cls": ["<s>", 0]}


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


def save_pieces(folder: Path, texts: tuple[str, ...], settings: dict[str, Any]) -> None:
    """A folder with a file of SentencePiece, and none of the library. Some pieces are marked, one is the user's own."""
    pytest.importorskip("google.protobuf")
    proto = import_module("transformers.convert_slow_tokenizer").import_protobuf().ModelProto()
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3, "[INST]": 4, "<mark>": 3, **{f"<0x{byte:02X}>": 6 for byte in range(256)}}
    for place, (text, kind) in enumerate({**kinds, **dict.fromkeys(texts, 1)}.items()):
        proto.pieces.add(piece=text, score=-float(place), type=kind)
    proto.trainer_spec.model_type = 2
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.model").write_bytes(proto.SerializeToString())
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", **settings}))


WORDS = ("aa", "aaa", "he", "ll", "hell", "▁h", "▁he", "▁hell", "lo", "ello", "▁", "é", "日", "日本")
LETTERS = (*map(chr, range(33, 127)), *WORDS)
OF_PIECES: dict[str, dict[str, Any]] = {
    "bare": {},
    "start": {"add_bos_token": True, "legacy": True},
    "both": {"add_bos_token": True, "add_eos_token": True, "add_prefix_space": False, "unk_token": None},
    "listed": {"add_bos_token": True, "added_tokens_decoder": {**marked(1, "<s>", rstrip=True), **marked(3, "[INST]")}},
}


@pytest.mark.parametrize("settings", OF_PIECES)
@pytest.mark.parametrize("older", [{}, {"eos_token": {"content": "</s>", "lstrip": False, "normalized": True}}], ids=str)
def test_files_of_pieces_make_the_tokens_of_transformers(
    settings: str, older: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_pieces(tmp_path, LETTERS, OF_PIECES[settings])
    if older:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(older))
    reader = import_module("transformers.convert_slow_tokenizer")
    monkeypatch.setattr(reader, "requires_backends", lambda *needed: None)  # sentencepiece, of which it uses nothing
    ours, theirs = load_tokenizer(tmp_path, None, 400), FolderTokenizer(tmp_path)
    assert isinstance(ours, JsonTokenizer)
    for text in (*TEXTS, *SENTENCES, "aaaa aaa hello[INST] hello </s> hello<mark>hell <s> hello", ""):
        assert (made := ours.encode(text)) == theirs.encode(text) and ours.encode_more(text) == theirs.encode_more(text)
        assert [ours.decode(made, special) for special in (True, False)] == [
            theirs.decode(made, special) for special in (True, False)
        ]
    assert ours.encode_pair("hello", "hell") == theirs.encode_pair("hello", "hell")
    assert ours.special_tokens == theirs.special_tokens and ours.eos_ids == theirs.eos_ids


def test_files_of_pieces_that_are_broken_or_say_more_are_left_to_transformers(tmp_path: Path) -> None:
    save_pieces(tmp_path, LETTERS, {})
    assert JsonFiles.of(tmp_path) is not None
    whole = (tmp_path / "tokenizer.model").read_bytes()
    (tmp_path / "tokenizer.model").write_bytes(whole[:-1])
    assert JsonFiles.of(tmp_path) is None
    save_pieces(tmp_path, ("a" * 513,), {})
    assert JsonFiles.of(tmp_path) is None
    stripped = {"content": "</s>", "lstrip": True}
    for settings in (
        {"tokenizer_class": "T5Tokenizer"},
        {"pad_token": "<pad>"},
        {"eos_token": stripped},
        {"extra_special_tokens": ["<mark>"]},
    ):
        save_pieces(tmp_path, LETTERS, settings)
        assert JsonFiles.of(tmp_path) is None


@pytest.mark.parametrize("model_type", [None, "llama", *TAKEN_AS_THEY_ARE])
def test_files_of_pieces_are_read_where_transformers_puts_the_parts_of_llama_around_them(
    model_type: str | None, tmp_path: Path
) -> None:
    save_pieces(tmp_path, LETTERS, {})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    files = JsonFiles.of(tmp_path)
    assert (files is not None) == (model_type not in TAKEN_AS_THEY_ARE)
    assert files is None or files.rules.encode("hell é", add_special_tokens=False).tokens == ["▁hell", "▁", "é"]


def test_a_sequence_that_adds_no_tokens_is_read(tmp_path: Path) -> None:
    SAVED["neox"](tmp_path)
    file = tmp_path / "tokenizer.json"
    said = json.loads(file.read_text())
    said["post_processor"] = {"type": "Sequence", "processors": [SAYS_PLACES, said["post_processor"] or SAYS_PLACES]}
    file.write_text(json.dumps(said))
    ours, theirs = load_tokenizer(tmp_path, None, 400), FolderTokenizer(tmp_path)
    assert isinstance(ours, JsonTokenizer) and ours.encode("hello <s>x") == theirs.encode("hello <s>x")


@pytest.mark.parametrize(
    ("kind", "model_type", "is_read"),
    [
        ("as it is", "llama", True),
        ("as it is", "phi3", True),
        ("as it is", "qwen2", False),
        ("qwen2", "qwen3", True),
        ("qwen2", "qwen3_5", False),
        ("llama", "internlm2", False),
        ("neox", "another", False),
    ],
)
def test_models_whose_tokenizers_transformers_changes_are_left_to_it(
    kind: str, model_type: str, is_read: bool, tmp_path: Path
) -> None:
    SAVED[kind](tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert (JsonFiles.of(tmp_path) is not None) == is_read


def test_large_vocabularies_of_mistral_are_left_to_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SAVED["mistral"](tmp_path)
    assert JsonFiles.of(tmp_path) is not None
    monkeypatch.setattr(tokenizer_classes, "LARGE", 100)
    assert JsonFiles.of(tmp_path) is None


KINDS_OF_RELEASE_4 = {**dict.fromkeys(("llama", "mistral", "gemma", "neox"), False), "qwen2": True, "as it is": True}


def test_files_are_left_to_a_release_of_transformers_that_takes_them_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, is_read in KINDS_OF_RELEASE_4.items():
        SAVED[kind](tmp_path / kind)
        monkeypatch.setattr(tokenizer_classes, "version", lambda name: "4.57.1")
        assert (JsonFiles.of(tmp_path / kind) is not None) == is_read
        monkeypatch.undo()


def test_which_class_a_model_has_is_what_transformers_means() -> None:
    names = {kind: (TOKENIZER_MAPPING_NAMES.get(kind) or "").removesuffix("Fast") for kind in (*MODELS, *TEXT_PARTS)}
    taken = {kind for kind, name in names.items() if name in (*AS_IT_IS, "MistralCommonBackend")}
    one = {kind: name for kind, name in names.items() if kind in MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS}
    assert taken == set(TAKEN_AS_THEY_ARE)
    assert {kind: name for kind, name in one.items() if kind not in taken} == OF_ONE_CLASS
    assert not set(OF_THE_NAMED_CLASS).intersection((*taken, *OF_ONE_CLASS)) and names.keys() >= set(OF_THE_NAMED_CLASS)


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
