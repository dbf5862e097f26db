"""Tokenizers: the one in a model's folder, bytes as tokens on request, and a stand-in for a missing one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from h2o_flexgen.core.hints import shown
from h2o_flexgen.models.config_values import EOS, eos_ids_of
from h2o_flexgen.models.json_file import read_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AUTO, BYTES = "auto", "bytes"  # the model's own tokenizer, or a token per byte
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


Message = Mapping[str, str]  # role ("system", "user", "assistant") and content


class Tokenizer(Protocol):
    @property
    def eos_ids(self) -> frozenset[int]:
        """The tokens that end a row."""

    @property
    def reads_texts(self) -> bool:
        """True if texts can be encoded, and token ids shown as text."""

    @property
    def note(self) -> str:
        """What reports say of it; nothing for the model's own tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Encodes a text with the special tokens that the model expects around a prompt."""

    def encode_more(self, text: str) -> list[int]:
        """Encodes text that continues other text: no special tokens but those written in it."""

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes tokens, without special ones."""

    @property
    def has_chat_template(self) -> bool: ...

    def render_chat(self, messages: Sequence[Message]) -> str:
        """The messages in the model's chat template, up to where its answer begins; special tokens are written out."""


class HfTokenizer:
    """The tokenizer of a model folder. Code in the folder is never run, and nothing is downloaded."""

    reads_texts = True
    note = ""

    def __init__(self, folder: Path, config: object = None, model_folder: Path | None = None) -> None:
        """`model_folder` is the model's if `folder` is another one; its files say which tokens end texts."""
        from transformers import AutoTokenizer  # takes seconds to import

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        except Exception as error:  # whatever a broken file makes the library raise
            reason = str(error).strip().partition("\n")[0]
            raise ValueError(f"the tokenizer in {folder} cannot be read ({reason}); mend or remove its files") from error
        self.eos_ids = _eos_ids(model_folder or folder, config, self._tokenizer.eos_token_id)

    @property
    def of_transformers(self) -> PreTrainedTokenizerBase:
        """The tokenizer as the library's own class, for users of that library."""
        return self._tokenizer

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, verbose=False)["input_ids"])  # the engine checks the length

    def encode_more(self, text: str) -> list[int]:
        return list(self._tokenizer(text, verbose=False, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Keeps spaces as they are in the tokens: "cleaning up" would change text that is already shown."""
        return cast(str, self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self._tokenizer, "chat_template", None))

    def render_chat(self, messages: Sequence[Message]) -> str:
        """Renders without the library, which does not bound a template's work."""
        from h2o_flexgen.text.chat_template import render  # needed by chats alone

        try:
            return render(self._tokenizer.get_chat_template(), messages, self._tokenizer.special_tokens_map)
        except Exception as error:  # whatever a template raises
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise ValueError(f"the model's chat template refuses this turn ({shown(reason)}); try another --style") from error


class ByteTokenizer:
    """A token per byte, for random weights and for models trained this way. Every text can be encoded and every id decoded,
    with any vocabulary; ids that stand for no byte show as numbers."""

    SPECIALS = 4  # ids 0 to 3 have a meaning in most vocabularies
    has_chat_template = False
    reads_texts = True
    note = "every byte is a token"

    def __init__(self, vocab: int, eos_ids: frozenset[int] = frozenset()) -> None:
        self.eos_ids = eos_ids
        self._first = self.SPECIALS if vocab > self.SPECIALS else 0
        self._values = vocab - self._first

    def encode(self, text: str) -> list[int]:
        return [self._first + byte % self._values for byte in text.encode("utf-8", errors="replace")]

    def encode_more(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self._bytes_of, ids)).decode("utf-8", errors="replace")

    def render_chat(self, messages: Sequence[Message]) -> str:
        raise ValueError("bytes have no chat template")

    def _bytes_of(self, token: int) -> bytes:
        byte = token - self._first
        if byte < 0:
            return b""
        return bytes((byte,)) if byte < 256 else f"<{token}>".encode()


class NoTokenizer:
    """Stands in for a missing tokenizer: token ids go in and come out, their text is empty, and texts are refused."""

    has_chat_template = False
    reads_texts = False

    def __init__(self, folder: Path, eos_ids: frozenset[int] = frozenset()) -> None:
        self.eos_ids = eos_ids
        self.note = f"none: {folder} has no tokenizer, so prompts and outputs are token ids"
        self.missing = (
            f"{folder} has no tokenizer (looked for {', '.join(TOKENIZER_FILES)}); put its files there, or give token ids, "
            f"or choose a tokenizer (--tokenizer, in Python tokenizer=): {BYTES}, or the folder of another"
        )

    def encode(self, text: str) -> list[int]:
        raise ValueError(f"a text cannot be read: {self.missing}")

    def encode_more(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return ""

    def render_chat(self, messages: Sequence[Message]) -> str:
        raise ValueError(f"a chat cannot be written down: {self.missing}")


def load_tokenizer(folder: Path | None, config: object, vocab: int, asked: str | Path = AUTO) -> Tokenizer:
    """Loads the tokenizer `asked` for: AUTO, BYTES or another tokenizer's folder. `folder` is the model's, or None for random
    weights, whose tokens never end a text. `config`, an object or a mapping, may name the model's end of sequence."""
    if asked == BYTES or (folder is None and asked == AUTO):
        return ByteTokenizer(vocab, frozenset() if folder is None else _eos_ids(folder, config, None))
    if isinstance(asked, Path):
        if not _has_tokenizer(asked):
            raise ValueError(f"tokenizer {asked} has none of {', '.join(TOKENIZER_FILES)}; give a folder that has, or {BYTES}")
        other = HfTokenizer(asked, config, folder)
        other.eos_ids = frozenset() if folder is None else other.eos_ids
        other.note = f"those of the tokenizer in {asked}"
        return other
    assert folder is not None
    return HfTokenizer(folder, config) if _has_tokenizer(folder) else NoTokenizer(folder, _eos_ids(folder, config, None))


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def _eos_ids(folder: Path, config: object, of_tokenizer: int | None) -> frozenset[int]:
    """The ids that the first of these files gives: generation_config.json, the model's config, the tokenizer."""
    of_config = config.get(EOS) if isinstance(config, Mapping) else getattr(config, EOS, None)
    path = folder / "generation_config.json"
    of_generation = read_object(path, "mend or remove it").get(EOS) if path.is_file() else None
    for where, given in ((path, of_generation), (folder / "config.json", of_config), (folder, of_tokenizer)):
        if given is not None:
            try:
                return eos_ids_of(given)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
    return frozenset()
