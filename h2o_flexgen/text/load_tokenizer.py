"""Opening a tokenizer: the one of a model's folder or GGUF file, another one, bytes, or the stand-in for a missing one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, cast

from h2o_flexgen.checkpoints.gguf_format import Metadata, is_gguf, read_metadata
from h2o_flexgen.checkpoints.model_files import read_object
from h2o_flexgen.core.allowed_values import AUTO, EOS, eos_ids_of
from h2o_flexgen.core.files import read_document
from h2o_flexgen.core.hints import shown
from h2o_flexgen.text.gguf_tokenizer import END, KIND, GgufTokenizer, GgufVocabulary, has_tokens
from h2o_flexgen.text.json_tokenizer import JsonFiles, JsonTokenizer
from h2o_flexgen.text.tokenizer import BYTES, LACKS_FILES, TOKENIZER_FILES, ByteTokenizer, NoTokenizer, Tokenizer
from h2o_flexgen.text.word_tokenizer import WordTokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Rules
    from transformers import PreTrainedTokenizerBase


FILE = "tokenizer.json"
LARGEST_GROWTH = 256  # times: rules that are meant for texts make them a few times as long
MAY_MATCH_NOTHING = "*?^$|\\{"  # characters of expressions that may match between two characters
ADVICE = "mend it, or get the tokenizer from another place"


def refuse_growth(folder: Path) -> None:
    """Refuses a tokenizer with rules that may make a text very much longer, before it is cut into tokens or after tokens are
    put together. Rules that replace characters work one after the other: each multiplies what those before it have made. A few
    of them fill all memory."""
    path = folder / FILE
    try:
        tokenizer = json.loads(read_document(path))
    except (OSError, ValueError, RecursionError):  # none is there, or the library says what is wrong with it
        return
    if not isinstance(tokenizer, dict):
        return
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        growths = [growth for rule in _rules(tokenizer.get(part)) if (growth := _growth_of(rule)) > 1]
        if (growth := prod(growths)) > LARGEST_GROWTH:
            rules = f"the {len(growths)} rules of its {part} may make a text {shown(round(growth))} times as long"
            raise ValueError(f"{path}: {rules}, and {LARGEST_GROWTH} is the most; {ADVICE}")


def _rules(part: object) -> Iterator[Mapping[str, object]]:
    """The rules of a part in their order, those of sequences in sequences too."""
    open_parts = [part]
    while open_parts:
        part = open_parts.pop()
        if isinstance(part, list):
            open_parts.extend(reversed(part))
        elif isinstance(part, dict):
            yield part
            open_parts.extend(inner for inner in part.values() if isinstance(inner, list))


def _growth_of(rule: Mapping[str, object]) -> float:
    """How many times as long a rule may make a text, about."""
    pattern, content = rule.get("pattern"), rule.get("content")
    if rule.get("type") != "Replace" or not isinstance(pattern, dict) or not isinstance(content, str):
        return 1.0  # the library refuses what it does not understand
    string, expression = pattern.get("String"), pattern.get("Regex")
    if isinstance(string, str) and string:
        return max(1.0, len(content.encode()) / len(string.encode()))
    stays = not isinstance(expression, str) or any(mark in expression for mark in MAY_MATCH_NOTHING)
    return max(1.0, float(len(content.encode()) + stays))


class FolderTokenizer(WordTokenizer):
    """The tokenizer of a model folder, as transformers has it. Code in a folder is never run, and nothing is downloaded."""

    def __init__(self, folder: Path, config: object = None, model: Path | None = None) -> None:
        """`model` is the model's place if the folder is another one; its files say which tokens end texts."""
        self._folder = folder
        self._tokenizer = _of_folder(folder)
        self.note = ""
        self.eos_ids = _eos_ids(model or folder, config, self._tokenizer.eos_token_id)

    @property
    def of_transformers(self) -> PreTrainedTokenizerBase:
        return self._tokenizer

    def made_again(self, adds_start: bool) -> PreTrainedTokenizerBase:
        return _of_folder(self._folder, add_bos_token=adds_start)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, verbose=False)["input_ids"])  # the engine checks the length

    def encode_more(self, text: str) -> list[int]:
        return list(self._tokenizer(text, verbose=False, add_special_tokens=False)["input_ids"])

    def encode_pair(self, first: str, second: str) -> list[int]:
        return list(self._tokenizer(first, second, verbose=False)["input_ids"])

    def decode(self, ids: Sequence[int], with_special: bool = False) -> str:
        decode = self._tokenizer.decode
        return cast(str, decode(list(ids), skip_special_tokens=not with_special, clean_up_tokenization_spaces=False))

    def name_of(self, token: int) -> object:
        return self._tokenizer.convert_ids_to_tokens(token)

    @property
    def rules(self) -> Rules | None:
        return getattr(self._tokenizer, "backend_tokenizer", None)

    @property
    def chat_template(self) -> str | None:
        return self.template_for(with_tools=False)

    def template_for(self, with_tools: bool) -> str | None:
        if not getattr(self._tokenizer, "chat_template", None):
            return None
        return self._tokenizer.get_chat_template(tools=[] if with_tools else None)

    @property
    def special_tokens(self) -> Mapping[str, object]:
        return cast("Mapping[str, object]", self._tokenizer.special_tokens_map)


