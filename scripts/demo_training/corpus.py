"""The prose that the demo models learn from: text files, cleaned, with passages of each held out."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

HELD_OUT = (0.90, 0.93)  # share of every book, by characters: not the end, where editors' notes may be


@dataclass(frozen=True)
class Book:
    name: str
    learned: tuple[str, ...]  # the text before the held-out passage, and the text behind it
    held_out: str


def read_books(folder: Path) -> tuple[Book, ...]:
    if not folder.is_dir():
        raise ValueError(f"the corpus {folder} is no folder; give a folder of books (*.txt)")
    files = sorted(folder.glob("*.txt"))
    books = tuple(_book(file) for file in files)
    if not any(book.learned for book in books):
        raise ValueError(f"the corpus {folder} has no text files (*.txt) with text in them; give a folder of books")
    return books


def _book(file: Path) -> Book:
    paragraphs = clean(file.read_text(encoding="utf-8", errors="replace")).split("\n")
    ends, total = [], 0
    for paragraph in paragraphs:
        total += len(paragraph) + 1
        ends.append(total)
    first, last = (sum(end <= share * total for end in ends) for share in HELD_OUT)
    parts = ("\n".join(paragraphs[:first]), "\n".join(paragraphs[last:]))
    return Book(file.stem, tuple(part for part in parts if part), "\n".join(paragraphs[first:last]))


def clean(text: str) -> str:
    """Cleans a text: a line is a paragraph; marks of emphasis and runs of spaces are gone."""
    paragraphs = re.split(r"\n\s*\n", text.replace("\r\n", "\n").replace("_", ""))
    return "\n".join(one for one in (" ".join(paragraph.split()) for paragraph in paragraphs) if one)


def held_out_passages(books: tuple[Book, ...], characters: int) -> str:
    """The beginning of each book's passage in whole paragraphs, with the same number of characters from each."""
    return "\n".join(_beginning(book.held_out, characters) for book in books) + "\n"


def _beginning(text: str, characters: int) -> str:
    taken, room = [], characters
    for paragraph in text.split("\n"):
        if len(paragraph) > room:
            break
        taken.append(paragraph)
        room -= len(paragraph) + 1
    return "\n".join(taken)
