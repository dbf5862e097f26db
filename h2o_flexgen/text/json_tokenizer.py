"""Tokenizers of folders where tokenizer.json says all, by the library `tokenizers` alone: transformers takes seconds to import.

transformers takes that file as it is, or builds a tokenizer anew from its vocabulary, by the class that tokenizer_config.json
names (`tokenizer_classes`). Whatever else a folder says is left to it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from h2o_flexgen.core.files import read_document
from h2o_flexgen.text.tokenizer_classes import (
    ADDED,
    LLAMA,
    ROLES,
    ROLES_OF_LLAMA,
    TAKEN_AS_THEY_ARE,
    said_by_pieces,
    text_of,
    understood,
)
from h2o_flexgen.text.word_tokenizer import WordTokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Rules
    from transformers import PreTrainedTokenizerBase

RULES, PIECES, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja"
OLDER = "special_tokens_map.json"  # which names special tokens where the settings do not list those that were added
LEFT_TO_TRANSFORMERS = ("tekken.json", "added_tokens.json", "additional_chat_templates")  # files
AROUND = ("single_word", "lstrip", "rstrip")  # whether a special token is found, and what of its neighbourhood belongs to it
SEVERAL = ("extra_special_tokens", "additional_special_tokens")  # the first that is said counts


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
    settings, model_type = json.loads(read_document(folder / SETTINGS)), _model_type(folder)
    if (folder / RULES).exists():
        file = read_document(folder / RULES).decode()
    else:  # tokens that settings add are among those of the pieces already
        file, settings = _of_pieces(folder, settings, model_type), {**settings, ADDED: None}
    said = json.loads(file)
    known = understood(said, settings, model_type)
    if known is None:
        return None
    roles = {**known.roles, **{role: text_of(settings[role]) for role in ROLES if role in settings}}
    special = {role: text for role, text in roles.items() if text is not None} | _named(settings)
    unmarked = _unmarked(known.said, settings, special, folder)
    if unmarked is None or (unmarked and not known.is_built):
        return None
    own = folder / TEMPLATE
    template = own.read_text(encoding="utf-8") if own.is_file() else settings.get("chat_template")
    rules = _rules(file if known.said is said else json.dumps(known.said), unmarked)
    return None if template is not None and not isinstance(template, str) else JsonFiles(folder, rules, special, template)


def _of_pieces(folder: Path, settings: Mapping[str, Any], model_type: object) -> str:
    """What tokenizer.json would say of a file of SentencePiece: a vocabulary, around which the class of LLaMA puts its parts.
    Of tokens that take more of a text than themselves it says nothing, where tokenizer.json does."""
    kind = settings["tokenizer_class"].removesuffix("Fast")
    if kind != LLAMA or model_type in TAKEN_AS_THEY_ARE or any(settings.get(key) for key in SEVERAL):
        raise ValueError(f"{RULES} is missing")
    older = folder / OLDER if settings.get(ADDED) is None else None
    named = json.loads(read_document(older)) if older is not None and older.is_file() else {}
    roles = {**ROLES_OF_LLAMA, **{role: own[role] for own in (settings, named) for role in ROLES if role in own}}
    if any(isinstance(token, Mapping) and any(token.get(key) for key in AROUND) for token in roles.values()):
        raise ValueError("a special token takes more of a text than itself")
    texts = {role: text for role, token in roles.items() if (text := text_of(token)) is not None}
    return json.dumps(said_by_pieces(read_document(folder / PIECES), settings, texts))


def _rules(file: str, unmarked: Sequence[Mapping[str, Any]]) -> Rules:
    from tokenizers import AddedToken, Tokenizer

    made = Tokenizer.from_str(file)
    made.no_truncation()
    made.no_padding()
    if unmarked:
        made.add_special_tokens([AddedToken(**{**token, "special": True}) for token in unmarked])
    return made


def _model_type(folder: Path) -> object:
    path = folder / "config.json"
    return json.loads(read_document(path)).get("model_type") if path.is_file() else None


def _unmarked(
    said: Mapping[str, Any], settings: Mapping[str, Any], special: Mapping[str, str], folder: Path
) -> Sequence[Mapping[str, Any]] | None:
    """The tokens with a role that tokenizer.json has, and does not mark as special; None if it lacks some, or if other files
    say something else."""
    added = {str(token["id"]): {key: one for key, one in token.items() if key != "id"} for token in said["added_tokens"]}
    if settings.get(ADDED) not in (None, added) or not _says_the_same(special, folder):
        return None
    found = {token["content"]: token for token in added.values()}
    if not all(token in found and found[token]["special"] for token in _others(settings)):
        return None
    named = [found.get(token) for token in special.values()]
    return None if None in named else [token for token in named if token is not None and not token["special"]]


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
        yield from (text_of(one) or "" for one in (several.values() if isinstance(several, dict) else several))


def _says_the_same(special: Mapping[str, str], folder: Path) -> bool:
    """Whether the file in which older folders name special tokens names these."""
    path = folder / OLDER
    if not path.is_file():
        return True
    named = json.loads(read_document(path))
    said = {key: own for key, own in named.items() if key in ROLES or _is_named(key, own)}
    return not isinstance(named.get(SEVERAL[0]), dict) and all(special.get(key) == text_of(own) for key, own in said.items())
