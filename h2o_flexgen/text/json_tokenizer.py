"""Tokenizers of folders where tokenizer.json says all, by the library `tokenizers` alone: transformers takes seconds to import.

transformers takes that file as it is, or builds a tokenizer anew from its vocabulary, by the class that tokenizer_config.json
names. Both give the same tokens if the file has the parts that the class has. Whatever else a folder says is left to it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from h2o_flexgen.core.files import read_document
from h2o_flexgen.text.gguf_tokenizer import QWEN2
from h2o_flexgen.text.word_tokenizer import WordTokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Rules
    from transformers import PreTrainedTokenizerBase

RULES, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
LEFT_TO_TRANSFORMERS = ("tekken.json", "added_tokens.json", "additional_chat_templates")  # files
SETTINGS_LEFT = ("auto_map", "fix_mistral_regex", "split_special_tokens", "add_prefix_space", "model_specific_special_tokens")
ROLES = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
HAVE_TO_BE_SAID = ROLES[:3]  # otherwise a class has a token of its own there
SEVERAL = ("extra_special_tokens", "additional_special_tokens")  # the first that is said counts
AS_IT_IS = ("PreTrainedTokenizer", "TokenizersBackend")
# Models with tokenizers that transformers changes, whatever class their files name, and those that have one class always.
CHANGED: Mapping[str, str] = {
    "qwen2": "Qwen2Tokenizer",
    **dict.fromkeys(("ernie4_5", "ernie4_5_moe", "minimax_m2", "phi3", "mistral", "mixtral", "ministral", "ministral3"), ""),
}
SUFFIXES = "end_of_word_suffix", "continuing_subword_prefix"
OF_MODELS = ("dropout", "unk_token", "fuse_unk", "byte_fallback", "ignore_merges", *SUFFIXES)  # set where no class makes it


class BuiltParts(NamedTuple):
    """What a class has around its vocabulary, in the words of tokenizer.json."""

    normalizer: object
    pre_tokenizer: object


def _of_bytes(finds_words: bool) -> dict[str, object]:
    return {"type": "ByteLevel", "add_prefix_space": False, "use_regex": finds_words}


CUT = {"type": "Split", "pattern": {"Regex": QWEN2}, "behavior": "Isolated", "invert": False}
BUILT_ANEW: Mapping[str, BuiltParts] = {
    "GPT2Tokenizer": BuiltParts(None, _of_bytes(finds_words=True)),
    "Qwen2Tokenizer": BuiltParts({"type": "NFC"}, {"type": "Sequence", "pretokenizers": [CUT, _of_bytes(finds_words=False)]}),
}


@dataclass(frozen=True)
class JsonFiles:
    """What the files of a tokenizer say."""

    folder: Path
    rules: Rules
    special: Mapping[str, str]  # tokens by the names of their roles, and others that have names
    template: str | None

    @classmethod
    def of(cls, folder: Path) -> JsonFiles | None:
        """None: transformers has to read them, or says what is wrong with them."""
        try:
            return _read(folder)
        except Exception:  # whatever a broken file makes a reader or the library raise
            return None

    @property
    def end_id(self) -> int | None:
        end = self.special.get("eos_token")
        return None if end is None else self.rules.token_to_id(end)


class JsonTokenizer(WordTokenizer):
    """The tokenizer of a folder. transformers is imported only for its users."""

    def __init__(
        self, files: JsonFiles, eos_ids: frozenset[int], in_transformers: Callable[..., PreTrainedTokenizerBase]
    ) -> None:
        """`in_transformers` opens the same folder there."""
        self._files, self._in_transformers = files, in_transformers
        self.eos_ids, self.note = eos_ids, ""

    @cached_property
    def of_transformers(self) -> PreTrainedTokenizerBase:
        return self._in_transformers()

    def made_again(self, adds_start: bool) -> PreTrainedTokenizerBase:
        return self._in_transformers(add_bos_token=adds_start)

    def encode(self, text: str) -> list[int]:
        return list(self._files.rules.encode(text).ids)

    def encode_more(self, text: str) -> list[int]:
        return list(self._files.rules.encode(text, add_special_tokens=False).ids)

    def encode_pair(self, first: str, second: str) -> list[int]:
        return list(self._files.rules.encode(first, second).ids)

    def decode(self, ids: Sequence[int], with_special: bool = False) -> str:
        return str(self._files.rules.decode(list(ids), skip_special_tokens=not with_special))

    def name_of(self, token: int) -> object:
        return self._files.rules.id_to_token(token)

    @property
    def rules(self) -> Rules:
        return self._files.rules

    @property
    def chat_template(self) -> str | None:
        return self._files.template

    @property
    def special_tokens(self) -> Mapping[str, object]:
        return self._files.special


# -- whether the files say all -------------------------------------------------------------------------------------------------


def _read(folder: Path) -> JsonFiles | None:
    if any((folder / name).exists() for name in LEFT_TO_TRANSFORMERS):
        return None
    rules_read = read_document(folder / RULES)
    said, settings = json.loads(rules_read), json.loads(read_document(folder / SETTINGS))
    special = {role: text for role in ROLES if (text := _text_of(settings.get(role))) is not None} | _named(settings)
    if not (_is_understood(said, settings, _model_type(folder)) and _are_there(said, settings, special, folder)):
        return None
    from tokenizers import Tokenizer

    rules = Tokenizer.from_str(rules_read.decode())
    rules.no_truncation()
    rules.no_padding()
    own = folder / TEMPLATE
    template = own.read_text(encoding="utf-8") if own.is_file() else settings.get("chat_template")
    return None if template is not None and not isinstance(template, str) else JsonFiles(folder, rules, special, template)


def _model_type(folder: Path) -> object:
    path = folder / "config.json"
    return json.loads(read_document(path)).get("model_type") if path.is_file() else None


def _is_understood(said: Mapping[str, Any], settings: Mapping[str, Any], model_type: object) -> bool:
    """Whether transformers would take tokenizer.json as it is, or build the same from it."""
    if any(settings.get(key) for key in SETTINGS_LEFT):
        return False
    kind = settings["tokenizer_class"].removesuffix("Fast")
    if isinstance(model_type, str) and CHANGED.get(model_type, kind) != kind:
        return False
    return kind in AS_IT_IS or (kind in BUILT_ANEW and _is_as_built(said, settings, BUILT_ANEW[kind]))


def _is_as_built(said: Mapping[str, Any], settings: Mapping[str, Any], parts: BuiltParts) -> bool:
    model = said["model"]
    if (
        model["type"] != "BPE"
        or any(model.get(key) for key in OF_MODELS)
        or any(role not in settings for role in HAVE_TO_BE_SAID)
    ):
        return False
    found = BuiltParts(_bare(said["normalizer"]), _bare(said["pre_tokenizer"]))
    return found == parts and said["decoder"]["type"] == "ByteLevel"


def _bare(part: object) -> object:
    """A part without what says nothing of its tokens."""
    if isinstance(part, list):
        return [_bare(one) for one in part]
    return {key: _bare(one) for key, one in part.items() if key != "trim_offsets"} if isinstance(part, dict) else part


def _are_there(said: Mapping[str, Any], settings: Mapping[str, Any], special: Mapping[str, str], folder: Path) -> bool:
    """Whether all tokens that settings name are in tokenizer.json already, as what they are to be."""
    added = {str(token["id"]): {key: one for key, one in token.items() if key != "id"} for token in said["added_tokens"]}
    if settings.get("added_tokens_decoder", added) != added:
        return False
    marked = {token["content"] for token in added.values() if token["special"]}
    return marked.issuperset(special.values()) and marked.issuperset(_others(settings)) and _says_the_same(special, folder)


def _named(settings: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens that have names of their own, as those of pictures have. transformers reads those that are no texts."""
    several = next((own for key in SEVERAL if (own := settings.get(key))), ())
    named = {key: own for key, own in settings.items() if _is_named(key, own) and key not in ROLES}
    named |= several if isinstance(several, dict) else {}
    if strange := [key for key, own in named.items() if not isinstance(own, str)]:
        raise TypeError(f"{strange[0]} is no text")
    return named


def _is_named(key: str, own: object) -> bool:
    return key.endswith("_token") and isinstance(own, (str, dict))


def _others(settings: Mapping[str, Any]) -> Iterator[str]:
    """Special tokens that stand in a list."""
    for key in SEVERAL:
        several = settings.get(key) or ()
        yield from (_text_of(one) or "" for one in (several.values() if isinstance(several, dict) else several))


def _says_the_same(special: Mapping[str, str], folder: Path) -> bool:
    """Whether the file in which older folders name special tokens names these."""
    path = folder / "special_tokens_map.json"
    if not path.is_file():
        return True
    named = json.loads(read_document(path))
    said = {key: own for key, own in named.items() if key in ROLES or _is_named(key, own)}
    return not isinstance(named.get(SEVERAL[0]), dict) and all(special.get(key) == _text_of(own) for key, own in said.items())


def _text_of(token: object) -> str | None:
    """Tokens are texts, or have one among what else is said of them."""
    if isinstance(token, Mapping):
        return str(token["content"])
    return None if token is None else str(token)
