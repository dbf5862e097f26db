"""Opening a tokenizer: the one of a model's folder or GGUF file, another one, bytes, or the stand-in for a missing one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, cast

from h2o_flexgen.checkpoints.gguf_format import is_gguf, read_metadata
from h2o_flexgen.checkpoints.model_files import read_object
from h2o_flexgen.core.allowed_values import AUTO, EOS, eos_ids_of
from h2o_flexgen.core.files import read_document
from h2o_flexgen.core.hints import shown
from h2o_flexgen.text.chat_template import render
from h2o_flexgen.text.gguf_tokenizer import library_tokenizer
from h2o_flexgen.text.gguf_vocabulary import KIND, PIECES, RULE, GgufVocabulary, has_tokens
from h2o_flexgen.text.token_pieces import TokenPieces, joins_tokens
from h2o_flexgen.text.tokenizer import BYTES, LACKS_FILES, TOKENIZER_FILES, ByteTokenizer, Message, NoTokenizer, Tokenizer

if TYPE_CHECKING:
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


class HfTokenizer:
    """The tokenizer of a model folder or of a GGUF file, as transformers has it. Code in a folder is never run, and nothing is
    downloaded."""

    reads_texts = True

    def __init__(
        self, place: Path, config: object = None, model: Path | None = None, vocabulary: GgufVocabulary | None = None
    ) -> None:
        """`vocabulary` is what a GGUF file has, and None for a folder. `model` is the model's place if `place` is another one;
        its files say which tokens end texts."""
        self._place = place
        self._tokenizer = _of_folder(place) if vocabulary is None else library_tokenizer(vocabulary)
        self.note = "" if vocabulary is None else _note(vocabulary)
        if vocabulary is not None and model in (None, place):
            self.eos_ids = vocabulary.end_ids
        else:
            self.eos_ids = _eos_ids(model or place, config, self._tokenizer.eos_token_id)

    @property
    def of_transformers(self) -> PreTrainedTokenizerBase:
        """The tokenizer as the library's own class, for users of that library."""
        return self._tokenizer

    def made_again(self, adds_start: bool) -> PreTrainedTokenizerBase:
        """Another of the library's class, which puts the start token before a text or does not, whatever its files say."""
        vocabulary = _vocabulary(self._place)
        if vocabulary is None:
            return _of_folder(self._place, add_bos_token=adds_start)
        return library_tokenizer(vocabulary, adds_start)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, verbose=False)["input_ids"])  # the engine checks the length

    def encode_more(self, text: str) -> list[int]:
        return list(self._tokenizer(text, verbose=False, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Keeps spaces as they are in the tokens: "cleaning up" would change text that is already shown."""
        return cast(str, self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def piece(self, token: int) -> str | None:
        return None if self._pieces is None else self._pieces.of(token)

    @cached_property
    def _pieces(self) -> TokenPieces | None:
        """None where the text of tokens is not that of one after the other."""
        if not joins_tokens(getattr(getattr(self._tokenizer, "backend_tokenizer", None), "decoder", None)):
            return None
        before = self.encode_more("a")[-1:]
        return TokenPieces(self.decode, self._tokenizer.convert_ids_to_tokens, before[0]) if self.decode(before) else None

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self._tokenizer, "chat_template", None))

    def render_chat(self, messages: Sequence[Message]) -> str:
        """Renders without the library, which does not bound a template's work."""
        try:
            return render(self._tokenizer.get_chat_template(), messages, self._tokenizer.special_tokens_map)
        except Exception as error:  # whatever a template raises
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise ValueError(f"the model's chat template refuses this turn ({shown(reason)}); try another --style") from error


def load_tokenizer(model: Path | None, config: object, vocab: int, asked: str | Path = AUTO) -> Tokenizer:
    """Loads the tokenizer `asked` for: AUTO, BYTES or that of another folder or GGUF file. `model` is the model's folder or
    GGUF file, or None for random weights, where no token ends a text. `config`, an object or a mapping, may name the model's
    end of sequence."""
    if asked == BYTES or (model is None and asked == AUTO):
        return ByteTokenizer(vocab, frozenset() if model is None else _eos_ids(model, config, None))
    if isinstance(asked, Path):
        return _other(asked, model, config)
    assert model is not None
    vocabulary = _vocabulary(model)
    if vocabulary is None and not _has_files(model):
        return NoTokenizer(model, _eos_ids(model, config, None), _lacks(model))
    return HfTokenizer(model, config, vocabulary=vocabulary)


def _other(place: Path, model: Path | None, config: object) -> HfTokenizer:
    """The tokenizer of another folder or file than the model's."""
    vocabulary = _vocabulary(place)
    if vocabulary is None and not _has_files(place):
        raise ValueError(f"{place} has no tokenizer ({_lacks(place)}); give a folder or a GGUF file that has, or {BYTES}")
    other = HfTokenizer(place, config, model, vocabulary)
    other.eos_ids = frozenset() if model is None else other.eos_ids
    other.note = f"those of the tokenizer in {place}"
    return other


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


def _note(vocabulary: GgufVocabulary) -> str:
    if vocabulary.kind == PIECES or vocabulary.rule_name:
        return ""
    return f"{vocabulary.path} does not say how texts are cut into words ({RULE}), so llama.cpp's default is taken"


def _vocabulary(place: Path) -> GgufVocabulary | None:
    """The tokens of a GGUF file; None if it has none, or if it is a folder."""
    metadata = read_metadata(place) if is_gguf(place) else None
    return None if metadata is None or not has_tokens(metadata) else GgufVocabulary.of(metadata)


def _eos_ids(model: Path, config: object, of_tokenizer: int | None) -> frozenset[int]:
    """The ids that a GGUF file names, or else the first of generation_config.json, the model's config, the tokenizer."""
    if is_gguf(model):
        vocabulary = _vocabulary(model)
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
