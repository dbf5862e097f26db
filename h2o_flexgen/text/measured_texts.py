"""Texts to measure a model on: read from files, turned into tokens, cut into windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from h2o_flexgen.checkpoints.model_places import held_out_prose
from h2o_flexgen.core.files import read_text
from h2o_flexgen.text.tokenizer import Tokenizer

USUAL_TOKENS, USUAL_TEXTS = 512, 8  # of texts that are read twice, and so many of them


@dataclass(frozen=True)
class Text:
    name: str
    content: str

    @classmethod
    def read(cls, file: str) -> Text:
        content = read_text(Path(file).expanduser(), f"text {file}")
        if not content.strip():
            raise ValueError(f"text {file} is empty; give a file with a text in it")
        return cls(file, content)

    @classmethod
    def held_out(cls) -> Text:
        """Prose that comes with the package and that its own models have never seen."""
        return cls("of the package", held_out_prose())


@dataclass(frozen=True)
class Windows:
    ids: tuple[tuple[int, ...], ...]
    of_texts: int  # all windows of the texts; `ids` may be fewer


def start_tokens(tokenizer: Tokenizer) -> list[int]:
    """The tokens that every text begins with."""
    text = "a text"
    whole, plain = tokenizer.encode(text), tokenizer.encode_more(text)
    begun = len(whole) - len(plain)
    return whole[:begun] if whole[begun:] == plain else []


def windows(texts: Sequence[Text], tokenizer: Tokenizer, length: int, count: int, flag: str = "--window") -> Windows:
    """At most `count` whole windows that do not overlap, taken evenly from all texts; each begins as a text does.
    `flag` is the one that says how long they are."""
    start = start_tokens(tokenizer)
    own = length - len(start)
    found = []
    for text in texts:
        ids = tokenizer.encode_more(text.content)
        if len(ids) < own:
            raise ValueError(
                f"text {text.name} has {len(ids) + len(start)} tokens, but a window takes {length}; "
                f"give a longer text or a smaller {flag}"
            )
        found += [(*start, *ids[place : place + own]) for place in range(0, len(ids) - own + 1, own)]
    taken = min(count, len(found))
    return Windows(tuple(found[place * len(found) // taken] for place in range(taken)), len(found))


def described(texts: Sequence[Text], count: int, tokens: int) -> str:
    """What was read, for people."""
    read = f"{count} texts" if count > 1 else "1 text"
    return f"{read} of {tokens} tokens: {', '.join(Path(text.name).stem for text in texts)}"


def checksum(*parts: object) -> str:
    """Identifies the measured data."""
    return blake2b(repr(parts).encode(), digest_size=8).hexdigest()
