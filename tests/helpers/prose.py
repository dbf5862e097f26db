"""A reader of Markdown: its passages (paragraphs, list items, table cells, headings), their sentences, and its long lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

GENERATED, GENERATED_END = re.compile(r"<!-- (.+): written by .*-->"), "<!-- {}: end -->"
FENCE, CODE_SPAN, LINK = re.compile(r"\s*```"), re.compile(r"(`+).+?\1", re.DOTALL), re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
HEADING, TABLE, ITEM = re.compile(r"#+ "), re.compile(r"\s*\|"), re.compile(r"\s*(?:[*-]|\d+\.)\s+")
END = re.compile(r"(?<=[.!?])\s+|(?<=[.!?][)\"*_])\s+|(?<=[.!?][*]{2})\s+")
ABBREVIATED = ("e.g.", "i.e.", "vs.", "cf.", "al.", "etc.")
WORD = re.compile(r"\S*\w\S*")


@dataclass(frozen=True)
class Passage:
    line: int  # where it begins
    text: str


@dataclass
class Prose:
    """What a reader has read so far of the lines that are neither code nor generated."""

    lines: list[Passage] = field(default_factory=list)  # one by one, outside of tables
    passages: list[Passage] = field(default_factory=list)
    _open: list[Passage] = field(default_factory=list)

    def end_passage(self) -> None:
        if self._open:
            self.passages.append(Passage(self._open[0].line, "\n".join(each.text for each in self._open)))
        self._open = []

    def take(self, line: Passage) -> None:
        if TABLE.match(line.text):
            self.end_passage()
            cells = line.text.strip().strip("|").split("|")
            self.passages += [Passage(line.line, cell.strip()) for cell in cells if WORD.search(cell)]
            return
        self.lines.append(line)
        starts = ITEM.match(line.text)
        if starts or HEADING.match(line.text) or not line.text.strip():
            self.end_passage()
        if text := line.text[starts.end() if starts else 0 :].strip():
            self._open.append(Passage(line.line, text))
        if HEADING.match(line.text):
            self.end_passage()


def read_prose(markdown: str) -> Prose:
    prose = Prose()
    for line in prose_lines(markdown):
        prose.take(line)
    prose.end_passage()
    return prose


def prose_lines(markdown: str) -> Iterator[Passage]:
    """The lines outside of fenced code and of generated parts; a line that is left out counts as an empty one."""
    until = ""  # the line that ends what is left out now
    for number, text in enumerate(markdown.splitlines(), 1):
        left_out = bool(until)
        if until:
            until = "" if text.strip() == until else until
        elif FENCE.match(text):
            until, left_out = "```", True
        elif begun := GENERATED.match(text):
            until, left_out = GENERATED_END.format(begun[1]), True
        yield Passage(number, "" if left_out else text)


def sentences(text: str) -> list[str]:
    """The sentences of a passage, in which a code span and a link are one word each."""
    plain = LINK.sub("LINK", CODE_SPAN.sub("CODE", text))
    found: list[str] = []
    for part in END.split(" ".join(plain.split())):
        if found and found[-1].endswith(ABBREVIATED):
            found[-1] += f" {part}"
        else:
            found.append(part)
    return [each for each in found if WORD.search(each)]


def shown(line: str) -> str:
    """A line as it is read: links by their text."""
    return LINK.sub(lambda link: link[1], line)


def words(sentence: str) -> int:
    return len(WORD.findall(sentence))