def load_tokenizer(
    model: Path | None, config: object, vocab: int, asked: str | Path = AUTO, said: Metadata | None = None
) -> Tokenizer:
    """Loads the tokenizer `asked` for: AUTO, BYTES or that of another folder or GGUF file. `model` is the model's folder or
    GGUF file, or None for random weights, where no token ends a text. `config`, an object or a mapping, may name the model's
    end of sequence. `said` is what the model's GGUF file says, if that has been read already."""
    if isinstance(asked, Path):
        return _other(asked, model, config, said)
    if model is None:
        return ByteTokenizer(vocab)
    if asked == BYTES:
        return ByteTokenizer(vocab, _eos_ids(model, config, None, said))
    vocabulary = _vocabulary(model, said)
    if vocabulary is not None:
        return GgufTokenizer(vocabulary)
    if not _has_files(model):
        return NoTokenizer(model, _eos_ids(model, config, None, said), _lacks(model))
    return _folder_tokenizer(model, config, model)


def _other(place: Path, model: Path | None, config: object, said: Metadata | None) -> WordTokenizer:
    """The tokenizer of another folder or file than the model's. The model's own files say which tokens end texts."""
    vocabulary = _vocabulary(place)
    if vocabulary is None and not _has_files(place):
        raise ValueError(f"{place} has no tokenizer ({_lacks(place)}); give a folder or a GGUF file that has, or {BYTES}")
    other = _folder_tokenizer(place, config, model or place) if vocabulary is None else GgufTokenizer(vocabulary)
    if vocabulary is not None and model is not None:
        other.eos_ids = _eos_ids(model, config, vocabulary.ids.get(END), said)
    other.eos_ids = frozenset() if model is None else other.eos_ids
    other.note = f"those of the tokenizer in {place}"
    return other


def _folder_tokenizer(folder: Path, config: object, model: Path) -> WordTokenizer:
    """The tokenizer of a folder, without transformers where its files say all. Those of the model say what ends texts."""
    refuse_growth(folder)
    files = JsonFiles.of(folder)
    if files is None:
        return FolderTokenizer(folder, config, model)
    return JsonTokenizer(files, _eos_ids(model, config, files.end_id), partial(_of_folder, folder))


def _has_files(place: Path) -> bool:
    return any((place / name).is_file() for name in TOKENIZER_FILES)


def _lacks(place: Path) -> str:
    return f"it does not say {KIND}" if is_gguf(place) else LACKS_FILES


def _of_folder(folder: Path, **changes: bool) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer  # takes seconds to import

    refuse_growth(folder)
    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True, **changes)
    except Exception as error:  # whatever a broken file makes the library raise
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"the tokenizer in {folder} cannot be read ({reason}); mend or remove its files") from error


def _vocabulary(place: Path, said: Metadata | None = None) -> GgufVocabulary | None:
    """The tokens of a GGUF file; None if it has none, or if it is a folder. `said`: what the file says, where that is known."""
    if not is_gguf(place):
        return None
    metadata = said or read_metadata(place)
    return GgufVocabulary.of(metadata) if has_tokens(metadata) else None


def _eos_ids(model: Path, config: object, of_tokenizer: int | None, said: Metadata | None = None) -> frozenset[int]:
    """The ids that a GGUF file names, or else the first of generation_config.json, the model's config, the tokenizer."""
    if is_gguf(model):
        vocabulary = _vocabulary(model, said)
        return frozenset() if vocabulary is None else vocabulary.end_ids
    of_config = config.get(EOS) if isinstance(config, Mapping) else getattr(config, EOS, None)
    path = model / "generation_config.json"
    of_generation = read_object(path, "mend or remove it").get(EOS) if path.is_file() else None
    for where, given in ((path, of_generation), (model / "config.json", of_config), (model, of_tokenizer)):
        if given is not None:
            try:
                return eos_ids_of(given)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
    return frozenset()
