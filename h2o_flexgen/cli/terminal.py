"""Lines as a terminal shows them: broken between words where they are too wide. A pipe or a file gets them whole, and the
document for programs as well."""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from unicodedata import category

BETWEEN = "  "  # between columns of a table
NARROWEST = 40  # a narrower terminal breaks lines itself
HANGING = "  "  # before the rest of a line that was broken
LABEL = re.compile(r"[\w./-]+ {2,}")  # at the beginning of a line of a report: later lines are indented to its width
COMMAND = re.compile(r"(^|\s)python -m \S+ -")  # a command to paste: broken lines end in a backslash
AMOUNT = re.compile(r"(?<=\d) (?=(?:[kMGT]?i?B|%|s|tokens/s)\b|%)")  # between a number and its unit
FIXED = "\u00a0"  # a space at which no line is broken


def page_width() -> int | None:
    """Columns of the terminal that is written to; None where it is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def printable(text: str) -> str:
    """The text of a model or a file without characters that a terminal would obey or could not write."""
    return "".join(one if one in "\n\t" or category(one) not in ("Cc", "Cs") else ascii(one)[1:-1] for one in text)


def say(lines: Iterable[str]) -> None:
    for line in wrapped(lines, page_width()):
        print(line, flush=True)


def say_document(document: object) -> None:
    """Writes a document of JSON, in one line. It is for programs: a terminal, of which it would fill a screen, gets none."""
    if page_width() is None:
        print(json.dumps(document), flush=True)


def wrapped(lines: Iterable[str], width: int | None) -> Iterator[str]:
    for line in lines:
        if width is None or width < NARROWEST or len(line.expandtabs()) <= width:
            yield line
        else:
            yield from _broken(line.expandtabs(), width)


def _broken(line: str, width: int) -> Iterator[str]:
    if line.startswith("| "):  # a row of a Markdown table: its cells stay whole
        line = " ".join(f"{cell.strip()} |".replace(" ", FIXED) for cell in line.strip("| ").split(" | "))
    label = LABEL.match(line)
    own = len(line) - len(line.lstrip())
    indent = " " * (label.end() if label else own) if label or own else HANGING
    is_command = COMMAND.search(line) is not None
    if is_command and "'" in line:  # inside quotes a backslash does not continue a line
        return iter([line])
    goes_on = " \\" if is_command else ""
    pieces = _pieces(line, width - len(goes_on), indent)
    return (f"{piece}{goes_on if place < len(pieces) else ''}" for place, piece in enumerate(pieces, start=1))


def _pieces(text: str, width: int, indent: str = "") -> list[str]:
    """The lines of a text. A word wider than the page stays whole."""
    fixed = AMOUNT.sub(FIXED, text)
    pieces = textwrap.wrap(
        fixed, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, replace_whitespace=False
    )
    return [piece.replace(FIXED, " ") for piece in pieces] or [""]


def table(rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """A table with columns as wide as their widest cell, all aligned left: numbers carry their units. If it is wider than the
    page, the widest cells take several lines."""
    widths = _widths(rows, width)
    return [line for row in rows for line in _row(row, widths)]


def _widths(rows: Sequence[Sequence[str]], page: int | None) -> list[int]:
    columns = list(zip(*rows))
    widths = [max(map(len, column)) for column in columns]
    least = [
        max((len(word) for cell in column for word in AMOUNT.sub(FIXED, cell).split(" ")), default=0) for column in columns
    ]
    room = None if page is None or page < NARROWEST else page - len(BETWEEN) * (len(columns) - 1)
    while room is not None and sum(widths) > room:
        place = max(range(len(widths)), key=lambda place: (widths[place] > least[place], widths[place]))
        if widths[place] <= least[place]:
            break
        widths[place] -= 1
    return widths


def _row(row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    cells = [_pieces(cell, width) if len(cell) > width else [cell] for cell, width in zip(row, widths)]
    for number in range(max(map(len, cells))):
        parts = (cell[number] if number < len(cell) else "" for cell in cells)
        yield BETWEEN.join(part.ljust(width) for part, width in zip(parts, widths)).rstrip()
