"""Opening a tokenizer: the one in a model's folder, another one, bytes, or the place of one that is not there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from h2o_flexgen.core.allowed_values import AUTO
from h2o_flexgen.core.hints import shown
from h2o_flexgen.models.config_values import EOS, eos_ids_of
from h2o_flexgen.models.files import read_object
from h2o_flexgen.text.chat_template import render
from h2o_flexgen.text.tokenizer import BYTES, TOKENIZER_FILES, ByteTokenizer, Message, NoTokenizer, Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
        try:
            return render(self._tokenizer.get_chat_template(), messages, self._tokenizer.special_tokens_map)
        except Exception as error:  # whatever a template raises
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise ValueError(f"the model's chat template refuses this turn ({shown(reason)}); try another --style") from error


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
