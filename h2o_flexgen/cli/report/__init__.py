"""Entries: what a report says, each in words for people and as values for programs. Lines, tables and JSON documents come from
the same list of entries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from h2o_flexgen.cli.terminal import page_width, table

LABEL_WIDTH = 10  # columns


@dataclass(frozen=True)
class Entry:
    label: str  # before the words of a line, or the head of a column; nothing where words stand alone
    words: tuple[str, ...]  # a line each; none where an entry is for programs alone
    values: Mapping[str, object]  # by key of the JSON document; none where an entry is for people alone

    @property
    def lines(self) -> Sequence[str]:
        if not self.label:
            return self.words
        return [f"{label:{LABEL_WIDTH}}{line}" for label, line in zip((self.label, *[""] * len(self.words)), self.words)]


def entry(label: str, words: str | Iterable[str], **values: object) -> Entry:
    """An entry under a label."""
    return Entry(label, (words,) if isinstance(words, str) else tuple(words), values)


def told(*words: str, **values: object) -> Entry:
    """An entry without a label."""
    return Entry("", words, values)


def noted(**values: object) -> Entry:
    """An entry for programs alone."""
    return Entry("", (), values)


def lines_of(entries: Iterable[Entry]) -> list[str]:
    return [line for one in entries for line in one.lines]


def document_of(entries: Iterable[Entry]) -> dict[str, object]:
    return {key: value for one in entries for key, value in one.values.items()}


def table_of(rows: Iterable[Sequence[Entry]]) -> list[str]:
    """A row for each list of entries, all of the same labels."""
    shown = [[one for one in row if one.label] for row in rows]
    return table([[one.label for one in shown[0]], *([" ".join(one.words) for one in row] for row in shown)], page_width())
