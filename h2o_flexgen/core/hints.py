"""Parts of error messages: a value that was given, and the nearest known name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from reprlib import Repr

LIKENESS = 0.7  # how alike two names are before one is suggested for the other, from 0 to 1
SHORT, LIKENESS_OF_SHORT = 3, 2 / 3  # of names of so many characters one may be wrong
LONGEST_VALUE = 80  # characters of a value in a message
LONGEST_WORD = 200  # characters of any other word in a message: names of files are long
QUOTED = re.compile(rf"(?P<quote>['\"`])(?P<text>[^'\"`]{{{LONGEST_WORD + 1},}})(?P=quote)")
IN_JSON = {"None": "null", "True": "true", "False": "false"}
OF_PYTHON = re.compile(rf"""(?<!\w)'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|(?<![\w/.-])(?:{"|".join(IN_JSON)})(?![\w/-]|\.\w)""")
WORD = re.compile(rf"\S{{{LONGEST_WORD + 1},}}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message that suggests the nearest known name; empty where none is near."""
    near = nearest(name, known)
    return "" if near is None else f"; did you mean {near}?"


def refuse_unknown(what: str, given: Iterable[str], known: Iterable[str], instead: Mapping[str, str]) -> None:
    """Reports all unknown names in one line, each with its replacement or the nearest known name."""
    names = list(known)
    wrong = [name for name in given if name not in names]
    if wrong:
        advice = (f": {instead[name]}" if name in instead else did_you_mean(name, names) for name in wrong)
        raise ValueError(f"unknown {what} {', and '.join(f'{name!r}{words}' for name, words in zip(wrong, advice))}")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like this one; None where none is near."""
    if len(name) > LONGEST_VALUE:  # it is not meant as a name, and comparing takes long
        return None
    likeness = LIKENESS_OF_SHORT if len(name) == SHORT else LIKENESS
    return next(iter(get_close_matches(name, list(known), n=1, cutoff=likeness)), None)


def known_of_many(name: object, known: Iterable[str], page: str) -> str:
    """The end of a message where too many names are known to list them: those most like this one, and the page with all."""
    is_name = isinstance(name, str) and len(name) <= LONGEST_VALUE
    near = get_close_matches(str(name), list(dict.fromkeys(known)), n=3) if is_name else []
    return f"{'; known and like it: ' if near else ''}{', '.join(near)}; {page} lists all that are"


def shown(value: object) -> str:
    """The value as an error message shows it: as Python writes it, shortened where it is long or deep."""
    writer = Repr()
    writer.maxstring = writer.maxother = writer.maxlong = LONGEST_VALUE
    try:
        text = writer.repr(value)
    except ValueError:  # a whole number of thousands of digits
        text = "a number of thousands of digits"
    length = f" ({len(value)} characters)" if isinstance(value, str) and "..." in text and len(value) > LONGEST_VALUE else ""
    text = shortened(text)
    return (_ends(text) if len(text) > LONGEST_WORD else text) + length


def shortened(message: str) -> str:
    """The message with every quotation and every word cut to a readable length."""
    message = QUOTED.sub(lambda found: _ends(found["text"], found["quote"]), message)
    return WORD.sub(lambda found: _ends(found[0]), message)


def as_in_json(message: str) -> str:
    """The message about what came as JSON, with null, true and false as they are written there. Texts stay as they are."""
    return OF_PYTHON.sub(lambda found: IN_JSON.get(found[0], found[0]), message)


class Mistakes:
    """What is wrong with things that are read one without the other, to be said in one line."""

    def __init__(self) -> None:
        self._found: dict[str, ValueError] = {}  # each once

    @contextmanager
    def noted(self, worded: Callable[[str], str] = str) -> Iterator[None]:
        """A context that ends at the first mistake in it. `worded`: how it is said."""
        try:
            yield
        except ValueError as error:
            self._found.setdefault(worded(str(error)), error)

    def refuse(self) -> None:
        """Refuses all of it, if anything is wrong."""
        if self._found:
            raise ValueError("; also ".join(self._found)) from next(iter(self._found.values()))


def not_installed(what: str, extra: str) -> str:
    """The message for something that an extra of the package brings."""
    return f"{what} is not installed; it comes with the extra [{extra}]: pip install -e '.[{extra}]'"


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


def _ends(text: str, quote: str = "") -> str:
    """The beginning and the end of a long text."""
    half = LONGEST_VALUE // 2
    return f"{quote}{text[:half]}...{text[-half:]}{quote} ({len(text)} characters)"
