"""JSON and YAML from outside. Every fault of the text becomes the same kind of error."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import yaml

from h2o_flexgen.core.hints import one_line, shown

TOO_DEEP = "brackets are nested too deeply"


class NotADocument(ValueError):
    """An error that says in a few words what is wrong with a text."""


def parse_json(text: str | bytes) -> Any:
    """Parses JSON. A name that occurs twice in one object is an error, because it is not known which of the two counts."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except NotADocument:
        raise
    except RecursionError as error:
        raise NotADocument(TOO_DEEP) from error
    except ValueError as error:  # also raised for invalid UTF-8, and for numbers of more digits than Python reads
        raise NotADocument(one_line(error)) from error


def parse_yaml(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except RecursionError as error:
        raise NotADocument(TOO_DEEP) from error
    except (yaml.YAMLError, ValueError) as error:
        raise NotADocument(one_line(error)) from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counted = Counter(name for name, _ in pairs)
        twice = counted.most_common(1)[0][0]
        raise NotADocument(f"{shown(twice)} stands there twice")
    return found
