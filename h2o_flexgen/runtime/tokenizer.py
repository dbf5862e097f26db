"""Tokenizers: that of a model folder, or bytes for a model without one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from h2o_flexgen.models.config_values import EOS, eos_ids_of
from h2o_flexgen.models.json_file import read_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


Message = Mapping[str, str]  # role ("system", "user", "assistant") and content


class Tokenizer(Protocol):
    @property
    def eos_ids(self) -> frozenset[int]:
        """Every one of them ends a row."""

    def encode(self, text: str) -> list[int]:
        """With the special tokens that the model expects around a prompt."""

    def encode_more(self, text: str) -> list[int]:
        """Text that stands behind other text: no special tokens but those that are written in it."""

    def decode(self, ids: Sequence[int]) -> str:
        """Without special tokens."""

    @property
    def has_chat_template(self) -> bool: ...

    def render_chat(self, messages: Sequence[Message]) -> str:
        """As the model's chat template has them, up to where its answer begins; special tokens are written out."""


class HfTokenizer:
    """The tokenizer of a model folder. Code that comes with a folder is never run, and nothing is fetched."""

    def __init__(self, folder: Path, config: object = None) -> None:
        from transformers import AutoTokenizer  # takes seconds to import

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        except Exception as error:  # whatever a broken file makes the library raise
            reason = str(error).strip().partition("\n")[0]
            raise ValueError(f"the tokenizer in {folder} cannot be read ({reason}); mend or remove its files") from error
        self.eos_ids = _eos_ids(folder, config, self._tokenizer.eos_token_id)

    @property
    def of_transformers(self) -> PreTrainedTokenizerBase:
        """For who works with it as with any other tokenizer of that library."""
        return self._tokenizer

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, verbose=False)["input_ids"])  # how long it may be is the engine's business

    def encode_more(self, text: str) -> list[int]:
        return list(self._tokenizer(text, verbose=False, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Spaces are left as the tokens have them: "cleaned up" text would change behind what is already shown."""
        return cast(str, self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self._tokenizer, "chat_template", None))

    def render_chat(self, messages: Sequence[Message]) -> str:
        try:
            text = self._tokenizer.apply_chat_template([*map(dict, messages)], tokenize=False, add_generation_prompt=True)
        except Exception as error:  # whatever a template raises
            reason = str(error).strip().partition("\n")[0]
            raise ValueError(f"the model's chat template refuses this turn ({reason}); try another --style") from error
        return cast(str, text)


class ByteTokenizer:
    """For models without tokenizer files: a byte is a token. Every text can be encoded and every id decoded, at any vocabulary;
    ids that stand for no byte show as numbers."""

    SPECIALS = 4  # ids 0 to 3 have a meaning in most vocabularies
    has_chat_template = False

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


def load_tokenizer(folder: Path | None, config: object, vocab: int) -> Tokenizer:
    """`config` is the model's, as an object or as a mapping: it may name the end of sequence."""
    if folder is None:
        return ByteTokenizer(vocab)  # random weights never mean an end
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return ByteTokenizer(vocab, _eos_ids(folder, config, None))
    return HfTokenizer(folder, config)


def _eos_ids(folder: Path, config: object, of_tokenizer: int | None) -> frozenset[int]:
    """The first that says so: generation_config.json, the model's config, the tokenizer."""
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
