"""Reading the JSON of a model folder: whatever stands there, the outcome is a value or an error of one line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SHOWN_CHARACTERS = 80


class NotJSON(ValueError):
    """A text that is no JSON, in a few words."""


def parse_json(text: str | bytes) -> Any:
    """A name that stands twice in the same object is an error: which of the two counts, nobody said."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except NotJSON:
        raise
    except RecursionError as error:
        raise NotJSON("it is nested too deeply") from error
    except ValueError as error:  # no UTF-8, too, and numbers of more digits than Python reads
        raise NotJSON(shown(error)) from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise NotJSON(f"{shown(twice)} stands there twice")
    return found


def read_object(path: Path, advice: str) -> Mapping[str, Any]:
    """The JSON object that a file holds; `advice` is what to do about one that cannot be read."""
    try:
        found = parse_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror or type(error).__name__}); {advice}") from error
    except NotJSON as error:
        raise ValueError(f"{path} is no JSON ({error}); {advice}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object; {advice}")
    return found


def shown(value: object) -> str:
    """A value in a message: on one line, and not all of a long one."""
    text = " ".join((str(value) if isinstance(value, (str, Exception)) else _repr(value)).split())
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."


def _repr(value: object) -> str:
    try:
        return repr(value)
    except (RecursionError, ValueError):  # nested deeply, or a whole number of thousands of digits
        return f"a {type(value).__name__}"
